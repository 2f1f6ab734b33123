"""Which tiles of the score matrix are visited: the one definition.

The score matrix of one head, (seqlen_q, seqlen_k), is cut into ``block_q × block_kv`` tiles. The CPU
backend executes this schedule, the demo and the dashboard draw it, and the tile counters that the
CUDA kernels keep are tested against it (FlashAttention-2 paper, section 3.1, "causal masking").
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np
import numpy.typing as npt

from .problem import Problem


class Tile(enum.IntEnum):
    """What becomes of one tile."""

    SKIPPED = 0
    """No visible score: never loaded, never computed."""
    FULL = 1
    """Every score is visible: no mask is applied."""
    PARTIAL = 2
    """The causal boundary runs through it (or, with skipping off, it lies wholly beyond)."""
    PADDED = 3
    """It hangs over the end of the queries or the keys, and the causal boundary does not touch it."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tiles of one head under one tiling.

    ``skip_masked_tiles=False`` is FA1 and the ablation of FA2: wholly masked tiles are computed, then
    thrown away by the mask.
    """

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_kv: int
    causal: bool
    skip_masked_tiles: bool = True

    @classmethod
    def of(cls, problem: Problem, block_q: int, block_kv: int, skip_masked_tiles: bool) -> Schedule:
        return cls(problem.seqlen_q, problem.seqlen_k, block_q, block_kv, problem.causal, skip_masked_tiles)

    @property
    def num_q_blocks(self) -> int:
        """Tr of the papers."""
        return -(-self.seqlen_q // self.block_q)

    @property
    def num_kv_blocks(self) -> int:
        """Tc of the papers."""
        return -(-self.seqlen_k // self.block_kv)

    @functools.cached_property
    def visits(self) -> npt.NDArray[np.int64]:
        """Key/value tiles visited by each query block, shape (num_q_blocks,): always tiles 0 … n-1."""
        if not (self.causal and self.skip_masked_tiles):
            return np.full(self.num_q_blocks, self.num_kv_blocks, np.int64)
        return -(-self._visible_keys(last=True) // self.block_kv)

    @functools.cached_property
    def unmasked(self) -> npt.NDArray[np.int64]:
        """Leading tiles of each query block that need no mask, shape (num_q_blocks,).

        Query rows past the end do not matter here: their results are never stored.
        """
        whole = self.seqlen_k // self.block_kv
        if not self.causal:
            return np.full(self.num_q_blocks, whole, np.int64)
        return np.minimum(self._visible_keys(last=False) // self.block_kv, whole)

    def _visible_keys(self, last: bool) -> npt.NDArray[np.int64]:
        """Keys seen by the last (or first) valid row of each query block under the causal mask."""
        first_row = np.arange(self.num_q_blocks, dtype=np.int64) * self.block_q
        row = np.minimum(first_row + self.block_q, self.seqlen_q) - 1 if last else first_row
        return np.clip(row + 1 + self.seqlen_k - self.seqlen_q, 0, self.seqlen_k)

    @functools.cached_property
    def tiles(self) -> npt.NDArray[np.uint8]:
        """:class:`Tile` of every tile, shape (num_q_blocks, num_kv_blocks)."""
        column = np.arange(self.num_kv_blocks)[None, :]
        grid = np.full((self.num_q_blocks, self.num_kv_blocks), Tile.FULL, np.uint8)
        if self.seqlen_k % self.block_kv:
            grid[:, -1] = Tile.PADDED
        if self.seqlen_q % self.block_q:
            grid[-1, :] = Tile.PADDED
        if self.causal:
            # The boundary cuts a tile when its last column lies past what the block's first row sees.
            last_column = np.minimum((column + 1) * self.block_kv, self.seqlen_k) - 1
            grid[last_column >= self._visible_keys(last=False)[:, None]] = Tile.PARTIAL
        grid[column >= self.visits[:, None]] = Tile.SKIPPED
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
