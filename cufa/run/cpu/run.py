"""Plans carried out by NumPy: the CPU path of each operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ...plan.operation import SCORE_GRADIENTS, Arrays
from ...plan.planner import Plan
from ...problem.element import ELEMENTS
from ...problem.float8 import NAME, block_of, of_tokens
from ...problem.problem import Problem
from . import backward, decode, forward, parts
from .cache import gathered
from .combine import combine
from .scores import DroppedWeights, ScoreFunction


@np.errstate(all="ignore")
def run_on_cpu(plan: Plan, arrays: Arrays) -> None:
    """Execute a plan made for the CPU; results are written in place. Inf, NaN and underflow follow IEEE, whatever error
    state the caller has set."""
    RUNS[plan.problem.operation](plan, arrays)


def _forward(plan: Plan, arrays: Arrays) -> None:
    if plan.problem.lengths.in_cache:
        problem, arrays = gathered(plan.problem, arrays)
        plan = dataclasses.replace(plan, problem=problem)
    if plan.problem.running is not None:
        _running(plan, arrays)
        return
    if plan.problem.scales:
        arrays = _dequantized(plan.problem, arrays)
    for part, x, place in parts.each(plan, arrays):
        slopes, sink = x.get("alibi_slopes"), x.get("sink")
        if not part.problem.empty:
            tensors = x["q"], x["k"], x["v"], x["out"], x["lse"]
            score = ScoreFunction.of(place, x)
            dropped = DroppedWeights.of(plan, place, x)
            forward.run(part, *tensors, alibi_slopes=slopes, sink=sink, score=score, dropped=dropped)
        elif sink is not None and x["lse"] is not None:
            x["lse"][...] = sink[:, None]


def _running(plan: Plan, arrays: Arrays) -> None:
    """Attention joined to the running result: :func:`cufa.run.cpu.combine.combine` of the two, row by row."""
    assert plan.problem.running is not None
    running, lse, out = arrays["running"], arrays["running_lse"], arrays["out"]
    own = np.zeros_like(running), np.full_like(lse, -np.inf)
    plain = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, running=None))
    if not plan.problem.empty:
        _forward(plain, {**arrays, "out": own[0], "lse": own[1]})
    first, end, done, done_end = plan.problem.running
    row = np.arange(lse.shape[-1])
    earlier = np.where((row >= first) & (row < end), -np.inf, lse)
    finished = slice(done, done_end)
    joined, lse[...] = combine(np.stack([running, own[0]]), np.stack([earlier, own[1]]))
    out[..., finished, :] = joined[..., finished, :]
    running[...] = joined


def _dequantized(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """Inputs of e4m3 times their scales in float32. The scores, and products of a tile's values that share a scale,
    differ from products of unscaled numbers by the rounding of float32 only."""
    wide = dict(arrays)
    for name, mode in zip("qkv", problem.scales, strict=True):
        x, scale = arrays[name].view(ELEMENTS[NAME].dtype), wide.pop(f"{name}_scale")
        block = block_of(name, problem.head_dim)
        wide[name] = (
            x.astype(np.float32) * of_tokens(scale, mode, block, x.shape[2], problem.lengths, name)[..., None]
        )
    return wide


def _backward(plan: Plan, arrays: Arrays) -> None:
    dsink = None if arrays.get("dsink") is None else np.zeros(plan.problem.heads)
    score_gradients = {x.name: arrays[x.name] for x in SCORE_GRADIENTS if arrays.get(x.name) is not None}
    totals = {name: np.zeros(x.shape) for name, x in score_gradients.items()}
    for part, part_arrays, place in parts.each(plan, {**arrays, "dsink": dsink, **totals}):
        if dsink is not None:
            part_arrays["dsink"] += backward.sink_gradient(part_arrays)
        if part.problem.empty:
            continue
        # Heads of a query group with different masks are separate parts that share dk and dv.
        shared = ("dk", "dv") if (place.heads.start or 0) % plan.problem.group_size else ()
        own = {name: np.zeros_like(part_arrays[name]) for name in shared}
        dropped = DroppedWeights.of(plan, place, part_arrays)
        backward.run(
            part, {**part_arrays, **own}, score=ScoreFunction.of(place, part_arrays), dropped=dropped
        )
        for name, x in own.items():
            wide = np.promote_types(x.dtype, np.float32)
            part_arrays[name][...] = part_arrays[name].astype(wide) + x.astype(wide)
    if dsink is not None:
        arrays["dsink"][...] = dsink
    for name, x in score_gradients.items():
        x[...] = totals[name]


RUNS: dict[str, Callable[[Plan, Arrays], None]] = {
    "forward": _forward,
    "backward": _backward,
    "decode": decode.run,
}
"""The CPU path of each operation, by its name."""
