"""Prefixes that sequences of a batch share (``shared_prefix=`` of :func:`cufa.flash_decode`): their pages are read
once.

The queries of all sequences that share a prefix are the rows of one product over its pages (cascade attention); each
sequence's own keys are decoded as without a prefix, and both are merged by their log-sum-exp. More than 64 rows fill
the tiles of :func:`cufa.flash_attention`, which splits the prefix's keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.checks import as_array, is_device_array, module_of
from . import arrays
from .dispatch import cuda_module
from .forward import flash_attention
from .merge import merge_into
from .shapes import LAYOUTS, check_layout

#: Options of the call over a prefix: options that change scores, and options that say how an e4m3 cache is read.
_PREFIX_OPTIONS, _CACHE_OPTIONS = ("softcap", "scale", "device"), ("k_scale", "v_scale")
_REFUSED = ("window", "mask", "alibi_slopes", "softmax_max", "key_norms", "score", "bias")

_FEW_ROWS = 64
"""Rows of a key/value head that one tile of flash_decode holds: with them it reads a prefix at memory speed."""
_TILE = 128
"""Rows and keys of a tile of flash_attention, as far as the number of splits is concerned."""


def decode(
    flash_decode: Callable[..., Any], q: Any, k_cache: Any, v_cache: Any, shared: Any, out: Any, return_lse: bool,
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """:func:`cufa.flash_decode` with a shared prefix. Raises TypeError or ValueError before anything is launched."""
    check_layout(options["layout"])
    axes, q = LAYOUTS[options["layout"]], as_array("q", q)
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}: four axes are needed")
    pages, numbers = _checked(shared, q.shape[0], len(as_array("k_cache", k_cache)), options)
    result, result_lse = flash_decode(q, k_cache, v_cache, out=out, return_lse=True, **options)
    if result.size:
        xp, caches = module_of(q), [as_array("cache", x).transpose(axes) for x in (k_cache, v_cache)]
        bits, tail = (_by_kv_head(_bits(x.transpose(axes)), caches[0].shape[1]) for x in (q, result))
        lse = _by_kv_head(result_lse, caches[0].shape[1])
        for number in np.unique(numbers[numbers >= 0]).tolist():
            own = np.flatnonzero(numbers == number)
            adjacent = own[-1] - own[0] + 1 == len(own)
            members: Any = slice(own[0], own[-1] + 1) if adjacent else xp.asarray(own)
            state = _over_prefix(flash_decode, bits[members], q.dtype, caches, pages[number], options)
            own_tail, own_lse = tail[members], lse[members]  # views, if sequences are adjacent
            merge_into(*state, own_tail.view(q.dtype), own_lse, return_lse)
            if not adjacent:
                tail[members], lse[members] = own_tail, own_lse
    return (result, result_lse) if return_lse else result


def _over_prefix(
    flash_decode: Callable[..., Any], bits: Any, dtype: Any, caches: Sequence[Any], pages: Any,
    options: Mapping[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) over a prefix, (n, kv_heads, group, tokens, head_dim), for the queries ``bits`` of this shape."""
    xp, rows = module_of(bits), bits.swapaxes(0, 1)  # all rows of a key/value head together
    kv_heads, count, d = len(rows), rows[0, ..., 0].size, rows.shape[-1]
    given = {name: options[name] for name in _PREFIX_OPTIONS}
    in_tiles = caches[0].dtype == caches[1].dtype == dtype and caches[0].shape == caches[1].shape
    if in_tiles and count > _FEW_ROWS and arrays.alignment(*caches) == 16:
        attend, shape = flash_attention, (1, kv_heads, count, d)
        sms = cuda_module().device(bits.data.device_id).num_sms if is_device_array(bits) else 1
        tiles = -(-len(pages) * caches[0].shape[2] // _TILE)
        given["num_splits"] = _num_splits(tiles, kv_heads * -(-count // _TILE), sms)
    else:  # rows as query heads with one token
        attend, shape = flash_decode, (1, kv_heads * count, 1, d)
        given |= {name: options[name] for name in _CACHE_OPTIONS}
    q = xp.ascontiguousarray(rows).reshape(shape).view(dtype)
    state = attend(q, *caches, block_table=pages.reshape(1, -1), return_lse=True, **given)
    return tuple(x.reshape(*rows.shape[:-1], *x.shape[3:]).swapaxes(0, 1) for x in state)


@functools.lru_cache
def _num_splits(tiles: int, items: int, sms: int) -> int:
    """The splits that make ``items`` query blocks, each of ``tiles`` tiles of keys, take the least time: waves of
    blocks, each with its tiles and the time of one more; merging 32 splits takes about a tile's time."""
    return min(range(1, tiles + 1), key=lambda n: -(-items * n // sms) * (-(-tiles // n) + 1) + n / 32)


def _checked(
    shared: Any, batch: int, num_pages: int, options: Mapping[str, Any]
) -> tuple[Sequence[Any], Any]:
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
    for x in rows:
        if x.dtype.kind not in "iu" or (is_device_array(x) and x.dtype != np.int32):
            raise TypeError(f"shared_prefix[0] has pages of {x.dtype}: pages are integers, on a GPU int32")
        if not is_device_array(x) and (x.min() < 0 or x.max() >= num_pages):
            raise ValueError(
                f"shared_prefix[0] names pages from {x.min()} to {x.max()}, but k_cache has {num_pages} pages"
            )
    return rows, numbers


def _by_kv_head(x: Any, kv_heads: int) -> Any:
    """A view (n, kv_heads, group, tokens, …) of (n, heads, tokens, …)."""
    return x.reshape(len(x), kv_heads, -1, *x.shape[2:])


def _bits(x: Any) -> Any:
    """16-bit elements as integers, which every copy takes."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x
