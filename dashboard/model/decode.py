"""Decoding as arithmetic: one query token a sequence, keys and values split over thread blocks.

No kernel is measured here, because none that splits keys has landed. What can be said without one: how many
thread blocks a split makes, how they fill the SMs, and how long the longest chain of key tiles is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cufa.dashboard.model.launch import Blocks, Timeline, predict


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences to decode: one thread block serves all query heads of a key/value head (GQA by rows)."""

    lengths: tuple[int, ...]
    """Cached tokens of each sequence."""
    kv_heads: int
    block_kv: int
    places: int
    """Thread blocks that the card holds at a time."""
    overhead: int = 1
    """What a thread block is assumed to cost beside its tiles (start, write, merge), in tiles."""

    @property
    def tiles(self) -> tuple[int, ...]:
        """Key tiles of each sequence."""
        return tuple(-(-n // self.block_kv) for n in self.lengths)


@dataclasses.dataclass(frozen=True)
class Split:
    """One way of splitting a batch."""

    splits: int
    blocks: int
    waves: float
    """Thread blocks over places."""
    span: float
    """Until the last block ends, in tiles."""
    fill: float
    """Share of all places' time spent on tiles until then, 0 to 1."""


def ragged(batch: int, longest: int, spread: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths between longest / spread and longest, log-uniform; the first is the longest."""
    rng = np.random.default_rng(seed)
    lengths = longest / spread ** rng.random(batch)
    return (longest, *(max(1, int(n)) for n in lengths[1:]))


def launch(batch: Batch, splits: int) -> Blocks:
    """Every sequence and head cut into the same number of parts, never more than it has tiles."""
    parts = [part for tiles in batch.tiles for part in _cut(tiles, min(splits, tiles))]
    return _blocks(batch, parts)


def balanced_launch(batch: Batch, chunk: int) -> Blocks:
    """Every sequence cut into parts of about ``chunk`` tiles: long sequences get more of them."""
    parts = [part for tiles in batch.tiles for part in _cut(tiles, -(-tiles // chunk))]
    return _blocks(batch, sorted(parts, reverse=True))


def balanced_chunk(batch: Batch) -> int:
    """Tiles a part such that the last part ends first: between an even share of the card and twice that."""
    share = max(1, -(-sum(batch.tiles) * batch.kv_heads // batch.places))
    return min(range(share, 2 * share + 1), key=lambda n: evaluate(batch, balanced_launch(batch, n), 0).span)


def timeline(batch: Batch, blocks: Blocks, num_sms: int) -> Timeline:
    """List scheduling of a launch."""
    return predict(blocks, num_sms, batch.places // num_sms, batch.overhead)


def evaluate(batch: Batch, blocks: Blocks, splits: int) -> Split:
    """How a launch fills the card; closed form where all parts are alike, list scheduling where not."""
    if blocks.tiles.min() == blocks.tiles.max():
        span = float(-(-len(blocks) // batch.places) * (blocks.tiles[0] + batch.overhead))
    else:
        span = predict(blocks, batch.places, 1, batch.overhead).span
    fill = float(blocks.tiles.sum()) / (batch.places * span)
    return Split(splits, len(blocks), len(blocks) / batch.places, span, fill)


def split_curve(batch: Batch, candidates: Sequence[int]) -> list[Split]:
    """Every candidate that leaves no part of the longest sequence empty."""
    longest = max(batch.tiles)
    useful = [s for s in candidates if s <= longest and len(_cut(longest, s)) == s]
    return [evaluate(batch, launch(batch, s), s) for s in useful]


def best(curve: Sequence[Split]) -> Split:
    """The fewest splits within 2% of the shortest: each split costs workspace and a merge."""
    shortest = min(s.span for s in curve)
    return next(s for s in curve if s.span <= 1.02 * shortest)


def candidates(most: int) -> list[int]:
    """1 to 64, then steps that grow with the number, and powers of two, up to ``most``."""
    found = [*range(1, 65)]
    while found[-1] < most:
        found.append(found[-1] + found[-1] // 16)
    powers = [1 << n for n in range(most.bit_length())]
    return [s for s in sorted({*found, *powers}) if s <= most]


def _cut(tiles: int, parts: int) -> list[int]:
    size = -(-tiles // parts)
    count = -(-tiles // size)
    return [size] * (count - 1) + [tiles - size * (count - 1)]


def _blocks(batch: Batch, parts: Sequence[int]) -> Blocks:
    tiles = np.repeat(np.array(parts, np.int64), batch.kv_heads)
    zeros = np.zeros(len(tiles), np.int64)
    return Blocks(zeros, np.tile(np.arange(batch.kv_heads), len(parts)), zeros, tiles)
