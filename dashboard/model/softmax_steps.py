"""Running maximum and sum of the rows of one query block, tile by tile: what the CPU path does, observed."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from cufa.backends import cpu
from cufa.backends.cpu_tiles import TileStep
from cufa.core.mask import FULL, Band, Mask
from cufa.core.problem import Problem, default_scale
from cufa.core.schedule import Schedule
from cufa.kernels import TileConfig
from cufa.planner import make_plan

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile; arrays have one entry per row of the query block."""

    kv_block: int
    m_before: Floats
    l_before: Floats
    m_after: Floats
    l_after: Floats


def observe_rows(
    schedule: Schedule, q_block: int, head_dim: int, softcap: float | None = None, seed: int = 0
) -> list[Step]:
    """Run the rows of one query block through the CPU path, in the order of the key blocks.

    Inputs are standard normal. Only this block's rows, and the key tiles that some of them see, are computed, so
    the length of the problem does not matter. Other tiles change nothing and are not listed.
    """
    first_row = q_block * schedule.block_q
    rows = min(first_row + schedule.block_q, schedule.seqlen_q) - first_row
    seen = dataclasses.replace(schedule, skip_masked_tiles=True).ranges
    first_tile, end = int(seen.first[q_block]), int(seen.end[q_block])
    first_key = first_tile * schedule.block_kv
    keys = min(end * schedule.block_kv, schedule.seqlen_k) - first_key
    if keys < 1:
        return []
    first, last = schedule.mask.edges(schedule.seqlen_q, schedule.seqlen_k)
    shift = first_row - first_key
    mask = _band(None if first is None else first + shift, None if last is None else last + shift)
    problem = Problem(
        1, 1, 1, rows, keys, head_dim, "float32", mask, default_scale(head_dim), softcap, "float32"
    )
    config = TileConfig(schedule.block_q, schedule.block_kv, num_warps=0)
    plan = make_plan(problem, None, "fa2", config)
    rng = np.random.default_rng([seed, q_block])
    q = rng.standard_normal((1, 1, rows, head_dim), np.float32)
    k, v = (rng.standard_normal((1, 1, keys, head_dim), np.float32) for _ in range(2))
    steps: list[Step] = []

    def observer(tile: TileStep) -> None:
        state = tile.m_before, tile.l_before, tile.m_after, tile.l_after
        steps.append(Step(first_tile + tile.kv_block, *state))

    cpu.run(plan, q, k, v, np.empty_like(q), None, observer=observer)
    return sorted(steps, key=lambda step: step.kv_block)


def _band(first: int | None, last: int | None) -> Mask:
    """The mask under which row i sees keys i + first … i + last."""
    if last is not None:
        return Band(None if first is None else last - first, 0, diagonal=last)
    return FULL if first is None else Band(0, None, diagonal=first)
