"""The backward of a schedule: shares of gradients are added where their tokens are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .compute import Scores, backward_call
from .group import Group, Move, empty
from .placement import Range, Segment
from .run import Parts, Run, Stage, run_of
from .schedule import Schedule
from .sums import Sum

_GRADIENTS = (("dq", "q"), ("dk", "k"), ("dv", "v"))


class Backward(Run):
    of_queries = ("dout", "q", "out", "lse", "dlse")

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        super().__init__(group, schedule, given, scores)
        self.sums = {
            (rank, name): Sum(group, rank, given[like][rank])
            for name, like in _GRADIENTS
            for rank in group.local
        }

    def compute(self, stage: Stage) -> None:
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

    def results(self, stage: Stage) -> list[tuple[Move, Any]]:
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


def _of_gradient(name: str, stage: Stage) -> tuple[Range, Sequence[Segment]]:
    """Heads and tokens of a stage's gradient."""
    work = stage.work
    return (work.heads, work.queries) if name == "dq" else (work.kv_heads, stage.step.keys)
