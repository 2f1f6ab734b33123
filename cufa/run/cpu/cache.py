"""Keys and values of a cache, contiguous or in pages, tile by tile in the compute dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...plan.operation import Arrays
from ...problem.float8 import LARGEST, cache_scale_shapes
from ...problem.lengths import Lengths, Packed, Padded
from ...problem.problem import Problem
from .quantize import scale_of

Array = npt.NDArray[Any]


class CacheTiles:
    """Keys or values of a stack's heads, tile by tile in the compute dtype. Valid until the next tile."""

    def __init__(
        self, cache: Array, block_table: Array | None, batch: int, heads: slice, dtype: type[Any]
    ) -> None:
        self._cache, self._batch, self._heads = cache, batch, heads
        self._pages = None if block_table is None else block_table[batch]
        self._dtype = np.dtype(dtype)
        self._scratch = np.empty(0, dtype)

    def load(self, start: int, stop: int) -> Array:
        """(heads, stop - start, head_dim). Reads no slot and no entry of the block table past ``stop``."""
        if self._pages is None:
            return self._widened(self._cache[self._batch, self._heads, start:stop])
        size = self._cache.shape[2]
        first, last = start // size, -(-stop // size)
        slots = slice(start - first * size, stop - first * size)
        if last - first == 1:
            return self._widened(self._cache[self._pages[first], self._heads, slots])
        pages = self._cache[self._pages[first:last], self._heads].swapaxes(0, 1)
        heads, count, _, head_dim = pages.shape
        return self._widened(pages).reshape(heads, count * size, head_dim)[:, slots]

    def _widened(self, x: Array) -> Array:
        """x in the compute dtype; x itself if it has that dtype and strides that BLAS takes."""
        if (
            x.dtype == self._dtype
            and x.ndim == 3
            and x.flags.aligned
            and x.strides[1] >= x.shape[2] * x.itemsize
        ):
            return x
        if self._scratch.size < x.size:
            self._scratch = np.empty(x.size, self._dtype)
        wide = self._scratch[: x.size].reshape(x.shape)
        widen(x, wide)
        return wide


