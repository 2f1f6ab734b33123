"""Who reads which keys: the one definition. cuda_src/tiles/decode_schedule.cuh is its device side.

The keys of one (sequence, key/value head) are cut into tiles of ``block_kv``. Fixed splits (Flash-Decoding)
cut each sequence into the same number of runs of whole tiles. The balanced schedule (stream-K,
LeanAttention) lays the tiles of all sequences and heads end to end and cuts that line into shares, so that
short sequences leave nobody idle. Either way the pieces of an item are merged in the order of their
keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


def num_tiles(length: int, block_kv: int) -> int:
    """Tiles of a sequence. One without keys still has one: somebody must write its zeros."""
    return max(1, -(-length // block_kv))


def split_range(length: int, num_splits: int, split: int, block_kv: int) -> tuple[int, int]:
    """Keys (first, last + 1) that one of ``num_splits`` fixed splits reads of a sequence of ``length`` keys.

    Whole tiles, equally many in each split; a short sequence leaves the later splits empty.
    """
    tiles = num_tiles(length, block_kv)
    each = -(-tiles // num_splits)
    first, last = min(split * each, tiles), min((split + 1) * each, tiles)
    return min(first * block_kv, length), min(last * block_kv, length)


def used_splits(length: int, num_splits: int, block_kv: int) -> int:
    """Splits that have something to merge: the first so many."""
    tiles = num_tiles(length, block_kv)
    return -(-tiles // -(-tiles // num_splits))


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one share does of one item."""

    share: int
    batch: int
    kv_head: int
    row_block: int
    first_key: int
    last_key: int
    """One past the last."""
    starts: bool
    """The piece begins where its item begins."""
    ends: bool
    """The piece ends where its item ends."""

    @property
    def whole(self) -> bool:
        """Nothing to merge: written straight to the output."""
        return self.starts and self.ends


#: Where lengths differ there are more shares than the GPU runs at once, for SMs do not read at one speed: who
#: is done takes the next. The first half of the shares has 7 of 8 tiles: what is handed out last is small.
_LAST_PART = 8

#: Shares are fewer where the last ones would have less than about 8 tiles,
_TILES_A_SHARE = 32

#: but never less than one of 8 of those asked for, which the planner makes a wave.
WAVES = 8


@dataclasses.dataclass(frozen=True)
class Shares:
    """The line of all tiles, cut."""

    total: int
    """Tiles."""
    used: int
    """Shares that are not empty, the first so many."""
    two_sizes: bool

    @classmethod
    def of(cls, total: int, num_shares: int, ragged: bool) -> Shares:
        if ragged:
            num_shares = min(num_shares, max(total // _TILES_A_SHARE, -(-num_shares // WAVES)))
        used = min(num_shares, total)
        return cls(total, used, ragged and used > 1 and used * _TILES_A_SHARE <= total)

    def start(self, share: int) -> int:
        """First tile of a share; of the one past the last, the number of tiles."""
        if not self.two_sizes:
            return share * self.total // self.used
        large, last_part = self.used // 2, self.total // _LAST_PART
        middle = self.total - last_part
        if share < large:
            return share * middle // large
        return middle + (share - large) * last_part // (self.used - large)


def balanced_shares(
    lengths: Sequence[int],
    kv_heads: int,
    num_shares: int,
    block_kv: int,
    row_blocks: int = 1,
    *,
    ragged: bool,
) -> Iterator[Piece]:
    """The pieces of every share, in order. ``ragged``: lengths may differ (:class:`Shares`).

    The line of work: sequences, in them heads, in them blocks of query rows (more than one only when the rows
    of a head do not fit one block), in them tiles of keys.
    """
    tiles = [num_tiles(n, block_kv) for n in lengths]
    total = sum(tiles) * kv_heads * row_blocks
    starts, at = [], 0
    for count in tiles:
        starts.append(at)
        at += count * kv_heads * row_blocks
    batch = 0
    shares = Shares.of(total, num_shares, ragged)
    for share in range(shares.used):
        tile, end = shares.start(share), shares.start(share + 1)
        while tile < end:
            while batch + 1 < len(starts) and starts[batch + 1] <= tile:
                batch += 1
            item, inside = divmod(tile - starts[batch], tiles[batch])
            last = min(tiles[batch], inside + end - tile)
            kv_head, row_block = divmod(item, row_blocks)
            n = lengths[batch]
            yield Piece(
                share,
                batch,
                kv_head,
                row_block,
                min(inside * block_kv, n),
                min(last * block_kv, n),
                inside == 0,
                last == tiles[batch],
            )
            tile += last - inside
