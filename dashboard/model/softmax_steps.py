"""Running maximum and sum of the rows of one query block, tile by tile: what the CPU path does, observed."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from cufa.backends import cpu
from cufa.core.problem import Problem, default_scale
from cufa.core.schedule import Schedule
from cufa.kernels import TileConfig
from cufa.planner import make_plan

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile; arrays have one entry a row of the query block."""

    kv_block: int
    m_before: Floats
    l_before: Floats
    m_after: Floats
    l_after: Floats


def observe_rows(schedule: Schedule, q_block: int, head_dim: int, seed: int = 0) -> list[Step]:
    """Run the rows of one query block through the CPU path, in the order of FlashAttention-2's inner loop.

    Inputs are standard normal. Only this block's rows, and the keys that its last row can see, are computed,
    so the length of the problem does not matter. Tiles beyond those keys change nothing and are not listed.
    """
    rows = min((q_block + 1) * schedule.block_q, schedule.seqlen_q) - q_block * schedule.block_q
    last_row = q_block * schedule.block_q + rows
    keys = schedule.seqlen_k
    if schedule.causal:  # the same diagonal, in a problem that ends with this block
        keys = min(last_row + schedule.seqlen_k - schedule.seqlen_q, schedule.seqlen_k)
    if keys < 1:
        return []
    problem = Problem(
        1, 1, 1, rows, keys, head_dim, "float32", schedule.causal, default_scale(head_dim), "float32"
    )
    config = TileConfig(schedule.block_q, schedule.block_kv, num_warps=0)
    plan = make_plan(problem, None, "fa2", config)
    rng = np.random.default_rng([seed, q_block])
    q = rng.standard_normal((1, 1, rows, head_dim), np.float32)
    k, v = (rng.standard_normal((1, 1, keys, head_dim), np.float32) for _ in range(2))
    steps: list[Step] = []

    def observer(batch: int, head: int, i: int, j: int, *state: Floats) -> None:
        steps.append(Step(j, *(np.array(x, np.float32) for x in state)))

    cpu.run(plan, q, k, v, np.empty_like(q), None, observer=observer)
    return steps
