"""Which tiles of the score matrix a kernel visits, for one mask and one tile shape.

The score matrix of one head, (seqlen_q, seqlen_k), is divided into ``block_q × block_kv`` tiles (FlashAttention-2
paper, section 3.1). The CPU backend executes this schedule, the dashboard draws it, and tests compare it with the CUDA
kernels' tile counters. The mask decides which tiles are visited (:meth:`cufa.problem.mask.Mask.key_tiles`).

The backward visits the same tiles column by column: a key block visits query tiles
(:meth:`cufa.problem.mask.Mask.query_tiles`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np
import numpy.typing as npt

from ..problem.mask_family import Mask
from ..problem.problem import Problem
from ..problem.tile_classes import TileClass, Tiles
from ..problem.work import WORK


class Tile(enum.IntEnum):
    """What a kernel does with one tile."""

    SKIPPED = 0
    """No visible score: never loaded, never computed."""
    FULL = 1
    """Every score is visible: no mask is applied."""
    PARTIAL = 2
    """The mask hides some scores of the tile (all of them, if masked tiles are not skipped)."""
    PADDED = 3
    """The tile extends past the last query or key, and the mask hides no score in it."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tiles of one head's score matrix.

    ``skip_masked_tiles=False`` (FA1, and the ablation of FA2): fully masked tiles are computed, and the mask discards
    their scores. ``by_keys`` (backward): a block is a key block, and visits query tiles.
    """

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_kv: int
    mask: Mask
    skip_masked_tiles: bool = True
    by_keys: bool = False

    @classmethod
    def of(cls, problem: Problem, block_q: int, block_kv: int, skip_masked_tiles: bool) -> Schedule:
        by_keys = WORK[problem.operation].by_keys
        p = next((part.problem for part in problem.parts if not part.problem.empty), problem)
        return cls(p.seqlen_q, p.seqlen_k, block_q, block_kv, p.mask, skip_masked_tiles, by_keys)

    @property
    def num_q_blocks(self) -> int:
        """Tr of the papers."""
        return -(-self.seqlen_q // self.block_q)

    @property
    def num_kv_blocks(self) -> int:
        """Tc of the papers."""
        return -(-self.seqlen_k // self.block_kv)

    @property
    def num_blocks(self) -> int:
        """Blocks that visit tiles."""
        return self.num_kv_blocks if self.by_keys else self.num_q_blocks

    @property
    def tiles_of_block(self) -> int:
        """Tiles that a block would visit if none were skipped."""
        return self.num_q_blocks if self.by_keys else self.num_kv_blocks

    @functools.cached_property
    def ranges(self) -> Tiles:
        """The visited and the clear tiles of each block: ranges under a band mask, lists under an irregular mask. A
        query block has key tiles; with ``by_keys``, a key block has query tiles."""
        tiles_of = self.mask.query_tiles if self.by_keys else self.mask.key_tiles
        found = tiles_of(self.block_q, self.block_kv, self.seqlen_q, self.seqlen_k)
        return found if self.skip_masked_tiles else found.with_all_visited(self.tiles_of_block)

    @functools.cached_property
    def classes(self) -> npt.NDArray[np.uint8]:
        """:class:`~cufa.problem.tile_classes.TileClass` of every tile, (num_blocks, tiles_of_block)."""
        return self.ranges.classes(self.tiles_of_block)

    @functools.cached_property
    def visits(self) -> npt.NDArray[np.int64]:
        """Tiles visited by each block, shape (num_blocks,)."""
        if self.by_keys or not self.skip_masked_tiles:
            return self.ranges.count
        mask = self.mask.for_kernels(self.seqlen_q, self.seqlen_k)
        return mask.visits(self.block_q, self.block_kv, self.seqlen_q, self.seqlen_k)

    @functools.cached_property
    def tiles(self) -> npt.NDArray[np.uint8]:
        """:class:`Tile` of every tile, shape (num_q_blocks, num_kv_blocks), also with ``by_keys``."""
        visited = dataclasses.replace(self, by_keys=False).classes != TileClass.SKIP
        grid = np.where(visited, Tile.PARTIAL, Tile.SKIPPED).astype(np.uint8)
        rows, keys = (
            np.arange(0, n, block)
            for n, block in ((self.seqlen_q, self.block_q), (self.seqlen_k, self.block_kv))
        )
        row_ends = np.minimum(rows + self.block_q, self.seqlen_q)
        key_ends = np.minimum(keys + self.block_kv, self.seqlen_k)
        _, every = self.mask.rectangles(rows, row_ends, keys, key_ends, self.seqlen_q, self.seqlen_k)
        grid[visited & every] = Tile.FULL
        for edge, hangs_over in (
            (grid[-1], self.seqlen_q % self.block_q),
            (grid[:, -1], self.seqlen_k % self.block_kv),
        ):
            if hangs_over:
                edge[edge == Tile.FULL] = Tile.PADDED
        return grid

    @property
    def total(self) -> int:
        return self.num_q_blocks * self.num_kv_blocks

    @property
    def visited(self) -> int:
        return int(self.visits.sum())

    @property
    def skipped(self) -> int:
        return self.total - self.visited

    def count(self, tile: Tile) -> int:
        return int((self.tiles == tile).sum())


def used_of(tiles: int, num_splits: int) -> int:
    """Non-empty splits if ``tiles`` tiles are cut into ``num_splits`` splits."""
    return -(-tiles // -(-tiles // num_splits))
