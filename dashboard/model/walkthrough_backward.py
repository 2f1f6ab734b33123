"""The backward of the small case, step by step, as observed in the library's CPU path."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from cufa.dashboard.model import traffic_steps
from cufa.dashboard.model.walkthrough import BLOCK, BLOCKS, HEAD_DIM, MASKS, Case, Floats, inputs
from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem, default_scale
from cufa.reference.dense import attention_reference_backward
from cufa.run.cpu import backward as cpu_backward
from cufa.run.cpu import forward as cpu
from cufa.run.cpu.backward import GradientStep
from cufa.schedule.schedule import Schedule

ALGORITHM = "fa2_backward"
PREPARE, CONVERT = "prepare", "convert"
"""Launches before and after the tiles, by their names in :mod:`cufa.dashboard.model.traffic_steps`."""


@dataclasses.dataclass(frozen=True)
class BackwardStep:
    """One tile, or a launch over all rows. Gradients are the float32 results if the loop ended here; dK includes the
    scale."""

    q_block: int
    kv_block: int
    thread_block: int
    """Number of the GPU thread block, from 0: one per key block."""
    number: int
    """Step of its thread block, from 1; 0 for a skipped tile or a launch over rows."""
    moved: traffic_steps.Step
    tile: GradientStep | None
    """None: a skipped tile, or a launch over rows."""
    before: tuple[Floats, Floats, Floats]
    """dQ of its queries, dK and dV of its keys."""
    after: tuple[Floats, Floats, Floats]
    error: Floats
    """Largest difference of dK and dV from the exact gradients, per key."""
    is_last: bool
    """dK and dV of the keys are complete, and stored."""

    @property
    def kernel(self) -> str:
        return self.moved.kernel


@dataclasses.dataclass(frozen=True)
class BackwardWalk:
    """All steps of the backward of a case."""

    case: Case
    problem: Problem
    schedule: Schedule
    Q: Floats
    """(rows, head_dim)"""
    K: Floats
    V: Floats
    O: Floats
    dO: Floats
    L: Floats
    """(rows,)"""
    D: Floats
    gradients: tuple[Floats, Floats, Floats]
    """dQ, dK, dV of the library."""
    exact: tuple[Floats, Floats, Floats]
    """dQ, dK, dV in float64."""
    steps: tuple[BackwardStep, ...]
    meters: dict[str, tuple[traffic_steps.Step, ...]]
    """Steps of this backward, and of a backward with stored P."""

    is_decode = False


def walk_backward(case: Case) -> BackwardWalk:
    """Run a case forward and backward, and observe the steps of the backward."""
    length, mask = BLOCKS * BLOCK, MASKS[case.mask]
    q, k, v = inputs(case, length, length)
    dout = np.random.default_rng([case.seed, 1]).standard_normal(q.shape).astype(q.dtype)
    config = TileConfig(BLOCK, BLOCK, num_warps=0)
    problem = Problem(1, 1, 1, length, length, HEAD_DIM, "float16", mask, default_scale(HEAD_DIM))
    out, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    cpu.run(make_plan(problem, None, "fa2", config), q, k, v, out, lse)
    problem = dataclasses.replace(problem, operation="backward")
    plan = make_plan(problem, None, config=config)
    dq, dk, dv = (np.empty_like(x) for x in (q, k, v))
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": None}
    observed = list[GradientStep]()
    arrays |= {"dq": dq, "dk": dk, "dv": dv}
    cpu_backward.run(plan, arrays, observer=observed.append)
    exact_dq, exact_dk, exact_dv = attention_reference_backward(dout, q, k, v, mask=mask)
    meters = {
        name: _joined(tuple(model(problem, plan.schedule)))
        for name, model in traffic_steps.BACKWARD_MODELS.items()
    }
    D = np.zeros(length, np.float32)
    for tile in observed:
        D[tile.q_block * BLOCK : (tile.q_block + 1) * BLOCK] = tile.delta
    exact = (exact_dq[0, 0], exact_dk[0, 0], exact_dv[0, 0])
    steps = _follow(meters[ALGORITHM], observed, np.float32(problem.scale), exact)
    Q, K, V, O, dO, L = (x[0, 0] for x in (q, k, v, out, dout, lse))
    stored = (dq[0, 0], dk[0, 0], dv[0, 0])
    return BackwardWalk(case, problem, plan.schedule, Q, K, V, O, dO, L, D, stored, exact, steps, meters)


def _joined(steps: tuple[traffic_steps.Step, ...]) -> tuple[traffic_steps.Step, ...]:
    """Join the steps of each launch over rows into one step."""
    joined = list[traffic_steps.Step]()
    for is_tile, group in itertools.groupby(steps, key=lambda step: step.kv_block >= 0):
        if is_tile:
            joined += group
            continue
        blocks = list(group)
        moves = [
            traffic_steps.Move(x[0].array, sum(move.read for move in x), sum(move.written for move in x))
            for x in zip(*(step.moves for step in blocks), strict=True)
        ]
        joined.append(traffic_steps.Step(blocks[0].kernel, -1, -1, tuple(moves)))
    return tuple(joined)


def _follow(
    moved: tuple[traffic_steps.Step, ...],
    observed: list[GradientStep],
    scale: np.float32,
    exact: tuple[Floats, ...],
) -> tuple[BackwardStep, ...]:
    """Each step of the traffic model with its observed tile: both have the same order."""
    tiles, steps = iter(observed), list[BackwardStep]()
    nothing = np.zeros((BLOCK, HEAD_DIM), np.float32)
    dQ = dict.fromkeys(range(BLOCKS), nothing)
    of_keys = dict.fromkeys(range(BLOCKS), (nothing, nothing))
    done = dict.fromkeys(range(-1, BLOCKS), 0)
    for step in moved:
        i, j = step.q_block, step.kv_block
        tile = None if step.skipped or j < 0 else next(tiles)
        if tile is not None and (tile.q_block, tile.kv_block) != (i, j):
            raise RuntimeError(f"the CPU path is at {tile.q_block, tile.kv_block}, the model at {step}")
        before = (dQ.get(i, nothing), *of_keys.get(j, (nothing, nothing)))
        if tile is not None:
            dQ[i], of_keys[j] = tile.dQ, (tile.dK * scale, tile.dV)
            done[j] += 1
        after = (dQ.get(i, nothing), *of_keys.get(j, (nothing, nothing)))
        keys = slice(max(j, 0) * BLOCK, (max(j, 0) + 1) * BLOCK)
        differences = (np.abs(x - g[keys]).max(axis=1) for x, g in zip(after[1:], exact[1:], strict=True))
        error = np.maximum(*differences)
        is_last = any(move.array == "dK" and move.written for move in step.moves)
        number = 0 if tile is None else done[j]
        steps.append(BackwardStep(i, j, max(j, 0), number, step, tile, before, after, error, is_last))
    return tuple(steps)
