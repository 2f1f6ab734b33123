"""Split keys on the SMs: the keys of each thread block (:mod:`cufa.schedule.decode`), and the end of the last block.

All key tiles take equal time; each thread block takes ``overhead`` tiles more. Memory bandwidth, which limits a full
card, is not modelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cufa.dashboard.model.launch import KEYS, Blocks, Timeline, predict
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.kernels.decode import row_blocks
from cufa.plan.planner import Plan
from cufa.schedule.decode import Reach, balanced_shares, num_tiles, split_range


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences to decode with one tile config on one card."""

    lengths: tuple[int, ...]
    """Cached tokens of each sequence."""
    kv_heads: int
    row_blocks: int
    """Thread blocks for the query rows of one key/value head."""
    config: TileConfig
    device: Device
    ragged: bool = True
    """Lengths may differ, by the plan."""
    overhead: int = 1
    """Assumed cost of a thread block beside its tiles (start, partial result, merge), in tiles."""
    reach: Reach = None
    """:attr:`Problem.kernel_reach`."""
    least: int = 1
    """Least number of shares that the plan asks for."""

    @classmethod
    def of(cls, plan: Plan, lengths: tuple[int, ...], overhead: int) -> Batch:
        assert plan.device is not None
        assert plan.split is not None
        p, config = plan.problem, plan.config
        blocks, reach = row_blocks(p, config), p.kernel_reach
        return cls(
            lengths, p.kv_heads, blocks, config, plan.device, p.uneven, overhead, reach, plan.split.least
        )

    @property
    def places(self) -> int:
        """Resident thread blocks of the whole card."""
        return self.device.num_sms * self.config.blocks_per_sm

    @property
    def tiles(self) -> tuple[int, ...]:
        """Key tiles of each sequence."""
        return tuple(num_tiles(n, self.config.block_kv, self.reach) for n in self.lengths)

    @property
    def items(self) -> int:
        return len(self.lengths) * self.kv_heads * self.row_blocks


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to split a batch."""

    splits: int
    """Splits of each sequence, or shares of all tiles."""
    blocks: int
    """Thread blocks that have tiles."""
    waves: float
    """Thread blocks over places."""
    span: float
    """Time until the last block ends, in tiles."""
    fill: float
    """Share of all places' time spent on tiles until then, 0 to 1."""


def ragged(batch: int, longest: int, spread: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths between longest / spread and longest, log-uniform; the first is the longest."""
    rng = np.random.default_rng(seed)
    lengths = longest / spread ** rng.random(batch)
    return (longest, *(max(1, int(n)) for n in lengths[1:]))


def fixed_blocks(batch: Batch, splits: int) -> Blocks:
    """The same number of splits of every sequence, in launch order, without empty splits."""
    keys = batch.config.block_kv
    heads = np.repeat(np.arange(batch.kv_heads), batch.row_blocks)
    head, owner, tiles = [], [], []
    for number, length in enumerate(batch.lengths):
        ranges = [split_range(length, splits, s, keys, batch.reach) for s in range(splits)]
        tiles_of_split = [_tiles(first, last, keys) for first, last in ranges if last > first] or [1]
        head.append(np.repeat(heads, len(tiles_of_split)))
        owner.append(np.full(len(heads) * len(tiles_of_split), number))
        tiles.append(np.tile(tiles_of_split, len(heads)))
    whose, item, count = (np.concatenate(column) for column in (head, owner, tiles))
    return Blocks(np.full(len(count), KEYS), whose, item, count)


def balanced_blocks(batch: Batch, shares: int) -> Blocks:
    """The tiles of all work items end to end in shares, one per thread block, which takes its spans in order."""
    keys = batch.config.block_kv
    spans = list(
        balanced_shares(
            batch.lengths, batch.kv_heads, shares, keys, batch.row_blocks,
            ragged=batch.ragged, min_shares=batch.least, reach=batch.reach,
        )
    )  # fmt: skip
    tiles = [max(1, _tiles(p.first_key, p.last_key, keys)) for p in spans]
    columns = ([p.kv_head for p in spans], [p.batch for p in spans], tiles, [p.share for p in spans])
    head, batch_of, count, share = (np.array(c, np.int64) for c in columns)
    return Blocks(np.full(len(spans), KEYS), head, batch_of, count, share)


def _tiles(first: int, last: int, keys: int) -> int:
    """Tiles that hold these keys (first, last + 1)."""
    return -(-last // keys) - first // keys


def timeline(batch: Batch, blocks: Blocks) -> Timeline:
    """List scheduling of thread blocks; a block takes its spans in order."""
    num_sms, per_sm = batch.device.num_sms, batch.config.blocks_per_sm
    if blocks.thread_block is None:
        return predict(blocks, num_sms, per_sm, batch.overhead)
    lengths = blocks.tiles + batch.overhead
    share, first = np.unique(blocks.thread_block, return_index=True)  # spans are in the order of shares
    ends = np.cumsum(lengths)
    before = ends[first] - lengths[first]
    spent = np.diff(before, append=ends[-1])
    whole = predict(Blocks(*(np.zeros(len(share), np.int64),) * 3, spent), num_sms, per_sm)
    mine = np.searchsorted(share, blocks.thread_block)
    end = whole.start[mine] + ends - before[mine]
    return Timeline(end - lengths, end, whole.sm[mine], whole.slot[mine], blocks, num_sms, per_sm, "tiles")


def evaluate(batch: Batch, blocks: Blocks, splits: int) -> Split:
    """How a launch fills the card."""
    number = len(blocks) if blocks.thread_block is None else len(np.unique(blocks.thread_block))
    span = timeline(batch, blocks).span
    fill = float(blocks.tiles.sum()) / (batch.places * span)
    return Split(splits, number, number / batch.places, span, fill)


def fixed(batch: Batch, splits: int) -> Split:
    """:func:`evaluate` of fixed splits, in closed form if all sequences have one length."""
    if len(set(batch.tiles)) > 1:
        return evaluate(batch, fixed_blocks(batch, splits), splits)
    tiles = batch.tiles[0]
    tiles_per_split = -(-tiles // splits)
    blocks = batch.items * -(-tiles // tiles_per_split)
    waves = blocks / batch.places
    span = float(-(-blocks // batch.places) * (tiles_per_split + batch.overhead))
    return Split(splits, blocks, waves, span, batch.items * tiles / (batch.places * span))


def split_curve(batch: Batch, candidates: Sequence[int]) -> list[Split]:
    """Every candidate that leaves no split of the longest sequence empty."""
    longest = max(batch.tiles)
    useful = [s for s in candidates if s <= longest and -(-longest // -(-longest // s)) == s]
    return [fixed(batch, s) for s in useful]


def best(curve: Sequence[Split]) -> Split:
    """The fewest splits within 2% of the shortest."""
    shortest = min(s.span for s in curve)
    return next(s for s in curve if s.span <= 1.02 * shortest)


def candidates(most: int, dense: int = 64) -> list[int]:
    """1 to ``dense``, then steps that grow with the number, and powers of two, up to ``most``."""
    numbers = [*range(1, dense + 1)]
    while numbers[-1] < most:
        numbers.append(numbers[-1] + max(1, numbers[-1] // 16))
    powers = [1 << n for n in range(most.bit_length())]
    return [s for s in sorted({*numbers, *powers}) if s <= most]
