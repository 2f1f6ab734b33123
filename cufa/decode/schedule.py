"""Who reads which keys: the one definition. cuda_src/tiles/decode_schedule.cuh is its device side.

The keys of one (sequence, key/value head) are cut into tiles of ``block_kv``. Fixed splits (Flash-Decoding)
cut each sequence into the same number of runs of whole tiles. The balanced schedule (stream-K,
LeanAttention) lays the tiles of all sequences and heads end to end and cuts that line into equal shares, so
that short sequences leave nobody idle. Either way the pieces of an item are merged in the order of their
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


def share_range(total_tiles: int, num_shares: int, share: int) -> tuple[int, int]:
    """Tiles (first, last + 1) of one share on the line of all tiles. With fewer tiles than shares, the later
    shares are empty."""
    used = min(num_shares, total_tiles)
    if share >= used:
        return total_tiles, total_tiles
    return share * total_tiles // used, (share + 1) * total_tiles // used


def balanced_shares(
    lengths: Sequence[int], kv_heads: int, num_shares: int, block_kv: int, row_blocks: int = 1
) -> Iterator[Piece]:
    """The pieces of every share, in order. The line of work: sequences, in them heads, in them blocks of
    query rows (more than one only when the rows of a head do not fit one block), in them tiles of keys."""
    tiles = [num_tiles(n, block_kv) for n in lengths]
    total = sum(tiles) * kv_heads * row_blocks
    starts, at = [], 0
    for count in tiles:
        starts.append(at)
        at += count * kv_heads * row_blocks
    batch = 0
    for share in range(num_shares):
        tile, end = share_range(total, num_shares, share)
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
