"""Prefixes that sequences of a batch share (``shared_prefix=`` of :func:`cufa.flash_decode`): their pages are read
once.

The queries of all sequences that share a prefix are the rows of one product over its pages (cascade attention); each
sequence's own keys are decoded as without a prefix, and both are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.checks import as_array, is_device_array, module_of
from .merge import merge_attention_states
from .shapes import LAYOUTS, check_layout

#: Options of the call over a prefix: options that change scores, and options that say how the cache is read.
_PREFIX_OPTIONS = ("k_scale", "v_scale", "softcap", "scale", "device")
_REFUSED = ("window", "mask", "alibi_slopes", "softmax_max", "key_norms", "score", "bias")


def decode(
    flash_decode: Callable[..., Any], q: Any, k_cache: Any, v_cache: Any, shared: Any, out: Any, return_lse: bool,
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """:func:`cufa.flash_decode` with a shared prefix. Raises TypeError or ValueError before anything is launched."""
    check_layout(options["layout"])
    axes, q = LAYOUTS[options["layout"]], as_array("q", q)
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}: four axes are needed")
    pages, numbers = _checked(shared, q.shape[0], options)
    kv_heads = as_array("k_cache", k_cache).shape[axes[1]]
    tail, tail_lse = flash_decode(q, k_cache, v_cache, return_lse=True, **options)
    if tail.size and (numbers >= 0).any():
        xp, bits = module_of(q), _bits(q.transpose(axes))
        prefix_out = xp.zeros_like(_bits(tail.transpose(axes)))
        lse = xp.full(tail_lse.shape, -np.inf, tail_lse.dtype)
        fixed = {name: options[name] for name in _PREFIX_OPTIONS} | {"layout": "bhsd", "return_lse": True}
        caches = [as_array("cache", x).transpose(axes) for x in (k_cache, v_cache)]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            own = np.flatnonzero(numbers == number)
            members: Any = slice(None) if len(own) == len(numbers) else xp.asarray(own)
            rows = _rows(bits[members], kv_heads, xp).view(q.dtype)
            one = pages[number]
            found, found_lse = flash_decode(rows, *caches, block_table=one.reshape(1, -1), **fixed)
            shape = len(own), *bits.shape[1:3]
            prefix_out[members] = _rows_of_sequences(_bits(found), kv_heads, (*shape, found.shape[3]))
            lse[members] = _rows_of_sequences(found_lse[..., None], kv_heads, (*shape, 1))[..., 0]
        states = prefix_out.view(q.dtype), lse, tail.transpose(axes), tail_lse
        merged, tail_lse = merge_attention_states(*states)
        tail = merged.transpose(axes)
    if out is not None:
        if out.shape != tail.shape or out.dtype != tail.dtype:
            raise ValueError(
                f"out has shape {out.shape} and dtype {out.dtype}: it takes {tail.shape} of {tail.dtype}"
            )
        _bits(out)[...] = _bits(tail)
        tail = out
    return (tail, tail_lse) if return_lse else tail


def _checked(shared: Any, batch: int, options: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """(block table row of each prefix, number of each sequence's prefix)."""
    for name in (*_REFUSED, "invariant"):
        if options[name] is not None and options[name] is not False:
            raise ValueError(
                f"shared_prefix does not go with {name}: a prefix and a sequence's own keys are computed in separate "
                "launches; leave one of the two out"
            )
    if not (isinstance(shared, tuple) and len(shared) == 2):
        raise TypeError(
            "shared_prefix must be (pages, numbers): pages of each prefix, and each sequence's prefix or -1"
        )
    if options["block_table"] is None:
        raise ValueError(
            "shared_prefix names pages, but block_table is missing: pass each sequence's own pages there"
        )
    pages, numbers = shared
    if is_device_array(numbers):
        raise TypeError(
            "shared_prefix[1] is on a GPU: the host chooses launches by it, pass a list or a NumPy array"
        )
    numbers = np.asarray(numbers)
    if numbers.shape != (batch,) or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"shared_prefix[1] has shape {numbers.shape}: it takes integers ({batch},), -1 for no prefix"
        )
    rows = [as_array("shared_prefix[0]", np.asarray(x) if isinstance(x, (list, tuple)) else x) for x in pages]
    if (numbers < -1).any() or (numbers >= len(rows)).any():
        raise ValueError(
            f"shared_prefix[1] names prefixes from {numbers.min()} to {numbers.max()}, but there are {len(rows)}"
        )
    if any(x.ndim != 1 or not x.size for x in rows):
        raise ValueError(
            "shared_prefix[0] takes pages of each prefix, (pages,) from 1 up: only full pages are shared"
        )
    return rows, numbers


def _rows(q: Any, kv_heads: int, xp: Any) -> Any:
    """(n, heads, tokens, d) as query heads of one sequence with one token: all rows of a key/value head together."""
    n, heads, tokens, d = q.shape
    grouped = q.reshape(n, kv_heads, heads // kv_heads, tokens, d).swapaxes(0, 1)
    return xp.ascontiguousarray(grouped.reshape(1, n * heads * tokens, 1, d))


def _rows_of_sequences(x: Any, kv_heads: int, shape: tuple[int, ...]) -> Any:
    """The inverse of :func:`_rows`: ``shape`` is (n, heads, tokens, d)."""
    n, heads, tokens, d = shape
    return x.reshape(kv_heads, n, heads // kv_heads, tokens, d).swapaxes(0, 1).reshape(shape)


def _bits(x: Any) -> Any:
    """16-bit elements as integers, which every copy takes."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x
