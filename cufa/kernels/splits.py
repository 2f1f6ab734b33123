"""Keys split over thread blocks: launches and workspace that decoding and the forward share."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from ..problem.problem import Problem
from .base import Launch, Split, ceil_div
from .config import SplitConfig, TileConfig

Config = TypeVar("Config", bound=SplitConfig)

_COMBINE_THREADS = 256
"""COMBINE_THREADS of cuda_src/forward/splits.cuh."""


def slot_bytes(problem: Problem, config: TileConfig) -> int:
    """A part of an item: rows of O, m, l and two words of padding, in float32."""
    return config.block_q * (problem.head_dim + 4) * 4


def query_items(problem: Problem, config: TileConfig) -> int:
    """Query blocks of all heads; heads that share a tile count once."""
    packed = config.block_q // config.head_rows
    return problem.query_blocks(config.head_rows) * (problem.heads // packed)


def with_merge(
    launch: Launch, merge: str, problem: Problem, split: Split | None, dependent: bool = False
) -> tuple[Launch, ...]:
    """A forward's launch, whose grid is its query blocks, in splits, and the launch that merges what they leave: a
    thread for each four columns of a row."""
    count = split.count if split else 2  # what is compiled does not depend on it
    vectors = problem.batch * problem.heads * problem.seqlen_q * problem.head_dim // 4
    grid = (ceil_div(vectors, _COMBINE_THREADS), 1, 1)
    return (
        dataclasses.replace(launch, grid=(launch.grid[0], count, 1), persistent=False),
        Launch(merge, grid, _COMBINE_THREADS, 0, dependent=dependent),
    )


def forward_workspace(problem: Problem, config: SplitConfig, split: Split | None = None) -> int:
    """A partial result for every split of every query block."""
    if not config.split_keys:
        return 0
    return query_items(problem, config) * (split.count if split else 2) * slot_bytes(problem, config)


def in_splits(config: Config) -> tuple[Config, ...]:
    """The same tiles with keys split: of one head, and of so many that each has 32 queries, or in half as many rows
    16. A head's rows are those of whole warps."""
    packed = (1, 2) if config.block_q == 128 else (1, 4)
    return tuple(dataclasses.replace(config, split_keys=True, packed_heads=n) for n in packed)
