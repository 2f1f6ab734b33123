"""Arithmetic done and useful, and the speed-up by skipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cufa.problem.columns import Chunks
from cufa.problem.mask import FULL, Band, Mask
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule, Tile

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations of one call, :func:`flops_per_score` each."""

    done: int
    """FLOP of visited tiles, counted whole."""
    useful: int
    """FLOP of visible scores."""
    dense: int
    """FLOP of all scores, without a mask."""

    @property
    def waste(self) -> int:
        """FLOP of masked scores and padding in visited tiles."""
        return self.done - self.useful

    @property
    def waste_share(self) -> float:
        return self.waste / self.done if self.done else 0.0


def work(problem: Problem, schedule: Schedule) -> Work:
    """The operations of all heads of a problem."""
    factor = flops_per_score(problem) * problem.batch * problem.heads
    scores = schedule.visited * schedule.block_q * schedule.block_kv
    return Work(factor * scores, problem.flops, factor * problem.seqlen_q * problem.seqlen_k)


def flops_per_score(problem: Problem) -> int:
    """Forward 4 · head_dim, of which 2 are v's; backward 10 · head_dim, of which 4 are v's."""
    one = Problem(1, 1, 1, 1, 1, problem.head_dim, problem.dtype, FULL, operation=problem.operation)
    return dataclasses.replace(one, v_head_dim=problem.v_head_dim).flops


def flop_words(problems: Iterable[Problem]) -> str:
    """How the FLOP of these problems are counted."""
    found = [*problems]
    equal = (dataclasses.replace(p, v_head_dim=None) for p in found)
    counted = sorted({flops_per_score(p) // p.head_dim for p in equal})
    of_values = ", 2 of 4 and 4 of 10 with v's" if any(p.v_dim != p.head_dim for p in found) else ""
    return f"FLOP are {' or '.join(map(str, counted))} · head dim per visible score{of_values}"


def class_counts(schedule: Schedule) -> dict[Tile, int]:
    """Tiles of one head by class."""
    counts = np.bincount(schedule.tiles.ravel(), minlength=len(Tile))
    return {tile: int(counts[tile]) for tile in Tile}


def wanted_scores(schedule: Schedule, step: int = 1) -> Ints:
    """Visible scores of one head, per square of ``step`` × ``step`` tiles. A band: scores up to its last diagonal,
    minus scores before its first. Other masks: counted key by key."""
    height, width = schedule.block_q * step, schedule.block_kv * step
    if schedule.mask.irregular_kind:
        return _wanted_by_key(schedule, height, width)
    top = np.arange(0, schedule.seqlen_q, height)[:, None]
    left = np.arange(0, schedule.seqlen_k, width)[None, :]
    bottom = np.minimum(top + height, schedule.seqlen_q)
    columns = np.minimum(width, schedule.seqlen_k - left)
    first, last = schedule.mask.edges(schedule.seqlen_q, schedule.seqlen_k)

    def up_to(diagonal: int) -> Ints:
        """Scores of each square with key - query ≤ diagonal."""

        def before(row: Ints) -> Ints:
            """Scores of the rows before ``row``. From the row where the diagonal enters the square, each row has one
            score more than the previous row: a sum of consecutive integers."""
            entered = row + diagonal - left
            visible = np.clip(entered, 0, columns)
            scores: Ints = visible * (visible + 1) // 2 + columns * np.maximum(entered - columns, 0)
            return scores

        return before(bottom) - before(top)

    wanted = (bottom - top) * columns if last is None else up_to(last)
    return wanted if first is None else wanted - up_to(first - 1)


def _wanted_by_key(schedule: Schedule, height: int, width: int) -> Ints:
    lengths = schedule.seqlen_q, schedule.seqlen_k
    counts = [
        schedule.mask.visible_per_key(*lengths, first, min(first + height, schedule.seqlen_q))
        for first in range(0, schedule.seqlen_q, height)
    ]
    wanted: Ints = np.add.reduceat(np.array(counts), np.arange(0, schedule.seqlen_k, width), axis=1)
    return wanted


def skip_speedup(schedule: Schedule) -> float:
    """All tiles ÷ visited tiles: the gain of skipping if all tiles cost the same."""
    return schedule.total / schedule.visited if schedule.visited else 1.0


def skip_speedups(schedule: Schedule, lengths: Iterable[int]) -> list[float]:
    """:func:`skip_speedup` for Sq = Sk at each length, same tiles and mask, with skipping."""
    return [
        skip_speedup(dataclasses.replace(schedule, seqlen_q=n, seqlen_k=n, skip_masked_tiles=True))
        for n in lengths
    ]


def skip_limit(mask: Mask) -> float:
    """Limit of :func:`skip_speedup` for long sequences; infinite for chunks and for windows with two sides. The prefix
    and the first tokens of a band do not count."""
    length = 1 << 24
    if isinstance(mask, Chunks):
        return float("inf")
    if isinstance(mask, Band):
        mask = Band(mask.left, mask.right, mask.diagonal)
    visible = mask.visible_scores(length, length)
    limit = length * length / visible if visible else float("inf")
    return round(limit, 3) if limit < 100 else float("inf")
