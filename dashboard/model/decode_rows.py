"""Measured decoding, from recorded evidence and from runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from cufa.bench.decode import READ, DecodeTiming
from cufa.bench.evidence import timing_of
from cufa.dashboard.worker.jobs import Json
from cufa.decode.problem import DecodeProblem


@dataclasses.dataclass(frozen=True)
class DecodeRow(DecodeTiming):
    """One contender of a case, read back from a record."""

    schedule: str
    """"fixed" or "balanced"; empty for another library's kernel."""
    num_splits: int
    of_read: float
    """Share of what a plain read of as many bytes reached beside it: 1.0 is all that memory gives."""


def decode_rows(rows: Iterable[Json]) -> list[DecodeRow]:
    """Of a record's section "decode". Raises KeyError, TypeError or StopIteration when it is damaged."""
    found = []
    for _, group in itertools.groupby(rows, key=lambda row: row["case"]):
        members = list(group)
        read = next(float(row["p50_ns"]) for row in members if row["label"] == READ)
        found += [_row(row, read) for row in members if row["label"] != READ]
    return found


def _row(row: Json, read_ns: float) -> DecodeRow:
    return DecodeRow(
        row["case"],
        row["label"],
        DecodeProblem(**row["problem"]),
        timing_of(row),
        row["kv_bytes"],
        row["max_error"],
        row.get("schedule", ""),
        row.get("num_splits", 0),
        read_ns / row["p50_ns"],
    )


def rows_of_batch(rows: Sequence[DecodeRow], problem: DecodeProblem, kv_bytes: int) -> list[DecodeRow]:
    """Of one ragged batch, told by its problem and the bytes of its lengths; empty unless both schedules are
    there."""
    same = [r for r in rows if r.problem == problem and r.kv_bytes == kv_bytes and r.schedule]
    return same if {r.schedule for r in same} == {"fixed", "balanced"} else []


def splits_measured(rows: Sequence[DecodeRow], problem: DecodeProblem) -> dict[int, DecodeRow]:
    """Fixed splits of one problem by their number, as measured last."""
    return {r.num_splits: r for r in rows if r.schedule == "fixed" and r.problem == problem}
