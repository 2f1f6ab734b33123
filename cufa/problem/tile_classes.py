"""The tiles that a block visits, and which of them need no mask: ranges for bands, lists for irregular masks."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class TileClass(enum.IntEnum):
    """What a block does with a tile."""

    SKIP = 0
    """No score is visible."""
    MASKED = 1
    """Every score is tested."""
    CLEAR = 2
    """Every score is visible, and the tile ends within the matrix: nothing is tested."""


Classes = npt.NDArray[np.uint8]
"""A :class:`TileClass` for each (block, tile)."""


def classes_of(visited: Bools, clear: Bools) -> Classes:
    return np.where(visited, np.where(clear, TileClass.CLEAR, TileClass.MASKED), TileClass.SKIP).astype(
        np.uint8
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TileRanges:
    """Tiles of each block of rows; arrays have one entry per block. Tiles ``first`` … ``end`` - 1 hold a visible score;
    in tiles ``clear_first`` … ``clear_end`` - 1 every score is visible."""

    first: Ints
    end: Ints
    clear_first: Ints
    clear_end: Ints

    @property
    def count(self) -> Ints:
        """Tiles visited by each block."""
        return self.end - self.first

    @property
    def clear(self) -> Ints:
        """Visited tiles of each block that need no mask."""
        return self.clear_end - self.clear_first

    def classes(self, num_tiles: int) -> Classes:
        tile = np.arange(num_tiles)[None, :]
        visited = (tile >= self.first[:, None]) & (tile < self.end[:, None])
        clear = (tile >= self.clear_first[:, None]) & (tile < self.clear_end[:, None])
        return classes_of(visited, clear)

    def with_all_visited(self, num_tiles: int) -> TileRanges:
        nothing, none = np.zeros_like(self.first), self.clear == 0
        return TileRanges(
            first=nothing,
            end=nothing + num_tiles,
            clear_first=np.where(none, nothing, self.clear_first),
            clear_end=np.where(none, nothing, self.clear_end),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TileLists:
    """Tiles of each block as lists, as producer warps write them to shared memory.

    The tiles of block b are ``tile[offsets[b] : offsets[b + 1]]``, ascending.
    """

    offsets: Ints
    tile: Ints
    is_clear: Bools

    @property
    def count(self) -> Ints:
        """Tiles visited by each block."""
        return np.diff(self.offsets)

    @property
    def clear(self) -> Ints:
        """Visited tiles of each block that need no mask."""
        before = np.concatenate([[0], np.cumsum(self.is_clear, dtype=np.int64)])
        return np.diff(before[self.offsets])

    def classes(self, num_tiles: int) -> Classes:
        found = np.zeros((len(self.offsets) - 1, num_tiles), np.uint8)
        block = np.repeat(np.arange(len(found)), self.count)
        found[block, self.tile] = np.where(self.is_clear, TileClass.CLEAR, TileClass.MASKED)
        return found

    def with_all_visited(self, num_tiles: int) -> TileLists:
        return TileLists.of([np.maximum(self.classes(num_tiles), TileClass.MASKED)])

    @staticmethod
    def of(parts: list[Classes]) -> TileLists:
        """The lists of all blocks, from the classes of some blocks in each of ``parts``."""
        counts = [np.count_nonzero(part, axis=1) for part in parts]
        tile = np.concatenate([np.nonzero(part)[1] for part in parts])
        is_clear = np.concatenate([part[part > 0] == TileClass.CLEAR for part in parts])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])
        return TileLists(offsets, tile, is_clear)


Tiles = TileRanges | TileLists
