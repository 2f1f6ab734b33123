"""Measurements from the rows of cards and runs; errors of damaged rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from cufa.dashboard.model.many import time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.worker.jobs import CPU, Json
from cufa.dashboard.worker.reading import DAMAGE
from cufa.dashboard.worker.run import Run
from cufa.measure.cards import Card
from cufa.measure.cases import READ
from cufa.measure.measured import Measured, rows_of
from cufa.measure.quantized import QUANTIZE


def of_card(card: Card, past: bool = False) -> list[Measurement]:
    """The rows of a card, or its earlier rows. Raises KeyError, TypeError or ValueError for a damaged row."""

    def about(row: Measured) -> tuple[str, str, Json]:
        return card.name + (f"@{row.recorded}" if past else ""), row.suite, card.sessions[row.recorded]

    return _read_rows(card.past if past else card.rows, "recorded", about)


def _read_rows(
    rows: Iterable[Measured], origin: str, about: Callable[[Measured], tuple[str, str, Json]], when: str = ""
) -> list[Measurement]:
    """``about``: source, title and environment of a row. Reads all values that figures need: damage raises here."""
    counted: dict[tuple[str, str], int] = {}
    measured = []
    for _, group in itertools.groupby(rows, key=lambda row: (row.recorded, row.group)):
        contenders = list(group)
        read = next((row for row in contenders if row.label == READ), None)
        for row in contenders:
            source, title, environment = about(row)
            number = counted[source, row.suite] = counted.get((source, row.suite), -1) + 1
            if row is read or row.label == QUANTIZE:
                continue
            is_gpu = "arch" in environment
            m = Measurement(
                ".".join(filter(None, (source, row.suite, str(number)))),
                origin,
                source,
                title,
                environment["device"],
                is_gpu,
                when or environment["recorded"],
                row.label if is_gpu else row.label.removesuffix(", 1 an SM"),  # a CPU has no SMs
                row,
                read.p50_ns / row.p50_ns if read is not None else None,
                str(environment.get("commit") or row.json.get("digest") or ""),
                str(environment.get("gpu", {}).get("clocks.max.sm", "")),
                environment=environment,
            )
            _read(m)
            measured.append(m)
    return measured


def _read(m: Measurement) -> tuple[Any, ...]:
    rates = m.tflops, m.gbytes, m.of_ceiling, m.ceiling
    return m.key, m.seconds, *rates, m.error, m.timing.p90, m.timing.count, time_of(m.recorded)


def of_run(run: Run) -> list[Measurement]:
    """The rows of a run, finished or not; empty for a damaged run (:func:`checked`)."""
    try:
        return _read_run(run)
    except DAMAGE:
        return []


def checked(run: Run) -> Run:
    """The run; for unreadable rows, a damaged run with the reason."""
    try:
        for m in _read_run(run):
            values = m.as_dict(), m.family, m.load_text, m.needs, m.predicted, m.plan, m.prepare_seconds
            numbers = (m.seconds, *m.timing.samples, *m.needs.values(), m.tflops, m.gbytes)
            if not all(math.isfinite(n) and n >= 0 for n in numbers) or not m.seconds or not m.timing.p50:
                raise ValueError(f"a time or rate of {values[0]['kernel']} is not a positive number")
    except DAMAGE as error:
        return Run.damaged(run.id, f"its record is damaged: {error!r}"[:400])
    return run


def _read_run(run: Run) -> list[Measurement]:
    if not run.rows:
        return []
    about = run.id, run.job.title, run.record["environment"]
    result = _read_rows(rows_of(run.record), "run", lambda row: about, run.submitted.isoformat())
    return [dataclasses.replace(m, is_gpu=run.job.device != CPU) for m in result]
