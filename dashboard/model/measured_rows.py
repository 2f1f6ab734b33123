"""Rows of evidence and of runs, as measurements, and what damage in them is called."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from cufa.dashboard.model.many import time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.worker.jobs import CPU, Json
from cufa.dashboard.worker.reading import DAMAGE
from cufa.dashboard.worker.run import Run
from cufa.measure import renewal
from cufa.measure.cases import READ
from cufa.measure.recorded import rows_of


def of_rows(record: Json, origin: str, source: str, title: str = "", recorded: str = "") -> list[Measurement]:
    """The rows of evidence, or of a run of this ``title`` and time. Raises KeyError, TypeError or ValueError when
    the record is damaged. What is read is what later figures need, so that damage shows here."""
    is_gpu = "arch" in record["environment"]
    counted: dict[str, int] = {}
    found = []
    for _, group in itertools.groupby(rows_of(record), key=lambda row: row.group):
        rows = list(group)
        environment = renewal.environment_of(record, rows[0].suite, rows[0].regime)
        read = next((row for row in rows if row.label == READ), None)
        for row in rows:
            number = counted[row.suite] = counted.get(row.suite, -1) + 1
            if row is read:
                continue
            m = Measurement(
                ".".join(filter(None, (source, row.suite, str(number)))),
                origin,
                source,
                row.suite or title,
                environment["device"],
                is_gpu,
                recorded or environment["recorded"],
                row.label if is_gpu else row.label.removesuffix(", 1 an SM"),  # a CPU has none
                row,
                read.p50_ns / row.p50_ns if read is not None else None,
                str(environment.get("commit") or row.json.get("digest") or ""),
                str(environment.get("gpu", {}).get("clocks.max.sm", "")),
            )
            _read(m)
            found.append(m)
    return found


def _read(m: Measurement) -> tuple[Any, ...]:
    first = m.row.json["samples_ns"][0]
    return m.key, m.seconds, m.tflops, m.gbytes, m.of_ceiling, m.ceiling, m.error, first, time_of(m.recorded)


def of_run(run: Run) -> list[Measurement]:
    """The rows of a run, finished or not; none of a run that :func:`checked` would not let pass."""
    try:
        return _of_run(run)
    except DAMAGE:
        return []


def checked(run: Run) -> Run:
    """The run, or in its place one that says why its rows cannot be read."""
    try:
        for m in _of_run(run):
            told = m.as_dict(), m.family, m.load_text, m.needs, m.predicted, m.plan, m.prepare_seconds
            numbers = (m.seconds, *m.timing.samples, *m.needs.values(), m.tflops, m.gbytes)
            if not all(math.isfinite(n) and n >= 0 for n in numbers) or not m.seconds or not m.timing.p50:
                raise ValueError(f"a time or rate of {told[0]['kernel']} is no positive number")
    except DAMAGE as error:
        return Run.damaged(run.id, f"its record is damaged: {error!r}"[:400])
    return run


def _of_run(run: Run) -> list[Measurement]:
    if not run.rows:
        return []
    return [
        dataclasses.replace(m, is_gpu=run.job.device != CPU)
        for m in of_rows(run.record, "run", run.id, run.job.title, run.submitted.isoformat())
    ]
