"""Running maximum and sum of the rows of one query block, tile by tile, as observed in the CPU path."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.mask_family import Mask
from cufa.problem.problem import Problem, default_scale
from cufa.problem.tile_classes import Bools, Ints, TileClass
from cufa.run.cpu import forward as cpu
from cufa.run.cpu.tiles import TileStep
from cufa.schedule.schedule import Schedule

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile; arrays have one entry per row of the query block."""

    kv_block: int
    m_before: Floats
    l_before: Floats
    m_after: Floats
    l_after: Floats


@dataclasses.dataclass(frozen=True)
class _Cut(Mask):
    """A mask on a rectangle of its matrix."""

    mask: Mask
    first_row: int
    first_key: int
    whole_q: int
    whole_k: int

    def visible(
        self, rows: npt.ArrayLike, keys: npt.ArrayLike, seqlen_q: int, seqlen_k: int, batch: int = 0,
        head: int = 0,
    ) -> Bools:  # fmt: skip
        rows, keys = np.asarray(rows) + self.first_row, np.asarray(keys) + self.first_key
        return self.mask.visible(rows, keys, self.whole_q, self.whole_k, batch, head)

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        q_first, q_end = q_first + self.first_row, q_end + self.first_row
        k_first, k_end = k_first + self.first_key, k_end + self.first_key
        return self.mask.rectangles(q_first, q_end, k_first, k_end, self.whole_q, self.whole_k)


def observe_rows(schedule: Schedule, q_block: int, head_dim: int, softcap: float | None = None) -> list[Step]:
    """Run the rows of one query block through the CPU path, in the order of the key blocks.

    Inputs are standard normal. Only the rows of this block and their visible key tiles are computed: the length of the
    problem does not matter. Other tiles change nothing and are not listed.
    """
    first_row = q_block * schedule.block_q
    rows = min(first_row + schedule.block_q, schedule.seqlen_q) - first_row
    classes = dataclasses.replace(schedule, skip_masked_tiles=True, by_keys=False).classes[q_block]
    visited = np.flatnonzero(classes != TileClass.SKIP)
    if not len(visited):
        return []
    first_tile = int(visited[0])
    first_key = first_tile * schedule.block_kv
    keys = min((int(visited[-1]) + 1) * schedule.block_kv, schedule.seqlen_k) - first_key
    mask = _Cut(schedule.mask, first_row, first_key, schedule.seqlen_q, schedule.seqlen_k)
    problem = Problem(
        1, 1, 1, rows, keys, head_dim, "float32", mask, default_scale(head_dim), softcap, "float32"
    )
    config = TileConfig(schedule.block_q, schedule.block_kv, num_warps=0)
    plan = make_plan(problem, None, "fa2", config)
    rng = np.random.default_rng([0, q_block])
    q = rng.standard_normal((1, 1, rows, head_dim), np.float32)
    k, v = (rng.standard_normal((1, 1, keys, head_dim), np.float32) for _ in range(2))
    steps: list[Step] = []

    def observer(tile: TileStep) -> None:
        state = tile.m_before, tile.l_before, tile.m_after, tile.l_after
        steps.append(Step(first_tile + tile.kv_block, *state))

    cpu.run(plan, q, k, v, np.empty_like(q), None, observer=observer)
    return sorted(steps, key=lambda step: step.kv_block)
