"""A schedule carried out: arrays of the next step travel while a step is computed.

Every process walks the schedule of all ranks, so that senders and receivers agree; it computes its own ranks'.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .compute import Scores, backward_call, forward_call, rows_of
from .group import Group, Move, empty, module_of
from .placement import Range, Segment
from .schedule import Schedule, Step, Work
from .sums import Sum, add_up

Parts = dict[int, Any]
"""An array of each local rank."""

_OF_KEYS = ("k", "v")
_GRADIENTS = (("dq", "q"), ("dk", "k"), ("dv", "v"))


@dataclasses.dataclass
class _Stage:
    """One step of a rank, and what it needs."""

    rank: int
    work: Work
    step: Step
    first: bool
    last: bool
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


class Run:
    """What forward and backward share: which arrays a stage needs, and how they come."""

    of_queries: tuple[str, ...]

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        self.group, self.schedule, self.given, self.scores = group, schedule, given, scores
        self.stages = [list(_stages(rank, works)) for rank, works in enumerate(schedule.works)]
        self.held: dict[int, dict[str, Any]] = {}
        """Arrays of a rank's current work."""

    def at(self, t: int) -> list[_Stage]:
        return [stages[t] for stages in self.stages if t < len(stages)]

    def run(self) -> None:
        group, count = self.group, max(map(len, self.stages), default=0)
        group.begin()
        coming, back = self._prefetch(0), None
        for t in range(count):
            started, coming = coming, self._prefetch(t + 1)
            group.finish(started)
            sent = []
            for stage in self.at(t):
                if stage.rank in group.local:
                    with group.on(stage.rank):
                        self.compute(stage)
                sent += self.results(stage)
                stage.arrays.clear()
            self._take(back)  # what came back from the step before arrived under this one
            back = group.start([move for move, _ in sent]), sent
        self._take(back)
        group.end()

    def _take(self, back: Any) -> None:
        if back is None:
            return
        started, sent = back
        self.group.finish(started)
        for move, come in sent:
            if come is not None:
                with self.group.on(move.receiver):
                    come()

    def _prefetch(self, t: int) -> Any:
        moves: list[Move] = []
        for stage in self.at(t):
            for name in (*self.of_queries, *_OF_KEYS):
                of_keys = name in _OF_KEYS
                if self.given[name] and (of_keys or stage.first):
                    segments = stage.step.keys if of_keys else stage.work.queries
                    heads = stage.work.kv_heads if of_keys else stage.work.heads
                    moves += self._needed(stage, name, segments, heads)
        return self.group.start(moves)

    def _needed(self, stage: _Stage, name: str, segments: Sequence[Segment], heads: Range) -> Iterator[Move]:
        """Of an array of some tokens and heads: a view of the rank's own part, or a new array and what goes there."""
        rank, group, parts = stage.rank, self.group, self.given[name]
        begin = run_of(rank, segments)
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
            source = parts[x.rank][:, slice(*heads), x.row : x.row + x.length] if x.rank in parts else None
            into = None if target is None else target[:, :, at : at + x.length]
            at += x.length
            if x.rank in group.local or rank in group.local:
                yield Move(x.rank, rank, source, into, (*shape[:2], x.length, *shape[3:]), like.dtype)

    def compute(self, stage: _Stage) -> None:
        raise NotImplementedError

    def results(self, stage: _Stage) -> list[tuple[Move, Any]]:
        """What goes to other ranks after a stage, each with a function that takes the array at the receiver."""
        raise NotImplementedError

    def moves_back(
        self, rank: int, segments: Sequence[Segment], x: Any, shape: tuple[int, ...], dtype: Any, into: Any
    ) -> list[tuple[Move, Any]]:
        """The segments of ``x`` to their owners. ``into`` takes (owner, segment, array), and returns where the array
        that is still to come goes, and a function to call when it has come; array None: it comes from elsewhere.
        ``shape`` is that of ``x`` for one token. The rank's own segments are taken at once."""
        found, at, group = [], 0, self.group
        for segment in neighbours(segments):
            part = None if x is None else x[:, :, at : at + segment.length]
            at += segment.length
            owner = segment.rank
            if owner == rank:
                if rank in group.local:
                    with group.on(rank):
                        into(owner, segment, part)
                continue
            size = (*shape[:2], segment.length, *shape[3:])
            target = come = None
            if owner in group.local:
                with group.on(owner):
                    target, come = into(owner, segment, None)
            if rank in group.local or owner in group.local:
                found.append((Move(rank, owner, part, target, size, dtype), come))
        return found


