"""Gradients of attention: the public calls, their checks and the operation's record. How a checked call is carried out
is in :mod:`cufa.calls.calls`, choices in :mod:`cufa.plan.planner`."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..plan.dense import BACKWARD
from ..plan.planner import Plan
from ..problem.checks import check_flag
from ..problem.mask import Mask
from ..problem.options import Options, check_causal, resolve_mask
from .call import BackwardCall
from .calls import plan_shapes, run
from .warm import find, typed


def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    precision: str | None = None,
    dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    device: str | None = None,
) -> Any:
    """Gradients of :func:`flash_attention` with respect to q, k and v, in memory that grows with the sequence, not
    with its square: FlashAttention-2 (Dao, 2023, Algorithm 2), on GPUs from sm_80 on and in NumPy.

    >>> out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)  # doctest: +SKIP
    >>> dq, dk, dv = cufa.flash_attention_backward(dout, q, k, v, out, lse, causal=True)  # doctest: +SKIP

    Parameters
    ----------
    dout : array, (batch, heads, seqlen_q, head_dim)
        Gradient of the loss with respect to out. q's shape, dtype and place; its strides are its own.
    q, k, v : array
        What the forward call was given, or arrays of the same values: as for :func:`flash_attention`.
    out, lse : array
        What it returned with ``return_lse=True``. lse is contiguous float32, (batch, heads, seqlen_q) whatever the
        layout; float64 where q is.
    causal, window, mask, softcap, scale, alibi_slopes, sink, seqlens_q, seqlens_k, layout, precision
        Those of the forward call: all that it was given. precision may differ.
    algorithm : "auto", "fa2" or "fa3"
        Which kernel computes it; it need not be the one that computed out.
    dlse : array, optional
        Gradient of the loss with respect to lse, of lse's shape and dtype, where the loss depends on it.
    deterministic : bool
        The same bits in every run. Without it that holds for dk and dv; dq is summed in an order that depends on
        when thread blocks run, so that its last bits may differ. The CPU path is always deterministic.
    dq, dk, dv : array, optional
        Where to write the results: shape, dtype and kind of q, k and v; must not overlap an input or each other.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed, as for :func:`flash_attention`.

    Returns
    -------
    dq, dk, dv
        With shape, layout and dtype of q, k and v; sums over the query heads of a group are in float32. Queries that
        see no key, keys that no query sees, and what lies behind ``seqlens_q`` and ``seqlens_k`` have gradients of
        exactly 0.
    dsink
        Only with ``sink=``: the gradient of the sink, (heads,), in lse's dtype. ALiBi's slopes have none.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what to do; nothing has been launched. What cannot be seen from arrays:
        that out and lse belong to other inputs, or to a call with another mask, scale or cap. Then the gradients are
        simply wrong. (Attention over a part of the keys may be given out and lse of the whole: the results are the
        part's share of the gradients, as for sequences that are spread over several GPUs.)

    Notes
    -----
    Launches on CuPy's current stream and does not synchronise (NumPy inputs on a GPU do, to bring the results
    back). Its workspace, which :func:`plan_backward` prints, is from CuPy's memory pool; in a CUDA graph, which it
    can be captured in after one warm-up call, it is kept until the first capture after the graph is gone.

    On a GPU all inputs must be finite, those that the mask hides included.

    The CPU takes every combination. On a GPU (a band mask is ``full()``, ``causal()`` or ``window()``):

    - fa3_backward (sm_90): float16, bfloat16; head dims 8 to 128, multiples of 8; all masks; with band masks also
      padded lengths, packed lengths, ALiBi, sinks and a fixed order of additions.
    - fa3_backward_wide (sm_90): float16, bfloat16; head dims 136 to 256, multiples of 8; all masks; with band masks
      also padded lengths, packed lengths, ALiBi, sinks and a fixed order of additions.
    - fa2_backward (sm_80 or later): float16, bfloat16; all masks; with band masks also padded lengths, packed
      lengths, ALiBi, sinks and a fixed order of additions.
    - fa2_backward_f32 (sm_80 or later): float32, tf32; all masks; with band masks also a fixed order of additions.
    """
    if type(causal) is not bool:  # before a call that was seen: to it 1.0 would be True
        causal = check_causal(causal)  # type: ignore[unreachable]
    if type(deterministic) is not bool:
        deterministic = check_flag("deterministic", deterministic)  # type: ignore[unreachable]
    options = (
        causal, typed(window), mask, softcap, type(softcap), scale, type(scale), layout, algorithm, precision,
        deterministic, device,
    )  # fmt: skip
    given: tuple[Any, ...] = dout, q, k, v, out, lse, dlse, dq, dk, dv
    if alibi_slopes is not None or sink is not None or seqlens_q is not None or seqlens_k is not None:
        given += alibi_slopes, sink, seqlens_q, seqlens_k, None, None, None
    seen, _, addresses = find(BACKWARD, given, options)
    if seen is not None:
        return seen(given, addresses)
    wanted = ("dq", "dk", "dv") if sink is None else ("dq", "dk", "dv", "dsink")
    mask = resolve_mask(causal, window, mask)
    asked = Options(mask, softcap, scale, precision, layout, algorithm, deterministic=deterministic)
    return run(BackwardCall.read(given, wanted, asked), device, options)


def plan_backward(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: npt.DTypeLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    precision: str | None = None,
    deterministic: bool = False,
    device: str | None = None,
) -> Plan:
    """What :func:`flash_attention_backward` would run, in how much memory, and why; needs no GPU and runs nothing.

    Arguments are those of :func:`plan`, and ``deterministic`` of :func:`flash_attention_backward`.

    >>> print(cufa.plan_backward((1, 8, 4096, 128), causal=True, device="sm_90"))  # doctest: +SKIP
    """
    mask = resolve_mask(causal, window, mask)
    deterministic = check_flag("deterministic", deterministic)
    options = Options(mask, softcap, scale, precision, layout, algorithm, deterministic=deterministic)
    optional = {"alibi_slopes": alibi_slopes, "sink": sink, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return plan_shapes(q, k, v, dtype, device, options, optional, "backward")
