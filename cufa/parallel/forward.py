"""The forward of a schedule: partial results are joined where they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..problem.checks import module_of
from .compute import Scores, forward_call, rows_of
from .group import Group, empty
from .placement import Segment
from .run import Parts, Result, Run, Stage, box_of, first_row, lse_dtype, on_device
from .schedule import Schedule


class Forward(Run):
    query_arrays = ("q",)

    def __init__(self, group: Group, schedule: Schedule, given: Mapping[str, Parts], scores: Scores) -> None:
        super().__init__(group, schedule, given, scores)
        self.out: Parts = {}
        self.lse: Parts = {}
        for rank, q in given["q"].items():
            v_dim = next(iter(given["v"].values())).shape[3]
            self.out[rank] = empty(group, rank, (*q.shape[:3], v_dim), q)
            self.lse[rank] = empty(group, rank, q.shape[:3], q, lse_dtype(q))

    def compute(self, stage: Stage) -> None:
        work, rank = stage.work, stage.rank
        if stage.first:
            self.held[rank] = self._begin(stage)
        held = self.held[rank]
        scores = self.scores.of_heads(rank, work.heads)
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
                rows_of(held["lse"], rows)[...] = self._lse_without_keys(scores, held["lse"])

    def _begin(self, stage: Stage) -> dict[str, Any]:
        """The work's arrays: the results, in place if the queries are the rank's own, and the running result."""
        work, rank, q = stage.work, stage.rank, stage.arrays["q"]
        xp, begin = module_of(q), first_row(rank, work.queries)
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
                lse[...] = self._lse_without_keys(self.scores.of_heads(rank, work.heads), lse)
        return {"q": q, "out": out, "lse": lse, "running": running}

    def _lse_without_keys(self, scores: Scores, like: Any) -> Any:
        return -float("inf") if scores.sink is None else on_device(scores.sink, like)[:, None]

    def results(self, stage: Stage) -> Iterator[Result]:
        work, rank = stage.work, stage.rank
        if not stage.last or first_row(rank, work.queries) is not None:
            return
        for name, parts in (("out", self.out), ("lse", self.lse)):
            like = next(iter(parts.values()))
            yield Result(name, work.heads, work.queries, self.held.get(rank, {}).get(name), like, like.dtype)

    def expect(self, result: Result, segment: Segment) -> tuple[Any, None]:
        parts = self.out if result.name == "out" else self.lse
        return box_of(parts[segment.rank], result.heads, segment), None