class Forward(Run):
    of_queries = ("q",)

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        super().__init__(group, schedule, given, scores)
        self.out: Parts = {}
        self.lse: Parts = {}
        for rank, q in given["q"].items():
            v_dim = next(iter(given["v"].values())).shape[3]
            self.out[rank] = empty(group, rank, (*q.shape[:3], v_dim), q)
            self.lse[rank] = empty(group, rank, q.shape[:3], q, lse_dtype(q))

    def compute(self, stage: _Stage) -> None:
        work, rank = stage.work, stage.rank
        if stage.first:
            self.held[rank] = self._begin(stage)
        held = self.held[rank]
        scores = self.scores.of_heads(work.heads)
        for call in stage.step.calls:
            forward_call(
                call, held["q"], stage.arrays["k"], stage.arrays["v"], held["out"],
                (held["running"], held["lse"]), scores,
            )  # fmt: skip
        if stage.last:
            for rows in work.unfinished:
                rows_of(held["out"], rows)[...] = rows_of(held["running"], rows)
            for rows in work.uncovered:
                rows_of(held["out"], rows)[...] = 0
                rows_of(held["lse"], rows)[...] = self._lse_of_nothing(scores, held["lse"])

    def _begin(self, stage: _Stage) -> dict[str, Any]:
        """The work's arrays: results in place if the queries are the rank's own, and the running result."""
        work, rank, q = stage.work, stage.rank, stage.arrays["q"]
        xp, begin = module_of(q), run_of(rank, work.queries)
        shape = (*q.shape[:3], self.out[rank].shape[3])
        if begin is not None:
            out, lse = (
                x[rank][:, slice(*work.heads), begin : begin + work.rows] for x in (self.out, self.lse)
            )
        else:
            out, lse = xp.empty(shape, q.dtype), xp.empty(q.shape[:3], lse_dtype(q))
        calls = [call for step in work.steps for call in step.calls]
        running = None
        if not all(call.plain for call in calls):
            running = xp.empty(shape, lse_dtype(q))
            if not any(call.fresh != (0, 0) for call in calls):
                running[...] = 0
                lse[...] = self._lse_of_nothing(self.scores.of_heads(work.heads), lse)
        return {"q": q, "out": out, "lse": lse, "running": running}

    def _lse_of_nothing(self, scores: Scores, like: Any) -> Any:
        return -float("inf") if scores.sink is None else on_device(scores.sink, like)[:, None]

    def results(self, stage: _Stage) -> list[tuple[Move, Any]]:
        work, rank = stage.work, stage.rank
        if not stage.last or run_of(rank, work.queries) is not None:
            return []
        held, found = self.held.get(rank, {}), []
        like = next(iter(self.out.values()))
        shape = (like.shape[0], work.heads[1] - work.heads[0], 0, like.shape[3])
        for name, parts, size, dtype in (
            ("out", self.out, shape, like.dtype), ("lse", self.lse, shape[:3], lse_dtype(like)),
        ):  # fmt: skip

            def into(owner: int, x: Segment, array: Any, parts: Parts = parts) -> tuple[Any, None]:
                target = parts[owner][:, slice(*work.heads), x.row : x.row + x.length]
                if array is not None:
                    add_up([array], target)
                return target, None

            found += self.moves_back(rank, work.queries, held.get(name), size, dtype, into)
        return found