class KeyScales:
    """The scales of the keys, or values, of a stack's heads, where tokens or blocks of tokens have their own."""

    def __init__(self, operands: Arrays, name: str, batch: int, heads: slice) -> None:
        self._scale, table = operands[name], operands["block_table"]
        self._table = None if table is None else table[batch]
        self._batch, self._heads, self._slots = batch, heads, operands["k_cache"].shape[2]
        if np.ndim(self._scale) > 1:
            self._block = tokens_a_scale(self._scale, operands["k_cache"], table is not None)
            self._scale = self._scale.reshape(*self._scale.shape[:2], -1)

    def load(self, start: int, stop: int) -> Array:
        """(heads, stop - start)"""
        slots = np.arange(start, stop)
        if self._table is None:
            scales: Array = self._scale[self._batch][self._heads, slots // self._block]
        else:
            pages = self._table[slots // self._slots]
            scales = self._scale[pages, self._heads, slots % self._slots // self._block].T
        return scales


def tokens_a_scale(scale: Array, cache: Array, paged: bool) -> int:
    """Tokens of a cache that share a scale, by the shapes of both."""
    shapes = cache_scale_shapes(cache.shape, paged, cache.shape[3])
    return next(count for shape, count in shapes.values() if shape == scale.shape)


_HEADROOM = 8
"""Factor of the scale that a block's first tokens choose: later tokens of the block must fit."""


def append(operands: Arrays) -> None:
    """Write k_new and v_new into the caches, from each sequence's length on. If they have more bits than the cache,
    round them and write their scales. Lift key_norms to the new keys' norms."""
    _append(operands)
    if operands.get("key_norms") is not None:
        _raise_norms(operands, operands["key_norms"])


def _raise_norms(operands: Arrays, norms: Array) -> None:
    """Lift key_norms to the norms of the keys that :func:`append` has written."""
    for b, start in enumerate(operands["cache_seqlens"].tolist()):
        heads, end = slice(0, norms.shape[1]), start + operands["k_new"].shape[2]
        K = CacheTiles(operands["k_cache"], operands["block_table"], b, heads, np.float32).load(start, end)
        largest = np.sqrt((K * K).sum(axis=2))
        if np.ndim(operands["k_scale"]) > 1:
            largest *= KeyScales(operands, "k_scale", b, heads).load(start, end)
        elif operands["k_scale"] is not None:
            largest *= operands["k_scale"][:, None]
        np.fmax(norms[b], largest.max(axis=1), out=norms[b])


def _append(operands: Arrays) -> None:
    for role in "kv":
        cache, new, scale = (operands[f"{role}_{name}"] for name in ("cache", "new", "scale"))
        if cache.dtype == np.uint8 != new.dtype:
            _append_rounded(operands, cache, new, scale)
            continue
        for b, start in enumerate(operands["cache_seqlens"].tolist()):
            _append_tokens(cache, operands["block_table"], b, start, new[b])


def _append_tokens(cache: Array, table: Array | None, b: int, start: int, tokens: Array) -> None:
    """Write tokens, (kv_heads, count, head_dim), of sequence ``b`` from place ``start`` on."""
    if table is None:
        cache[b, :, start : start + tokens.shape[1]] = tokens
        return
    size, done = cache.shape[2], 0
    while done < tokens.shape[1]:
        page, slot = divmod(start + done, size)
        count = min(size - slot, tokens.shape[1] - done)
        cache[table[b, page], :, slot : slot + count] = tokens[:, done : done + count]
        done += count


def append_rows(problem: Problem, operands: Arrays) -> None:
    """Append the new tokens of a forward, one for each query. Queries may be padded or packed."""
    places = problem.lengths.places() or []
    for role in "kv":
        for b, batch, rows, _ in places:
            new = operands[f"{role}_new"][batch, :, rows][0]
            start = int(operands["cache_seqlens"][b])
            _append_tokens(operands[role], operands.get("block_table"), b, start, new)


def gathered(problem: Problem, operands: Arrays) -> tuple[Problem, dict[str, Any]]:
    """Append new tokens. Returns the same problem with the keys of each sequence side by side."""
    lengths, arrays = problem.lengths, dict(operands)
    assert isinstance(lengths, (Padded, Packed)) and lengths.keys is not None
    if problem.cache.new_tokens:
        append_rows(problem, operands)
    most, packed = max(lengths.keys, default=0), isinstance(lengths, Packed)
    table = operands.get("block_table")
    if table is not None:  # entries before a window may be invalid: their keys are hidden
        table = np.clip(table, 0, max(problem.cache.num_pages - 1, 0))
    begins = np.append(0, np.cumsum(lengths.keys)) if packed else np.zeros(problem.batch + 1, np.int64)
    for role in "kv":
        cache = operands[role]
        shape = (1, problem.kv_heads, int(begins[-1]), problem.head_dim)
        arrays[role] = np.empty(shape if packed else (problem.batch, shape[1], most, shape[3]), cache.dtype)
        for b, count in enumerate(lengths.keys):
            tiles = CacheTiles(cache, table, b, slice(None), cache.dtype)
            arrays[role][0 if packed else b, :, begins[b] : begins[b] + count] = tiles.load(0, count)
    for name in ("cache_seqlens", "block_table", "k_new", "v_new", "tree"):
        arrays.pop(name, None)
    plain: Lengths = (
        Packed(lengths.total_q, int(begins[-1]), lengths.queries, lengths.keys)
        if isinstance(lengths, Packed)
        else Padded(lengths.queries, lengths.keys)
    )
    return dataclasses.replace(problem, lengths=plain, seqlen_k=most), arrays


def _append_rounded(operands: Arrays, cache: Array, new: Array, scale: Array) -> None:
    """Block by block: the tokens of this call choose a block's scale if its first token is among them."""
    table, size = operands["block_table"], cache.shape[2]
    block = tokens_a_scale(scale, cache, table is not None)
    headroom = np.float32(1 if block == 1 else _HEADROOM)
    block_scales = scale.reshape(*scale.shape[:2], -1)
    for b, start in enumerate(operands["cache_seqlens"].tolist()):
        position, end = start, start + new.shape[2]
        while position < end:
            outer, slot = (b, position) if table is None else (table[b, position // size], position % size)
            count = min(block - slot % block, size - slot, end - position)
            tokens = new[b, :, position - start : position - start + count].astype(np.float32)
            if slot % block == 0:
                largest = headroom * np.abs(tokens).max(axis=(1, 2))
                block_scales[outer, :, slot // block] = scale_of(largest)
            tokens *= (np.float32(1) / block_scales[outer, :, slot // block])[:, None, None]
            np.clip(tokens, -LARGEST, LARGEST, out=tokens)
            cache[outer, :, slot : slot + count] = tokens.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            position += count


_SHIFTS = {"float16": (13, 2.0**112, 65504.0), "uint8": (20, 2.0**120, 448.0)}
"""float16 and e4m3 to float32: the shift that aligns the bits, the factor that corrects the exponent (of subnormal
numbers too), and the largest finite number: a larger result was inf or NaN."""


def widen(x: Array, wide: Array) -> None:
    """Convert to float32. Shifts and a product take a fifth (float16) or an eighth (e4m3) of the time of NumPy's
    conversion, which is fast for bfloat16."""
    if str(x.dtype) in _SHIFTS and wide.dtype == np.float32:
        shift, factor, largest = _SHIFTS[str(x.dtype)]
        bits = wide.view(np.int32)
        np.left_shift(x.view(f"i{x.itemsize}"), shift, out=bits, dtype=np.int32)  # the sign is extended
        bits &= np.int32(~(((1 << 31 - shift) - (1 << 8 * x.itemsize - 1)) << shift))
        wide *= np.float32(factor)
        if -largest <= wide.min(initial=0) and wide.max(initial=0) <= largest:
            return
    np.copyto(wide, x.view(ml_dtypes.float8_e4m3fn) if x.dtype == np.uint8 else x)
