"""float8_e4m3 in attention: rounding, key tiles, shapes of scales, and the order of keys in transposed values.

An operand is ``scale · x`` with x in e4m3 and float32 scales: one for the tensor, for each head, for each block of
tokens of a head, or for each token of a head (:data:`MODES`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .lengths import Lengths, Packed

NAME = "float8_e4m3"
DTYPES = ("uint8", "float8_e4m3fn")
"""dtypes of arrays that hold e4m3: CuPy has none of its own."""
LARGEST = 448.0
MODES = ("tensor", "head", "block", "token")
HEAD_DIM_STEP = 16
"""A row is whole units of 16 bytes."""

KEY_TILES = {64: 160, 128: 224, 256: 128}
"""Keys of a tile, by the largest head dim that the tile serves. The result depends on the width: weights are rounded
relative to their row's maximum after their tile."""
QUERY_BLOCK = 64
"""Queries that share a scale of mode "block": the rows of one warpgroup."""

KEY_GROUP = 32
"""Keys whose order is permuted together: the k of one 8-bit product."""
KEY_PADDING = 128
"""Keys in rows of transposed values are a multiple of this: whole 128-byte lines."""

KEY_ORDER = np.array(
    [16 * (p >> 4) + 8 * (p >> 1 & 1) + 2 * (p >> 2 & 3) + (p & 1) for p in range(KEY_GROUP)]
)
"""The key at each position of a group. In this order, the accumulator of S, packed to e4m3 register by register, is the
A operand of P V without shuffles. See PTX ISA, fragments of 8-bit mma and wgmma: position 16h + 4t + 2a + e holds key
16h + 8a + 2t + e."""


def is_float8(x: Any) -> bool:
    """Whether ``x`` is an array whose dtype holds e4m3."""
    return str(getattr(x, "dtype", "")) in DTYPES


@functools.cache
def key_tile(head_dim: int) -> int:
    return next(keys for largest, keys in KEY_TILES.items() if head_dim <= largest)


def block_of(role: str, head_dim: int) -> int:
    """Tokens that share a scale of mode "block"; ``role`` is "q", "k" or "v"."""
    return QUERY_BLOCK if role == "q" else key_tile(head_dim)


def round_to_e4m3(x: Any) -> Any:
    """Round float32 within ±448 to e4m3, to nearest even, in x's memory. Adding and subtracting ``1.5 · 2^23`` units of
    the last place does so; it takes half of the time of a conversion to e4m3."""
    exponent = np.maximum(np.abs(x), np.float32(2**-6)).view(np.int32) & 0x7F800000
    magic = (exponent + (20 << 23) | 0x400000).view(np.float32)
    x += magic
    x -= magic
    return x


def scale_shape(
    mode: str, block: int, heads: int, batch: int, seqlen: int, lengths: Lengths
) -> tuple[int, ...]:
    """Shape of a scale array. ``seqlen``: room of a sequence; packed: rows of the array."""
    packed = isinstance(lengths, Packed)
    if mode == "tensor":
        return ()
    if mode == "head":
        return batch, heads
    if mode == "token":
        return (1 if packed else batch), heads, seqlen
    return (1, heads, seqlen // block + batch) if packed else (batch, heads, -(-seqlen // block))


def padded_keys(keys: int, sequences: int | None = None) -> int:
    """Length of a row of transposed values. ``keys``: keys of a sequence; if ``sequences`` is given, of all packed
    sequences."""
    if sequences is None:
        return -(-keys // KEY_PADDING) * KEY_PADDING
    return KEY_PADDING * (keys // KEY_PADDING + sequences)


def cache_scale_shapes(
    cache: tuple[int, ...], paged: bool, head_dim: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shapes of the scales of keys in a cache (batch or pages, kv_heads, slots, head_dim), and the number of tokens
    that share a scale. A block of a paged cache is a page."""
    outer, heads, slots, _ = cache
    block = key_tile(head_dim)
    blocks = ((outer, heads), slots) if paged else ((outer, heads, -(-slots // block)), block)
    return {"block": blocks, "token": ((outer, heads, slots), 1)}


def first_block(start: int, block: int, sequence: int) -> int:
    """The first block of a packed sequence that begins at row ``start``: each sequence has whole blocks of its own. In
    transposed values a block is :data:`KEY_PADDING` positions."""
    return start // block + sequence


def mode_of(
    name: str, shape: tuple[int, ...], block: int, heads: int, batch: int, seqlen: int, lengths: Lengths
) -> str:
    """The mode of a scale array by its shape. Raises ValueError for any other shape."""
    shapes = {mode: scale_shape(mode, block, heads, batch, seqlen, lengths) for mode in MODES}
    found = [mode for mode in MODES if shapes[mode] == shape]
    if found == ["block", "token"] and isinstance(lengths, Packed):
        raise ValueError(
            f"{name} has shape {shape}, which fits a scale per block and one per token: pass a scale per head"
        )
    if not found:
        raise ValueError(
            f"{name} has shape {shape}; it takes a scale per tensor (), per head {shapes['head']}, per block of "
            f"{block} tokens {shapes['block']} or per token {shapes['token']}"
        )
    return found[0]


def of_tokens(scale: Any, mode: str, block: int, seqlen: int, lengths: Lengths, role: str = "k") -> Any:
    """The scale of each token of the arrays, which broadcasts to (batch, heads, seqlen); 1 in packed padding."""
    if not isinstance(lengths, Packed) or mode in ("tensor", "token"):
        return per_token(scale, mode, block, seqlen)
    found = np.ones((1, scale.shape[1], seqlen), scale.dtype)
    for sequence, _, queries, keys in lengths.places() or []:
        rows = queries if role == "q" else keys
        start, count = first_block(rows.start, block, sequence), rows.stop - rows.start
        if mode == "head":
            found[0, :, rows] = scale[sequence, :, None]
        else:
            found[0, :, rows] = np.repeat(scale[0, :, start:], block, axis=-1)[:, :count]
    return found


def per_token(scale: Any, mode: str, block: int, seqlen: int) -> Any:
    """The scale of each token of dense sequences: (batch or 1, heads or 1, seqlen or 1), which broadcasts."""
    if mode in ("tensor", "head"):
        return np.reshape(scale, (*np.shape(scale), 1) if mode == "head" else (1, 1, 1))
    return np.repeat(scale, block, axis=-1)[..., :seqlen] if mode == "block" else scale
