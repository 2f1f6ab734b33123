"""A small case step by step: the observed steps of the library's CPU path, and the bytes that the algorithm moves
(:mod:`cufa.dashboard.model.traffic_steps`). This module computes no attention itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cufa.dashboard.model import traffic_steps
from cufa.kernels import TileConfig
from cufa.masks import window
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, FULL, Mask
from cufa.problem.problem import Problem, default_scale
from cufa.reference.decode import decode_reference
from cufa.reference.dense import attention_reference
from cufa.run.cpu import decode as cpu_decode
from cufa.run.cpu import forward as cpu
from cufa.run.cpu.combine import combine
from cufa.run.cpu.tiles import TileStep
from cufa.schedule.decode import split_range, used_splits
from cufa.schedule.schedule import Schedule

if TYPE_CHECKING:
    from cufa.dashboard.model.walkthrough_backward import BackwardWalk

Floats = npt.NDArray[Any]

Rows = tuple[tuple[float, ...], ...]

BLOCK, HEAD_DIM = 8, 8
"""Queries and keys per tile, and elements per query."""
BLOCKS = 4
"""Tiles per side."""
DECODE_TILES = 8
"""Key tiles of the new token."""
SPREAD = 2.0
"""Standard deviation of Q: with 1, maxima hardly differ and few rows are rescaled."""
MASKS: dict[str, Mask] = {"full": FULL, "causal": CAUSAL, "window": window(9, 0)}
MERGE = -1
"""A value of ``kv_block``: the merge of all splits."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The choice of the page."""

    algorithm: str
    """"fa1", "fa2", "fa3" or "decode"; "fa2_backward" (:mod:`cufa.dashboard.model.walkthrough_backward`)."""
    mask: str = "full"
    """A name of :data:`MASKS`; the token of decode sees all keys."""
    seed: int = 0
    parts: int = 4
    """Splits of decode, stages of each of FA3's rings."""
    Q: Rows = ()
    """The visitor's first rows, padded with 0; the other rows are random. Rows beyond the case are ignored."""
    K: Rows = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """Partial result of one split: attention over its keys, (rows, head_dim), and its weight in each row."""

    O: Floats
    share: Floats


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile. Arrays have one row per query of the block."""

    q_block: int
    kv_block: int
    """:data:`MERGE` for the merge of split keys."""
    thread_block: int
    """Number of the GPU thread block, from 0."""
    number: int
    """Step of its thread block, from 1; 0 for a skipped tile."""
    moved: traffic_steps.Step
    tile: TileStep | None
    """None: skipped, or a merge."""
    O_before: Floats
    O_scaled: Floats
    """``O_before``, rescaled to the new maxima of the tile (FA1: and sums)."""
    O: Floats
    ended: Floats
    """The result if the loop ended here: O / l."""
    error: Floats
    """Largest difference of ``ended`` from the plain softmax, per row."""
    is_last: bool
    """The rows are complete, and stored."""
    parts: tuple[Part, ...] = ()
    """Inputs of a merge."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """All steps of a case."""

    case: Case
    problem: Problem
    schedule: Schedule
    Q: Floats
    """(rows, head_dim)"""
    K: Floats
    V: Floats
    out: Floats
    """The result of the library."""
    exact: Floats
    """The plain softmax, in float64."""
    steps: tuple[Step, ...]
    meters: dict[str, tuple[traffic_steps.Step, ...]]
    """Steps of each compared algorithm; the algorithm of the case comes first."""

    @property
    def is_decode(self) -> bool:
        return self.case.algorithm == "decode"


def walk(case: Case) -> Walk:
    """Run a case and observe its steps."""
    return _decode(case) if case.algorithm == "decode" else _forward(case)


def inputs(case: Case, rows: int, keys: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(case.seed)
    shapes = (1, 1, rows, HEAD_DIM), (1, 1, keys, HEAD_DIM), (1, 1, keys, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    q *= SPREAD
    for x, own in ((q, case.Q), (k, case.K)):
        for row, values in zip(x[0, 0], own, strict=False):
            row[:] = np.pad(values, (0, HEAD_DIM - len(values)))
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def weights(walk: Walk | BackwardWalk) -> Floats:
    """P of the plain softmax in float64, (rows, keys); NaN: hidden by the mask. The result for V = identity, a few
    columns of it at a time."""
    rows, keys = len(walk.Q), len(walk.K)
    count, mask = keys // HEAD_DIM, FULL if walk.is_decode else walk.problem.mask
    identity = np.eye(keys).reshape(keys, count, HEAD_DIM).swapaxes(0, 1)[:, None]
    q, k = (np.broadcast_to(x, (count, 1, *x.shape)) for x in (walk.Q, walk.K))
    columns = np.asarray(attention_reference(q, k, identity, mask=mask))
    P = columns[:, 0].swapaxes(0, 1).reshape(rows, keys)
    return np.where(mask.visible(np.arange(rows), np.arange(keys), rows, keys), P, np.nan)


def _forward(case: Case) -> Walk:
    length = BLOCKS * BLOCK
    q, k, v = inputs(case, length, length)
    mask = MASKS[case.mask]
    problem = Problem(1, 1, 1, length, length, HEAD_DIM, "float16", mask, default_scale(HEAD_DIM))
    plan = make_plan(problem, None, case.algorithm, TileConfig(BLOCK, BLOCK, num_warps=0))
    out, observed = np.empty_like(q), list[TileStep]()
    cpu.run(plan, q, k, v, out, None, observer=observed.append)
    exact = np.asarray(attention_reference(q, k, v, mask=mask))[0, 0]
    meters = {}
    for name, model in traffic_steps.MODELS.items():
        skips = make_plan(problem, None, name).spec.skip_masked_tiles
        meters[name] = tuple(model(problem, dataclasses.replace(plan.schedule, skip_masked_tiles=skips)))
    meters = {name: meters[name] for name in sorted(meters, key=lambda name: name != case.algorithm)}
    at = [0 if case.algorithm == "fa1" else step.q_block for step in meters[case.algorithm]]
    steps = _follow(case, meters[case.algorithm], at, observed, exact)
    return Walk(case, problem, plan.schedule, q[0, 0], k[0, 0], v[0, 0], out[0, 0], exact, steps, meters)


def _decode(case: Case) -> Walk:
    length = DECODE_TILES * BLOCK
    q, k, v = inputs(case, BLOCK, length)
    q = q.reshape(1, BLOCK, 1, HEAD_DIM)  # one token of the query heads that share a key/value head
    problem = Problem(
        1, BLOCK, 1, 1, length, HEAD_DIM, "float16", CAUSAL, default_scale(HEAD_DIM), lengths=Cached(),
        operation="decode",
    )  # fmt: skip
    splits = case.parts
    plan = make_plan(problem, None, "fixed", TileConfig(BLOCK, BLOCK, num_warps=0), num_splits=splits)
    operands = dict.fromkeys(x.name for x in plan.operation.operands)
    out, observed = np.empty_like(q), list[TileStep]()
    cpu_decode.run(
        plan, operands | {"q": q, "k_cache": k, "v_cache": v, "out": out}, observer=observed.append
    )
    exact = np.asarray(decode_reference(q, k, v))[0, :, 0]
    schedule = Schedule(1, length, 1, BLOCK, FULL)
    split, whole = (tuple(traffic_steps.decode(problem, schedule, n, length)) for n in (splits, 1))
    meters = {"decode": split} if splits == 1 else {"decode": split, "whole": whole}
    ends = [split_range(length, splits, n, BLOCK)[1] for n in range(used_splits(length, splits, BLOCK))]
    at = [sum(step.kv_block * BLOCK >= end for end in ends) for step in split]
    steps = _follow(case, split, at, observed, exact)
    if splits > 1:
        steps = (*steps[:-1], _merged(steps, exact))
    return Walk(case, problem, schedule, q[0, :, 0], k[0, 0], v[0, 0], out[0, :, 0], exact, steps, meters)


def _follow(
    case: Case,
    moved: tuple[traffic_steps.Step, ...],
    thread_blocks: list[int],
    observed: list[TileStep],
    exact: Floats,
) -> tuple[Step, ...]:
    """Each step of the traffic model with its observed tile: both have the same order."""
    tiles, steps = iter(observed), list[Step]()
    last: dict[tuple[int, int], Step] = {}  # of each block of rows
    done = dict.fromkeys(thread_blocks, 0)
    for step, at in zip(moved, thread_blocks, strict=True):
        tile = None if step.skipped or step.kv_block == MERGE else next(tiles)
        if tile is not None and (tile.q_block, tile.kv_block) != (step.q_block, step.kv_block):
            raise RuntimeError(f"the CPU path is at {tile.q_block, tile.kv_block}, the model at {step}")
        before = last.get((step.q_block, at))
        O = np.zeros((BLOCK, HEAD_DIM), np.float32) if before is None else before.O
        exact_rows = exact[step.q_block * BLOCK : (step.q_block + 1) * BLOCK]
        error = _error(O, exact_rows) if before is None else before.error
        done[at] += not step.skipped
        number = 0 if step.skipped else done[at]
        ended = O if before is None else before.ended
        seen_step = Step(
            step.q_block, step.kv_block, at, number, step, tile, O, O, O, ended, error, _is_stored(step)
        )
        if tile is not None:
            scaled, ended = O * _old_weight(case, tile)[:, None], _ended(case, tile)
            seen_step = dataclasses.replace(
                seen_step, O_scaled=scaled, O=tile.O, ended=ended, error=_error(ended, exact_rows)
            )
        steps.append(seen_step)
        last[step.q_block, at] = seen_step
    return tuple(steps)


def _is_stored(step: traffic_steps.Step) -> bool:
    return any(move.array in ("L", "parts") and move.written for move in step.moves)


def _merged(steps: tuple[Step, ...], exact: Floats) -> Step:
    """The last step: the library's merge of the splits."""
    tiles = [step.tile for step in steps if step.is_last and step.tile is not None]
    parts = np.stack([cpu.normalise(tile.O.copy(), tile.l_after[:, None]) for tile in tiles])
    lse = np.stack([tile.m_after + np.log(tile.l_after) for tile in tiles])
    O, whole = combine(parts, lse)
    shares = np.exp(lse - whole)
    merged = tuple(Part(part, share) for part, share in zip(parts, shares, strict=True))
    return dataclasses.replace(steps[-1], O=O, ended=O, error=_error(O, exact), parts=merged)


def _ended(case: Case, tile: TileStep) -> Floats:
    """The result if the loop ended with this tile."""
    with np.errstate(invalid="ignore"):  # rows without a visible key so far
        return tile.O if case.algorithm == "fa1" else cpu.normalise(tile.O.copy(), tile.l_after[:, None])


def _old_weight(case: Case, tile: TileStep) -> Floats:
    """Factor of each row's O: alpha; in FA1, which divides O by l at each step, alpha · old l ÷ new l."""
    if case.algorithm != "fa1":
        return tile.alpha
    return tile.alpha * tile.l_before / np.where(tile.l_after == 0, 1, tile.l_after)


def _error(O: Floats, exact: Floats) -> Floats:
    """Largest difference of each row."""
    largest: Floats = np.abs(O.astype(np.float64) - exact).max(axis=1)
    return largest
