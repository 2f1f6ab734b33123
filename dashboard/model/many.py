"""What can be said of many measurements: the newest of each kind, who measured most, machines in words."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

from cufa.dashboard.model.measurements import Measurement
from cufa.measure import measured, timing
from cufa.measure.timing import Ratio


def speedup(slow: Measurement, fast: Measurement) -> Ratio:
    """How many times faster, with its 95% interval."""
    if slow.source == fast.source:
        return measured.speedup(slow.row, fast.row)
    return timing.speedup(slow.timing, fast.timing)


def newest(found: Iterable[Measurement]) -> dict[tuple[object, ...], Measurement]:
    """The latest measurement of each key."""
    return {m.key: m for m in sorted(found, key=lambda m: time_of(m.recorded))}


def time_of(text: str) -> datetime.datetime:
    """Of an ISO 8601 text; without a zone it is UTC."""
    when = datetime.datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)


def fastest_read(found: Iterable[Measurement]) -> float:
    """Bytes per second of the fastest reading of device memory among measurements of one machine: of plain reads, and
    of kernels, which would otherwise seem faster than memory. 0: none is known."""
    rates = [0.0]
    for m in found:
        if m.operation.memory_bound:
            seconds = m.seconds * min(1.0, m.of_read or 1.0)
            rates.append(float(m.row.json["io_bytes"]) / seconds)
    return max(rates)


def said_most(found: Iterable[Measurement], by: Callable[[Measurement], str]) -> str:
    """The source or machine, by its name, from which most was measured of today's kernels: a page begins with it, so
    that neither one small run nor what is out of date stands in front of everything else."""
    groups: dict[str, list[Measurement]] = {}
    for m in found:
        groups.setdefault(by(m), []).append(m)
    return max(groups, key=lambda name: weight(groups[name]))


def weight(found: Sequence[Measurement]) -> tuple[int, int]:
    """Of the measurements of one source or machine: how many are of kernels as they are now, and how many in all."""
    return sum(not m.is_stale for m in found), len(found)


def machines(found: Sequence[Measurement]) -> dict[str, str]:
    """Machines in words, by a name for links; recorded measurements of a machine is apart from runs on it."""
    words = {}
    for m in found:
        kind = "recorded" if m.origin == "recorded" else "runs here"
        words[machine_key(m)] = f"{m.machine} · {'GPU' if m.is_gpu else 'CPU'} · {kind}"
    return words


def machine_key(m: Measurement) -> str:
    return f"{'recorded' if m.origin == 'recorded' else 'run'}:{m.machine}"
