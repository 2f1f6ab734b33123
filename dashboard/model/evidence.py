"""Recorded evidence as the figures want it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cufa.bench import records
from cufa.bench.limits import Limits
from cufa.core.problem import Problem
from cufa.dashboard.model.decode_rows import DecodeRow, decode_rows


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured row."""

    suite: str
    label: str
    kernel: str | None
    """Name in the registry; None for another library's."""
    problem: Problem
    seconds: float
    """Median."""
    tflops: float
    of_ceiling: float
    ceiling: str
    needs: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that each resource needs by itself, where that is derived (:mod:`cufa.bench.bounds`)."""
    predicted: float | None = None
    """Seconds predicted from these."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was measured on one machine on one day."""

    name: str
    device: str
    arch: str
    """"sm_90" and the like; empty for a CPU."""
    recorded: str
    """Date and time, ISO 8601."""
    limits: Limits | None
    rows: tuple[Measured, ...]
    stale: tuple[str, ...]
    """Kernels whose sources have changed since."""
    decode: tuple[DecodeRow, ...] = ()

    @property
    def where(self) -> str:
        """Machine and date, which no recorded figure goes without."""
        return f"{self.device}, {self.recorded[:10]}"


def load(directory: Path | None = None) -> list[Evidence]:
    """All recorded evidence; empty when none is there. Raises ValueError for a damaged file."""
    return list(_load(*state_of(directory or records.RECORDS_DIR)))


State = tuple[Path, tuple[tuple[str, int, int], ...]]


def state_of(directory: Path) -> State:
    """A folder and its records as they are now: what has been read of them holds until this changes."""
    stats = [(file.name, file.stat()) for file in sorted(directory.glob("*.json"))]
    return directory, tuple((name, found.st_mtime_ns, found.st_size) for name, found in stats)


@functools.lru_cache(4)  # every rerun of a page asks, and reading takes 30 ms
def _load(directory: Path, _: object) -> tuple[Evidence, ...]:
    return tuple(_evidence(name, record) for name, record in records.load_all(directory).items())


def _evidence(name: str, record: records.Json) -> Evidence:
    try:
        limits = record.get("limits")
        rows = tuple(_row(suite, row) for suite, found in record["suites"].items() for row in found["rows"])
        environment = record["environment"]
        stale = tuple(records.stale_kernels(record))
        ceilings = Limits(**limits) if limits else None
        return Evidence(
            name,
            environment["device"],
            environment.get("arch", ""),
            environment["recorded"],
            ceilings,
            rows,
            stale,
            tuple(decode_rows(record.get("decode", {}).get("rows", ()))),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}.json lacks {error}") from error


def _row(suite: str, row: dict[str, Any]) -> Measured:
    return Measured(
        suite,
        row["label"],
        row.get("kernel"),
        Problem(**row["problem"]),
        row["p50_ns"] * 1e-9,
        row["tflops"],
        row["of_ceiling"],
        row["ceiling"],
        {name: ns * 1e-9 for name, ns in row.get("needs_ns", {}).items()},
        row["predicted_ns"] * 1e-9 if "predicted_ns" in row else None,
    )


def speedups(rows: Iterable[Measured], slow: str, fast: str) -> dict[str, dict[int, float]]:
    """Time of kernel ``slow`` over time of ``fast`` by length, for each set of shapes that differ only in
    length and batch; the key says which."""
    times: dict[tuple[str, Problem], dict[str, float]] = {}
    for row in rows:
        if row.kernel in (slow, fast) and row.problem.causal:
            times.setdefault((row.suite, row.problem), {})[row.kernel] = row.seconds
    found: dict[str, dict[int, float]] = {}
    for (_, p), by_kernel in times.items():
        if len(by_kernel) == 2:
            name = f"{p.dtype} d{p.head_dim}, {p.heads} heads"
            found.setdefault(name, {})[p.seqlen_k] = by_kernel[slow] / by_kernel[fast]
    return {name: dict(sorted(values.items())) for name, values in found.items()}
