"""Functions of several measurements: speed-ups, the largest source, machines in words."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cufa.dashboard.model.measurements import Measurement
from cufa.measure import measured, timing
from cufa.measure.timing import Ratio

Item = TypeVar("Item")
Key = TypeVar("Key")


def speedup(slow: Measurement, fast: Measurement) -> Ratio:
    """How many times faster, with its 95% interval."""
    if slow.source == fast.source:
        return measured.speedup(slow.row, fast.row)
    return timing.speedup(slow.timing, fast.timing)


def time_of(text: str) -> datetime.datetime:
    """Time of an ISO 8601 text; without a zone: UTC."""
    when = datetime.datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)


def fastest_read(rows: Iterable[Measurement]) -> float:
    """Bytes per second of the fastest read of device memory on one machine: of plain reads and of memory-bound kernels,
    which may be faster than the plain read. 0: unknown."""
    rates = [0.0]
    for m in rows:
        if m.operation.memory_bound:
            seconds = m.seconds * min(1.0, m.of_read or 1.0)
            rates.append(float(m.row.json["io_bytes"]) / seconds)
    return max(rates)


def said_most(rows: Iterable[Measurement], by: Callable[[Measurement], str]) -> str:
    """Name of the source or machine with the most measurements of current kernels: the default of pages."""
    groups = grouped(rows, by)
    return max(groups, key=lambda name: weight(groups[name]))


def grouped(items: Iterable[Item], by: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def days(rows: Iterable[Measurement]) -> str:
    """First and last date."""
    dates = sorted({m.recorded[:10] for m in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def weight(rows: Sequence[Measurement]) -> tuple[int, int]:
    """Number of measurements of current kernels, and of all measurements."""
    return sum(not m.is_stale for m in rows), len(rows)


def machines(rows: Sequence[Measurement]) -> dict[str, str]:
    """Machines in words by name in links; recorded measurements and runs of a machine are separate."""
    words = {}
    for m in rows:
        kind = "recorded" if m.origin == "recorded" else "runs here"
        words[m.machine_key] = f"{m.machine} · {'GPU' if m.is_gpu else 'CPU'} · {kind}"
    return words
