"""A schedule carried out: arrays of the next steps travel while a step is computed.

Every process walks the schedule of all ranks, so that senders and receivers agree, and computes its own steps.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..problem.checks import module_of
from .compute import Scores, rows_of
from .group import Group, Move, empty
from .placement import Range, Segment
from .schedule import AHEAD, Schedule, Step, Work

Parts = dict[int, Any]
"""An array of each local rank."""

_KEY_ARRAYS = ("k", "v")


@dataclasses.dataclass
class Stage:
    """One step of a rank, and the arrays that it needs."""

    rank: int
    work: Work
    step: Step
    first: bool
    last: bool
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that a stage computes, of tokens that other ranks own."""

    name: str
    heads: Range
    segments: Sequence[Segment]
    array: Any
    """None: another process computes it."""
    like: Any
    """An array that has the result's batch, and its axes after tokens."""
    dtype: Any

    def shape(self, tokens: int) -> tuple[int, ...]:
        batch, *_ = self.like.shape
        return (batch, self.heads[1] - self.heads[0], tokens, *self.like.shape[3:])


class Run:
    """Shared by forward and backward: which arrays a stage needs, and how they travel."""

    query_arrays: tuple[str, ...]

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        self.group, self.schedule, self.given, self.scores = group, schedule, given, scores
        self.stages = [list(_stages(rank, works)) for rank, works in enumerate(schedule.works)]
        self.held: dict[int, dict[str, Any]] = {}
        """Arrays of a rank's current work."""

    def at(self, t: int) -> list[Stage]:
        return [stages[t] for stages in self.stages if t < len(stages)]

    def run(self) -> None:
        group, count = self.group, max(map(len, self.stages), default=0)
        coming, back = collections.deque(map(self._prefetch, range(AHEAD))), None
        for t in range(count):
            coming.append(self._prefetch(t + AHEAD))
            group.finish(coming.popleft())
            sent: list[tuple[Move, Any]] = []
            for stage in self.at(t):
                if stage.rank in group.local:
                    with group.on(stage.rank):
                        self.compute(stage)
                for result in self.results(stage):
                    sent += self._moves_back(stage.rank, result)
                stage.arrays.clear()
            self._take(back)  # the previous step's results have travelled under this step
            back = group.start([move for move, _ in sent]), sent
        self._take(back)

    def _take(self, back: Any) -> None:
        if back is None:
            return
        started, sent = back
        self.group.finish(started)
        for move, callback in sent:
            if callback is not None:
                with self.group.on(move.receiver):
                    callback()

    def _prefetch(self, t: int) -> Any:
        moves: list[Move] = []
        for stage in self.at(t):
            for name in (*self.query_arrays, *_KEY_ARRAYS):
                is_key = name in _KEY_ARRAYS
                if self.given[name] and (is_key or stage.first):
                    segments = stage.step.keys if is_key else stage.work.queries
                    heads = stage.work.kv_heads if is_key else stage.work.heads
                    moves += self._needed(stage, name, segments, heads)
        return self.group.start(moves)

    def _needed(self, stage: Stage, name: str, segments: Sequence[Segment], heads: Range) -> Iterator[Move]:
        """Gives the stage some tokens and heads of an array: a view of the rank's own part, or a new array, whose moves
        are yielded."""
        rank, group, parts = stage.rank, self.group, self.given[name]
        begin = first_row(rank, segments)
        like = next(iter(parts.values()))
        rows = sum(x.length for x in segments)
        if begin is not None:
            if rank in group.local:
                stage.arrays[name] = parts[rank][:, slice(*heads), begin : begin + rows]
            return
        shape = (like.shape[0], heads[1] - heads[0], rows, *like.shape[3:])
        target = None
        if rank in group.local:
            here = self.given["q"][rank]  # keys may come from the host
            target = stage.arrays[name] = empty(group, rank, shape, here, like.dtype)
        at = 0
        for x in neighbours(segments):
            source = box_of(parts[x.rank], heads, x) if x.rank in parts else None
            into = None if target is None else rows_of(target, (at, at + x.length))
            at += x.length
            if x.rank in group.local or rank in group.local:
                yield Move(x.rank, rank, source, into, (*shape[:2], x.length, *shape[3:]), like.dtype)

    def compute(self, stage: Stage) -> None:
        raise NotImplementedError

    def results(self, stage: Stage) -> Iterator[Result]:
        """The arrays of a stage that hold tokens of other ranks."""
        raise NotImplementedError

    def keep(self, result: Result, segment: Segment, x: Any) -> bool:
        """Stores the tokens of a result that the computing rank itself owns. False: a copy is to do it."""
        return False

    def expect(self, result: Result, segment: Segment) -> tuple[Any, Any]:
        """For the owner of a segment: where its tokens go, and a function to call on arrival, or None."""
        raise NotImplementedError

    def _moves_back(self, rank: int, result: Result) -> Iterator[tuple[Move, Any]]:
        """Moves of a result's segments to their owners, each with the function that :meth:`expect` returned."""
        at, group = 0, self.group
        for x in neighbours(result.segments):
            source = None if result.array is None else rows_of(result.array, (at, at + x.length))
            at += x.length
            if x.rank == rank and rank in group.local:
                with group.on(rank):
                    if self.keep(result, x, source):
                        continue
            target = callback = None
            if x.rank in group.local:
                with group.on(x.rank):
                    target, callback = self.expect(result, x)
            if rank in group.local or x.rank in group.local:
                yield Move(rank, x.rank, source, target, result.shape(x.length), result.dtype), callback


def _stages(rank: int, works: Sequence[Work]) -> Iterator[Stage]:
    for work in works:
        for i, step in enumerate(work.steps):
            yield Stage(rank, work, step, i == 0, i == len(work.steps) - 1)


def first_row(rank: int, segments: Sequence[Segment]) -> int | None:
    """The first row, if the segments are adjacent in the rank's own part; else None."""
    joined = neighbours(segments)
    if not joined:
        return 0
    return joined[0].row if len(joined) == 1 and joined[0].rank == rank else None


def box_of(x: Any, heads: Range, segment: Segment) -> Any:
    """A view of a range of heads and one segment of rows of ``x``, a rank's part of an array."""
    return x[:, slice(*heads), segment.row : segment.row + segment.length]


def neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """The segments; adjacent segments of one part are joined and travel in one copy."""
    joined: list[Segment] = []
    for x in segments:
        if joined and joined[-1].rank == x.rank and joined[-1].row + joined[-1].length == x.row:
            x = dataclasses.replace(joined[-1], length=joined.pop().length + x.length)
        joined.append(x)
    return joined


def lse_dtype(q: Any) -> str:
    return "float64" if str(q.dtype) == "float64" else "float32"


def on_device(x: Any, like: Any) -> Any:
    """A small array of numbers, on ``like``'s device and of its dtype."""
    array = module_of(like).asarray(x)
    return array.astype(like.dtype)
