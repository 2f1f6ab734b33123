"""The launch before a forward kernel where the mask hides keys from runs of rows: what is least and greatest in each
block of keys (``prepare_mask`` of cuda_src/shared/irregular_mask.cuh)."""

from __future__ import annotations

from ...problem.columns import Columns
from ...problem.problem import Problem
from ..base import Launch, ceil_div
from ..config import TileConfig

_THREADS, _MOST_BLOCKS = 128, 1 << 12  # MASK_THREADS; beyond, warps take several blocks of keys


def mask_launches(problem: Problem, config: TileConfig) -> tuple[Launch, ...]:
    """None where the mask has no numbers for each key."""
    columns = problem.kernel_mask
    if not isinstance(columns, Columns):
        return ()
    _, sequences, heads, _ = columns.intervals.shape
    warps = sequences * heads * columns.num_intervals * ceil_div(problem.seqlen_k, config.block_kv)
    return (Launch("mask_blocks", (min(ceil_div(warps, _THREADS // 32), _MOST_BLOCKS), 1, 1), _THREADS, 0),)
