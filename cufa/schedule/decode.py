"""Which thread block of a decode kernel reads which keys. Device side: cuda_src/decode/sequence.cuh and schedule.cuh.

Fixed splits (Flash-Decoding) cut each sequence into the same number of runs of whole tiles. The balanced schedule
(stream-K, LeanAttention) concatenates the tiles of all sequences and heads and cuts this list into shares, so that
short sequences leave no SM idle. Partial results of a work item are merged in the order of their keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..problem.problem import FromChunk, Kept
from .schedule import used_of

# Under a sliding window, only the last ``reach`` keys of a sequence are read (None: all keys;
# :attr:`cufa.problem.problem.Problem.reach`). Tiles are numbered from the sequence's first key. The tiles that are read
# are cut into splits or shares. If first keys are kept in addition to the window (:class:`Kept`), the numbering skips
# the tiles between the kept keys and the window. Under chunks, keys are read from a chunk on (:class:`FromChunk`).

Reach = int | Kept | FromChunk | None


def read_range(length: int, reach: Reach) -> tuple[int, int]:
    """Keys (first, last + 1) of the window of a sequence of ``length`` keys; kept keys are not counted."""
    if isinstance(reach, FromChunk):
        return reach.first(length), length
    window = reach.window if isinstance(reach, Kept) else reach
    return (0 if window is None else max(length - window, 0)), length


def tiles_to_read(length: int, block_kv: int, reach: Reach = None) -> tuple[int, int]:
    """(index of the first tile, count of tiles). A sequence without keys has one tile: a block must write its zeros."""
    first = read_range(length, reach)[0] // block_kv
    count = max(1, -(-length // block_kv)) - first
    if isinstance(reach, Kept):
        return 0, count + min(-(-reach.keys // block_kv), first)
    return first, count


def num_tiles(length: int, block_kv: int, reach: Reach = None) -> int:
    """Tiles of a sequence that are read."""
    return tiles_to_read(length, block_kv, reach)[1]


def most_tiles(capacity: int, block_kv: int, reach: Reach = None) -> int:
    """Most tiles that are read, of any sequence of at most ``capacity`` keys. A window may begin and end within a tile,
    which adds a tile."""
    whole = num_tiles(capacity, block_kv)
    if isinstance(reach, Kept):
        return min(whole, -(-reach.keys // block_kv) + most_tiles(capacity, block_kv, reach.window))
    if isinstance(reach, FromChunk):
        reach = reach.most
    return whole if reach is None else min(whole, -(-(reach + block_kv - 1) // block_kv))


def split_range(
    length: int, num_splits: int, split: int, block_kv: int, reach: Reach = None
) -> tuple[int, int]:
    """Keys (first, last + 1) that one of ``num_splits`` fixed splits reads of a sequence of ``length`` keys.

    Whole tiles, equally many in each split; a short sequence leaves the later splits empty.
    """
    start, tiles = tiles_to_read(length, block_kv, reach)
    each = -(-tiles // num_splits)
    first = start + split * each
    return _keys(length, first, first + each, block_kv, reach)


def used_splits(length: int, num_splits: int, block_kv: int, reach: Reach = None) -> int:
    """Non-empty splits: the first ones."""
    return used_of(num_tiles(length, block_kv, reach), num_splits)


# With ``invariant``, a sequence's keys lie in chunks with fixed borders, and each chunk gives a partial result. Chunks
# have 256 keys up to key 2,048, 512 up to 32,768, 1,024 up to 131,072, then 4,096.


def chunk_of(key: int) -> int:
    """The number of the chunk that holds a key."""
    if key < 32768:
        return key // 256 if key < 2048 else 4 + key // 512
    return 36 + key // 1024 if key < 131072 else 132 + key // 4096


def chunk_start(chunk: int) -> int:
    """The first key of a chunk."""
    if chunk < 68:
        return chunk * 256 if chunk < 8 else (chunk - 4) * 512
    return (chunk - 36) * 1024 if chunk < 164 else (chunk - 132) * 4096


def chunk_ranges(length: int, block_kv: int, reach: Reach = None) -> list[tuple[int, int]]:
    """Keys (first, last + 1) that each split of a sequence reads: its chunks, in whole tiles."""
    start, count = tiles_to_read(length, block_kv, reach)
    first, end = start * block_kv, (start + count) * block_kv
    borders = [chunk_start(n) for n in range(chunk_of(first), chunk_of(end - 1) + 2)]
    tiles = [min(max(x, first), end) // block_kv for x in borders]
    return [_keys(length, *pair, block_kv, reach) for pair in itertools.pairwise(tiles)]


def most_chunks(capacity: int, block_kv: int, reach: Reach = None) -> int:
    """Most chunks of a sequence of at most ``capacity`` keys. Chunks widen: none begin in a window sooner than at the
    first key."""
    tiles = most_tiles(capacity, block_kv, reach)
    return min(chunk_of(max(capacity - 1, 0)) + 1, chunk_of(tiles * block_kv - 1) + 2)


def _keys(length: int, first: int, last: int, block_kv: int, reach: Reach) -> tuple[int, int]:
    """Keys (first, last + 1) that are read in the tiles ``first`` to ``last`` - 1."""
    begin, end = read_range(length, reach)
    if isinstance(reach, Kept):
        left_out = num_tiles(length, block_kv) - num_tiles(length, block_kv, reach)
        begin, end = 0, length - left_out * block_kv
    return min(max(first * block_kv, begin), end), min(last * block_kv, end)


@dataclasses.dataclass(frozen=True)
class Span:
    """The keys of one work item that one share reads."""

    share: int
    batch: int
    kv_head: int
    row_block: int
    first_key: int
    last_key: int
    """One past the last."""
    starts: bool
    """The span begins where its work item begins."""
    ends: bool
    """The span ends where its work item ends."""

    @property
    def whole(self) -> bool:
        """The span covers its work item: its result needs no merge and goes to the output."""
        return self.starts and self.ends


#: SMs read at different speeds. If lengths differ, there are therefore more shares than resident blocks, and a fast SM
#: takes more shares. The first half of the shares has 7/8 of the tiles: short shares at the end even out the finish.
_LAST_PART = 8

#: If lengths differ, at most one share is used per 32 tiles, so that the short shares have about 8 tiles or more. At
#: least 1 / WAVES of the planned shares are used.
_TILES_A_SHARE = 32
WAVES = 8


@dataclasses.dataclass(frozen=True)
class Shares:
    """The concatenated tiles of all work items, cut into shares."""

    total: int
    """Tiles."""
    used: int
    """Non-empty shares: the first ones."""
    two_sizes: bool
    """The first half of the shares is larger than the second half."""

    @classmethod
    def of(cls, total: int, num_shares: int, min_shares: int, ragged: bool) -> Shares:
        if ragged:
            num_shares = min(num_shares, max(total // _TILES_A_SHARE, min_shares))
        used = min(num_shares, total)
        return cls(total, used, ragged and used > 1 and used * _TILES_A_SHARE <= total)

    def start(self, share: int) -> int:
        """First tile of a share; ``total`` for the share past the last one."""
        if not self.two_sizes:
            return share * self.total // self.used
        large, last_part = self.used // 2, self.total // _LAST_PART
        middle = self.total - last_part
        if share < large:
            return share * middle // large
        return middle + (share - large) * last_part // (self.used - large)


def balanced_shares(
    lengths: Sequence[int], kv_heads: int, num_shares: int, block_kv: int, row_blocks: int = 1, *,
    ragged: bool, min_shares: int, reach: Reach | Sequence[Reach] = None,
) -> Iterator[Span]:  # fmt: skip
    """The spans of every share, in order. ``ragged``: lengths may differ, and at least ``min_shares`` shares are
    used (:class:`Shares`). ``reach``: of all sequences, or one of each.

    Order of the tiles: by sequence, then head, then block of query rows (more than one if the rows of a head do not
    fit one block), then key.
    """
    reaches = reach if isinstance(reach, Sequence) else [reach] * len(lengths)
    tiles = [tiles_to_read(n, block_kv, own) for n, own in zip(lengths, reaches, strict=True)]
    total = sum(count for _, count in tiles) * kv_heads * row_blocks
    starts, at = [], 0
    for _, count in tiles:
        starts.append(at)
        at += count * kv_heads * row_blocks
    batch = 0
    shares = Shares.of(total, num_shares, min_shares, ragged)
    for share in range(shares.used):
        tile, end = shares.start(share), shares.start(share + 1)
        while tile < end:
            while batch + 1 < len(starts) and starts[batch + 1] <= tile:
                batch += 1
            first, count = tiles[batch]
            item, inside = divmod(tile - starts[batch], count)
            last = min(count, inside + end - tile)
            kv_head, row_block = divmod(item, row_blocks)
            keys = _keys(lengths[batch], first + inside, first + last, block_kv, reaches[batch])
            yield Span(share, batch, kv_head, row_block, *keys, inside == 0, last == count)
            tile += last - inside
