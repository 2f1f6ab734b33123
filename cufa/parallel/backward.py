"""The backward of a schedule: shares of a gradient are added on the rank that holds its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .compute import Scores, backward_call
from .group import Group, empty
from .placement import Range, Segment
from .run import Parts, Result, Run, Stage, first_row
from .schedule import Schedule
from .sums import Sum

_GRADIENTS = (("dq", "q"), ("dk", "k"), ("dv", "v"))


class Backward(Run):
    query_arrays = ("dout", "q", "out", "lse", "dlse")

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        super().__init__(group, schedule, given, scores)
        dtype = next(iter(given["q"].values())).dtype
        self.float32 = schedule.summed if dtype.itemsize < 4 else ()
        self.dtypes = {name: "float32" if name in self.float32 else dtype for name, _ in _GRADIENTS}
        self.sums = {
            (rank, name): Sum(group, rank, given[like][rank], self.dtypes[name])
            for name, like in _GRADIENTS
            for rank in group.local
        }

    def compute(self, stage: Stage) -> None:
        work, rank = stage.work, stage.rank
        scores = dataclasses.replace(self.scores.of_heads(rank, work.heads), sink=None)
        if stage.first:
            self.held[rank] = {name: stage.arrays.get(name) for name in self.query_arrays}
        query_arrays, q = tuple(self.held[rank].values()), self.held[rank]["q"]
        k, v = stage.arrays.get("k"), stage.arrays.get("v")
        # Gradients of the rank's own tokens are added in place, gradients of other tokens in arrays that travel.
        sums = []
        for (name, _), like in zip(_GRADIENTS, (q, k, v), strict=True):
            heads, segments = _gradient_place(name, stage)
            own = first_row(rank, segments)
            if own is None:
                sums.append((Sum(self.group, rank, like, self.dtypes[name]), (0, heads[1] - heads[0]), 0))
                stage.arrays[name] = sums[-1][0]
            else:
                sums.append((self.sums[rank, name], heads, own))
        for call in stage.step.calls:
            boxes = [
                (heads, (rows[0] + at, rows[1] + at))
                for (_, heads, at), rows in zip(sums, (call.rows, call.keys, call.keys), strict=True)
            ]
            into = [total.place(*box) for (total, _, _), box in zip(sums, boxes, strict=True)]
            found = backward_call(call, query_arrays, k, v, scores, into, self.float32)
            for (total, _, _), box, place, x in zip(sums, boxes, into, found, strict=True):
                if place is None:
                    total.add(*box, x)

    def results(self, stage: Stage) -> Iterator[Result]:
        rank = stage.rank
        if not stage.step.calls:
            return
        for name, given in _GRADIENTS:
            heads, segments = _gradient_place(name, stage)
            if first_row(rank, segments) is not None:
                continue
            like, total = next(iter(self.given[given].values())), None
            if rank in self.group.local:
                with self.group.on(rank):
                    total = stage.arrays[name].total(self.dtypes[name])
            yield Result(name, heads, segments, total, like, self.dtypes[name])

    def keep(self, result: Result, segment: Segment, x: Any) -> bool:
        rows = segment.row, segment.row + segment.length
        self.sums[segment.rank, result.name].add(result.heads, rows, x)
        return True

    def expect(self, result: Result, segment: Segment) -> tuple[Any, Any]:
        total, rows = self.sums[segment.rank, result.name], (segment.row, segment.row + segment.length)
        place = total.place(result.heads, rows, coming=True)
        if place is not None:
            return place, total.arrived
        like = self.given["q"][segment.rank]
        share = empty(self.group, segment.rank, result.shape(segment.length), like, result.dtype)
        return share, lambda: total.add(result.heads, rows, share)


def _gradient_place(name: str, stage: Stage) -> tuple[Range, Sequence[Segment]]:
    """Heads and tokens of a stage's gradient."""
    work = stage.work
    return (work.heads, work.queries) if name == "dq" else (work.kv_heads, stage.step.keys)
