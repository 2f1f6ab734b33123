"""The fixed maximum of a softmax (``softmax_max=``): checks of a decoding call, the norms of keys that bound scores,
and calibration on a model (Hong et al., FlashDecoding++, arXiv 2311.01282, section 3)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..problem.checks import as_array, is_device_array, module_of
from ..problem.problem import Problem
from ..problem.scores import safe_sums
from .optional_operands import check_numbers, check_small
from .shapes import LAYOUTS, check_layout

_MOST_ELEMENTS = 1 << 26
"""Elements of a cache that :func:`key_norms` widens at once."""


def option_and_array(x: Any) -> tuple[Any, Any]:
    """(``softmax_max`` as an option, the array of the heads' own maxima or None)."""
    single = isinstance(x, (str, int, float, np.integer, np.floating)) and not isinstance(x, bool)
    return (x, None) if x is None or single else ("heads", x)


def check(inputs: dict[str, Any], problem: Problem) -> None:
    """Check ``key_norms`` and ``softmax_max`` in place. Raises TypeError or ValueError."""
    reads = problem.softmax_max == "bound" and problem.softcap is None
    norms = inputs.get("key_norms")
    if problem.invariant and problem.softmax_max != "":
        raise ValueError(
            f"softmax_max={problem.softmax_max!r} with invariant=True: rows that leave the range of a fixed maximum "
            "would depend on each other; leave one of the two out"
        )
    if reads and norms is None:
        raise ValueError(
            "softmax_max='bound' without softcap needs key_norms, (batch, kv_heads): make them once with "
            "cufa.key_norms(k_cache, ...), later appends raise them"
        )
    if norms is not None and not reads:
        raise ValueError("key_norms goes with softmax_max='bound' without softcap: leave key_norms out")
    if inputs.get("softmax_max") is not None:
        inputs["softmax_max"] = check_numbers(
            "softmax_max", inputs["softmax_max"], ((problem.heads,),), problem
        )
    if norms is not None:
        _check_norms(norms, problem, on_device=is_device_array(inputs["q"]))


def _check_norms(norms: Any, problem: Problem, on_device: bool) -> None:
    check_small("key_norms", norms, "float32", "f", ((problem.batch, problem.kv_heads),), "(batch, kv_heads)")
    if str(norms.dtype) != "float32" or not norms.flags.c_contiguous:
        raise TypeError(
            f"key_norms is {norms.dtype} with strides {norms.strides}: pass float32, C-contiguous"
        )
    appended = problem.cache.new_tokens > 0
    if appended and is_device_array(norms) != on_device:
        raise TypeError("key_norms is not where q is, but k_new raises it in place: pass it where q is")
    if isinstance(norms, np.ndarray):
        if appended and not norms.flags.writeable:
            raise ValueError("key_norms is read-only, but k_new raises it in place: pass a writeable array")
        wrong = np.argwhere(~(np.isfinite(norms) & (norms >= 0)))
        if len(wrong):
            raise ValueError(
                f"key_norms{wrong[0].tolist()} is {norms[tuple(wrong[0])]}: a norm is finite and at least 0"
            )


def key_norms(
    k_cache: Any, *, cache_seqlens: Any = None, block_table: Any = None, k_scale: Any = None, layout: str = "bhsd"
) -> Any:  # fmt: skip
    """The largest Euclidean norm of the valid keys of each sequence and key/value head, (batch, kv_heads) float32:
    ``key_norms`` of :func:`flash_decode`, for caches that were filled elsewhere.

    Arguments are those of :func:`flash_decode`; lengths and block table are not checked. NumPy for NumPy caches, CuPy
    for device arrays, on CuPy's current stream.

    >>> k = np.ones((2, 8, 4096, 64), np.float32)
    >>> float(cufa.key_norms(k, cache_seqlens=[5, 0])[0, 0])
    8.0
    """
    check_layout(layout)
    k = as_array("k_cache", k_cache)
    if k.ndim != 4:
        raise ValueError(f"k_cache has shape {k.shape}: four axes are needed, as for flash_decode")
    k, xp = k.transpose(LAYOUTS[layout]), module_of(k)
    norms = xp.empty(k.shape[:3], np.float32)
    step = max(1, _MOST_ELEMENTS // max(k[:1].size, 1))
    for first in range(0, len(k), step):
        wide = _widened(k[first : first + step], xp)
        wide *= wide
        norms[first : first + step] = xp.sqrt(wide.sum(axis=-1))
    if k_scale is not None:
        norms *= _slot_scales(xp.asarray(k_scale, np.float32), k, block_table is not None, xp)
    if block_table is not None:
        pages = norms[xp.clip(xp.asarray(block_table), 0, len(k) - 1)].swapaxes(1, 2)
        norms = pages.reshape(*pages.shape[:2], -1)
    if cache_seqlens is not None:
        lengths = xp.broadcast_to(xp.asarray(cache_seqlens), norms.shape[:1])
        norms = xp.where(xp.arange(norms.shape[2]) < lengths[:, None, None], norms, np.float32(0))
    return norms.max(axis=2) if norms.shape[2] else xp.zeros(norms.shape[:2], np.float32)


def _widened(x: Any, xp: Any) -> Any:
    name = str(x.dtype)
    if name in ("uint8", "float8_e4m3fn"):
        numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return xp.asarray(numbers)[x.view(np.uint8)]
    if name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _slot_scales(scale: Any, k: Any, paged: bool, xp: Any) -> Any:
    """The scale of each slot of a cache."""
    from ..run.cpu.cache import tokens_a_scale

    if scale.ndim < 2:
        return xp.broadcast_to(scale, (k.shape[1],))[None, :, None]
    block = tokens_a_scale(scale, k, paged)
    return scale.reshape(*scale.shape[:2], -1)[:, :, np.arange(k.shape[2]) // block]


def calibrate_softmax_max(lse: Any, *, dtype: str = "bfloat16") -> tuple[Any, Any, Any]:
    """A fixed maximum for each head, ``softmax_max`` of :func:`flash_decode`, from log-sum-exps of sample inputs.

    Parameters
    ----------
    lse : array, (batch, heads, tokens)
        The log-sum-exps of samples, from ``return_lse=True`` of :func:`flash_decode` or :func:`flash_attention`,
        without sinks.
    dtype : str
        q's dtype; "float16" if the cache has 8 bits. Weights of float16 range from 2^-24 to 2^16; for other dtypes they
        have the range of float32.

    Returns
    -------
    softmax_max, lowest, highest : float32, (heads,)
        The maxima, and the least and greatest log-sum-exp of the samples. The middle of the samples' range is placed at
        three quarters of the safe range, because a split sees only some of a row's keys: its sums are smaller. Rows
        whose sums leave the safe range are computed again with their own maxima.
    """
    x = as_array("lse", lse)
    if x.ndim != 3 or x.dtype.kind != "f":
        raise ValueError(
            f"lse has shape {x.shape} and dtype {x.dtype}: it takes floats (batch, heads, tokens)"
        )
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"dtype={dtype!r} is not known; use 'float16', 'bfloat16', 'float32' or 'float64'")
    low, high = safe_sums(dtype == "float16")
    by_head = (x.get() if is_device_array(x) else x).swapaxes(0, 1).reshape(x.shape[1], -1).astype(np.float32)
    finite = np.isfinite(by_head)
    lowest = np.where(finite, by_head, np.inf).min(axis=1, initial=np.inf)
    highest = np.where(finite, by_head, -np.inf).max(axis=1, initial=-np.inf)
    lowest, highest = (np.where(finite.any(axis=1), x, 0).astype(np.float32) for x in (lowest, highest))
    middle = np.float32((low + 0.75 * (high - low)) * np.log(2))
    return (lowest + highest) / 2 - middle, lowest, highest
