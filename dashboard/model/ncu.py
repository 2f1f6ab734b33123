"""Counters of NVIDIA's profiler, from the output of ``ncu --csv``.

Long form: one line per kernel and metric. With ``--page raw``: one line per kernel, one column per metric; the second
line has the units.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence

_KERNEL, _METRIC, _UNIT, _VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
_ID = "ID"
_FACTORS = {
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12, "nsecond": 1e-9, "usecond": 1e-6,
    "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "inst": 1.0, "": 1.0,
    "sector": 32.0, "register/thread": 1.0,
}  # fmt: skip
"""Factors from printed units to bytes, seconds and fractions."""


class NotNcuError(ValueError):
    """The text is not output of ``ncu --csv``; the message has the reason and the right command."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One counter of one kernel, as printed."""

    name: str
    value: float
    unit: str

    @property
    def si(self) -> float:
        """The value in bytes, seconds or fractions if the unit is known, otherwise unchanged."""
        return self.value * _FACTORS.get(self.unit.lower(), 1.0)


@dataclasses.dataclass(frozen=True)
class Profile:
    """One launch."""

    number: str
    kernel: str
    metrics: tuple[Metric, ...]

    def first(self, names: Iterable[str]) -> float | None:
        """The first available metric of ``names``, in SI units."""
        known = {m.name: m for m in self.metrics}
        return next((known[name].si for name in names if name in known), None)


HOW = "ncu --csv --page raw --set full --clock-control none python your_script.py > profile.csv"


def parse(text: str) -> list[Profile]:
    """The launches in a file. Raises :class:`NotNcuError`."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if _KERNEL in line and _ID in line), None)
    if start is None:
        raise NotNcuError(
            f'no line names the column "{_KERNEL}": this is not output of ncu --csv. Create it with: {HOW}'
        )
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines[start:])), strict=True))
    except csv.Error as error:
        raise NotNcuError(f"the table cannot be read: {error}. Create it again: {HOW}") from error
    head, rows = rows[0], [row for row in rows[1:] if row]
    if not rows:
        raise NotNcuError(f"the table has a header but no kernel: nothing was profiled. Try {HOW}")
    profiles = _long(head, rows) if _METRIC in head else _wide(head, rows)
    if not any(profile.metrics for profile in profiles):
        raise NotNcuError(f"no metric has a number. Try {HOW}")
    return profiles


def _long(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Profile]:
    missing = [name for name in (_ID, _KERNEL, _METRIC, _UNIT, _VALUE) if name not in head]
    if missing:
        raise NotNcuError(f"the table has no column {', '.join(missing)}")
    column = {name: head.index(name) for name in (_ID, _KERNEL, _METRIC, _UNIT, _VALUE)}
    launches: dict[tuple[str, str], list[Metric]] = {}
    for row in _checked(head, rows):
        metrics = launches.setdefault((row[column[_ID]], row[column[_KERNEL]]), [])
        value = _number(row[column[_VALUE]])
        if value is not None:
            metrics.append(Metric(row[column[_METRIC]], value, row[column[_UNIT]]))
    return [Profile(*key, tuple(metrics)) for key, metrics in launches.items()]


def _wide(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Profile]:
    units, *rest = rows
    if units[head.index(_ID)].strip() or not rest:
        raise NotNcuError(f"the raw page has no line of units below its header. Try {HOW}")
    profiles = []
    for row in _checked(head, rest):
        values = zip(head, row, units, strict=True)
        metrics = tuple(
            Metric(name, value, unit)
            for name, text, unit in values
            if "__" in name and (value := _number(text)) is not None
        )
        profiles.append(Profile(row[head.index(_ID)], row[head.index(_KERNEL)], metrics))
    return profiles


def _checked(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            text = f"row {number} has {len(row)} columns, the header {len(head)}"
            raise NotNcuError(f"{text}: the file is incomplete or mixed")
        yield row


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


#: Lines of the comparison: words, and names of the metric (the first available counts).
SHOWN = {
    "time": ("gpu__time_duration.sum", "Duration"),
    "device memory, read": ("dram__bytes_read.sum",),
    "device memory, written": ("dram__bytes_write.sum",),
    "requested from L2, read": ("lts__t_bytes_op_read.sum", "lts__t_sectors_op_read.sum"),
    "requested from L2, written": ("lts__t_bytes_op_write.sum", "lts__t_sectors_op_write.sum"),
    "registers per thread": ("launch__registers_per_thread", "Registers Per Thread"),
    "occupancy achieved": ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
    "tensor cores busy": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
}