class Backward(Run):
    of_queries = ("dout", "q", "out", "lse", "dlse")

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        super().__init__(group, schedule, given, scores)
        self.sums = {
            (rank, name): Sum(group, rank, given[like][rank])
            for name, like in _GRADIENTS
            for rank in group.local
        }

    def compute(self, stage: _Stage) -> None:
        work, rank = stage.work, stage.rank
        scores = dataclasses.replace(self.scores.of_heads(work.heads), sink=None)
        if stage.first:
            self.held[rank] = {name: stage.arrays.get(name) for name in self.of_queries}
        of_queries, q = tuple(self.held[rank].values()), self.held[rank]["q"]
        k, v = stage.arrays.get("k"), stage.arrays.get("v")
        # Gradients of the rank's own tokens are added where they belong, those of other ranks' in arrays that travel.
        sums = []
        for (name, _), like in zip(_GRADIENTS, (q, k, v), strict=True):
            heads, segments = _of_gradient(name, stage)
            own = run_of(rank, segments)
            if own is None:
                sums.append((Sum(self.group, rank, like), (0, heads[1] - heads[0]), 0))
                stage.arrays[name] = sums[-1][0]
            else:
                sums.append((self.sums[rank, name], heads, own))
        for call in stage.step.calls:
            boxes = [
                (heads, (rows[0] + at, rows[1] + at))
                for (_, heads, at), rows in zip(sums, (call.rows, call.keys, call.keys), strict=True)
            ]
            into = [total.place(*box) for (total, _, _), box in zip(sums, boxes, strict=True)]
            found = backward_call(call, of_queries, k, v, scores, into)
            for (total, _, _), box, place, x in zip(sums, boxes, into, found, strict=True):
                if place is None:
                    total.add(*box, x)

    def results(self, stage: _Stage) -> list[tuple[Move, Any]]:
        rank, found = stage.rank, []
        if not stage.step.calls:
            return []
        for name, given in _GRADIENTS:
            heads, segments = _of_gradient(name, stage)
            if run_of(rank, segments) is not None:
                continue
            like, total = next(iter(self.given[given].values())), None
            width = like.shape[3]
            if rank in self.group.local:
                with self.group.on(rank):
                    total = stage.arrays[name].total()

            def into(
                owner: int, x: Segment, array: Any, name: str = name, heads: Range = heads, width: int = width
            ) -> Any:
                total, box = self.sums[owner, name], (heads, (x.row, x.row + x.length))
                if array is not None:
                    return total.add(*box, array)
                place = total.place(*box, coming=True)
                if place is not None:
                    return place, total.arrived
                like = self.given["q"][owner]
                place = empty(self.group, owner, (like.shape[0], heads[1] - heads[0], x.length, width), like)
                return place, lambda: total.add(*box, place)

            shape = (like.shape[0], heads[1] - heads[0], 0, width)
            found += self.moves_back(rank, segments, total, shape, like.dtype, into)
        return found


def _of_gradient(name: str, stage: _Stage) -> tuple[Range, Sequence[Segment]]:
    """Heads and tokens of a stage's gradient."""
    work = stage.work
    return (work.heads, work.queries) if name == "dq" else (work.kv_heads, stage.step.keys)


def _stages(rank: int, works: Sequence[Work]) -> Iterator[_Stage]:
    for work in works:
        if not work.queries:
            continue
        steps = work.steps or (Step((), ()),)
        for i, step in enumerate(steps):
            yield _Stage(rank, work, step, i == 0, i == len(steps) - 1)


def run_of(rank: int, segments: Sequence[Segment]) -> int | None:
    """The first row, if the segments are neighbours in the rank's own part."""
    if any(x.rank != rank for x in segments):
        return None
    if any(x.row + x.length != y.row for x, y in itertools.pairwise(segments)):
        return None
    return segments[0].row if segments else 0


def neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """The segments, of which those that follow one another in a part are one: they travel together."""
    found: list[Segment] = []
    for x in segments:
        if found and found[-1].rank == x.rank and found[-1].row + found[-1].length == x.row:
            x = dataclasses.replace(found[-1], length=found.pop().length + x.length)
        found.append(x)
    return found


def lse_dtype(q: Any) -> str:
    return "float64" if str(q.dtype) == "float64" else "float32"


def on_device(x: Any, like: Any) -> Any:
    """A small array of numbers where ``like`` is."""
    found = module_of(like).asarray(x)
    return found.astype(like.dtype)
