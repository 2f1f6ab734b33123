"""Merging partial results of attention by their log-sum-exp: exact, in any order, for any number of them.

Over disjoint sets of keys A and B, with m = max(lse_A, lse_B) and w_X = exp(lse_X - m),

    out = (w_A out_A + w_B out_B) / (w_A + w_B),    lse = m + log(w_A + w_B)

is attention over both: exp(lse) is the softmax denominator of a partial result (Flash-Decoding, Dao et al., 2023;
FlashAttention, Dao et al., 2022, section 3.1). A partial result over no keys has lse = -inf and weight 0.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..problem.checks import as_array, is_device_array
from ..problem.typing import Layout
from ..run.cpu.combine import combine
from . import arrays, shapes

_LSE = ("float32", "float64")


def merge_attention_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: Layout = "bhsd"
) -> tuple[Any, Any]:
    """Attention over two sets of keys, from attention over each: for prefixes that sequences share, caches
    spread over several devices, or contexts in more than one buffer.

    ``m = max(lse_a, lse_b); w_a, w_b = exp(lse_a - m), exp(lse_b - m)``;
    ``out = (w_a * out_a + w_b * out_b) / (w_a + w_b)``; ``lse = m + log(w_a + w_b)``. Exact but for rounding:
    computed in float32 (float64 when an input is), rounded once.

    A ``sink`` must count once: pass it to one of the two calls, or merge a partial result with out = 0 and lse = sink.

    Parameters
    ----------
    out_a, out_b : array, (..., head_dim)
        Partial results for the same queries, as :func:`flash_attention` and :func:`flash_decode` return
        them: float16, bfloat16, float32 or float64, both NumPy or both on one GPU, any strides.
    lse_a, lse_b : array, (...)
        Their log-sum-exp, natural logarithm, float32 or float64: ``out``'s shape without its last axis,
        and for layout "bshd" with the other order of axes, (batch, heads, tokens), as those calls return it.
    layout : "bhsd" or "bshd"
        Axis order of out_a, out_b and the merged out; "bshd" is (batch, tokens, heads, head_dim).

    Returns
    -------
    out, lse
        New arrays with shape and dtype of out_a and lse_a. If one lse is -inf, the result is the other partial result;
        if both are, out is 0 and lse -inf. To merge more than two, merge again.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure.

    >>> o1, l1 = cufa.flash_attention(q, prefix_k, prefix_v, return_lse=True)
    >>> o2, l2 = cufa.flash_decode(q, k_cache, v_cache, return_lse=True)
    >>> out, lse = cufa.merge_attention_states(o1, l1, o2, l2)
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    given = {name: as_array(name, x) for name, x in given.items()}
    _check(given, layout)
    out_a, lse_a, out_b, lse_b = given.values()
    if layout == "bshd":
        lse_a, lse_b = lse_a.swapaxes(1, 2), lse_b.swapaxes(1, 2)
    merge = _merge_on_gpu if is_device_array(out_a) else _merge_on_cpu
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    return out, lse.swapaxes(1, 2) if layout == "bshd" else lse


def merge_into(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, with_lse: bool) -> None:
    """Merge as :func:`merge_attention_states`, without checks, into ``out_b`` and ``lse_b``. Without ``with_lse``,
    ``lse_b`` is undefined afterwards."""
    if is_device_array(out_a):
        _merge_on_gpu(out_a, lse_a, out_b, lse_b, out_b, lse_b, with_lse)
    else:
        out_b[...], lse_b[...] = _merge_on_cpu(out_a, lse_a, out_b, lse_b)


@np.errstate(all="ignore")
def _merge_on_cpu(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    wide = _compute_dtype(out_a, lse_a)
    out, lse = combine(
        np.stack([out_a.astype(wide), out_b.astype(wide)]), np.stack([lse_a.astype(wide), lse_b.astype(wide)])
    )
    return out.astype(out_a.dtype), lse.astype(lse_a.dtype)


def _compute_dtype(out: Any, lse: Any) -> Any:
    return np.float64 if np.float64 in (out.dtype, lse.dtype) else np.float32


def _check(given: dict[str, Any], layout: str) -> None:
    out_a, lse_a, out_b, lse_b = given.values()
    shapes.check_layout(layout)
    arrays.same_place(given)
    for name, x, served in (("out_a", out_a, shapes.FORWARD_DTYPES), ("lse_a", lse_a, _LSE)):
        if str(x.dtype) not in served:
            raise TypeError(f"{name} is {x.dtype}; merging takes {', '.join(served)}: convert with .astype")
    for name, x, other, y in (("out_b", out_b, "out_a", out_a), ("lse_b", lse_b, "lse_a", lse_a)):
        if x.dtype != y.dtype:
            raise TypeError(f"{name} is {x.dtype} but {other} is {y.dtype}: convert with .astype")
        if x.shape != y.shape:
            raise ValueError(f"{name} has shape {x.shape} but {other} has {y.shape}: they must be equal")
    if out_a.ndim < 1 or (layout == "bshd" and out_a.ndim != 4):
        raise ValueError(f"out_a has shape {out_a.shape}; layout {layout!r} takes {shapes.AXES[layout]}")
    expected = out_a.shape[:-1]
    if layout == "bshd":
        expected = (expected[0], expected[2], expected[1])
    if lse_a.shape != expected:
        hint = ""
        if layout == "bhsd" and out_a.ndim == 4 and lse_a.shape == tuple(out_a.shape[i] for i in (0, 2, 1)):
            hint = "; for results of layout 'bshd' pass layout='bshd'"
        raise ValueError(
            f"lse_a has shape {lse_a.shape} but out_a has {out_a.shape}: layout {layout!r} takes "
            f"{expected}{hint}"
        )


# --- On a GPU: one pass over each result, whatever the strides ---------------------------------------------

_WEIGHTS = """
const W m = a_lse > b_lse ? a_lse : b_lse;
const W shift = isinf(m) && m < 0 ? W(0) : m;
const W w_a = exp(W(a_lse) - shift), w_b = exp(W(b_lse) - shift), l = w_a + w_b;
"""
_OUT = """
const W of_a = w_a == 0 ? W(0) : w_a * W(a), of_b = w_b == 0 ? W(0) : w_b * W(b);
out = T((of_a + of_b) / (l == 0 ? W(1) : l));
"""


@functools.cache
def _kernels(wide: str) -> tuple[Any, Any]:
    import cupy

    types = f"typedef {wide} W;\n"
    return (
        cupy.ElementwiseKernel(
            "T a, L a_lse, T b, L b_lse", "T out", _WEIGHTS + _OUT, "cufa_merge_out", preamble=types
        ),
        cupy.ElementwiseKernel(
            "L a_lse, L b_lse", "L lse", _WEIGHTS + "lse = shift + log(l);", "cufa_merge_lse", preamble=types
        ),
    )


def _merge_on_gpu(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any = None, lse: Any = None, with_lse: bool = True
) -> tuple[Any, Any]:
    """(out, lse), written to the arrays ``out`` and ``lse`` if given; these may be inputs."""
    import cupy

    merge_out, merge_lse = _kernels("double" if _compute_dtype(out_a, lse_a) is np.float64 else "float")
    with cupy.cuda.Device(out_a.data.device_id):
        out = merge_out(out_a, lse_a[..., None], out_b, lse_b[..., None], *([] if out is None else [out]))
        if with_lse:  # last: out is computed from both inputs' lse
            lse = merge_lse(lse_a, lse_b, *([] if lse is None else [lse]))
        return out, lse
