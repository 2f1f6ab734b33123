"""Recorded measurements by machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from cufa.dashboard.model.many import fastest_read, weight
from cufa.dashboard.model.measured_rows import of_card
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.worker.jobs import Json
from cufa.dashboard.worker.run import Run
from cufa.measure import cards
from cufa.measure.limits import Limits
from cufa.problem.mask import FULL, Mask


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """Measurements of one machine. Each state of a file is one object, which serves as a key of caches."""

    name: str
    device: str
    arch: str
    """"sm_90" and the like; empty for a CPU."""
    recorded: str
    """Date and time of the newest row, ISO 8601."""
    limits: Limits | None
    rows: tuple[Measurement, ...]
    read_bytes: float
    """Bytes per second of the fastest recorded read; 0: unknown."""
    stale: tuple[str, ...]
    """Kernels whose machine code has changed since the measurement."""
    num_sms: int = 0
    """0: unknown, or a CPU."""

    @property
    def where(self) -> str:
        """Machine and date, and the kernels that have changed since the measurement."""
        changed = f" (changed since: {', '.join(self.stale)})" if self.stale else ""
        return f"{self.device}, {self.recorded[:10]}{changed}"


def load(directory: Path | None = None) -> list[Evidence]:
    """All cards; the card with the most rows of current kernels comes first. Raises ValueError for a damaged file."""
    return [found for found, _ in _load(*_state_of(directory or cards.RECORDS_DIR))]


def past() -> list[Measurement]:
    """Rows of earlier sessions of the same cases, the oldest first. Raises ValueError for a damaged file."""
    return [m for _, earlier in _load(*_state_of(cards.RECORDS_DIR)) for m in earlier]


def measurements() -> list[Measurement]:
    """All rows of all cards. Raises ValueError for a damaged file."""
    return [m for found in load() for m in found.rows]


State = tuple[Path, tuple[tuple[str, int, int], ...]]


def _state_of(directory: Path) -> State:
    """A folder and the state of its files: a key of the cache."""
    stats = [(file.name, file.stat()) for file in sorted(directory.glob("*.jsonl"))]
    return directory, tuple((name, found.st_mtime_ns, found.st_size) for name, found in stats)


@functools.lru_cache(4)  # each rerun of a page asks
def _load(directory: Path, _: object) -> tuple[tuple[Evidence, tuple[Measurement, ...]], ...]:
    found = (_evidence(card) for card in cards.load_all(directory).values())
    return tuple(sorted(found, key=lambda pair: weight(pair[0].rows), reverse=True))


def _evidence(card: cards.Card) -> tuple[Evidence, tuple[Measurement, ...]]:
    """A card and its past."""
    try:
        environment = card.environment
        found = _made(card.name, environment, environment["recorded"], card.limits, of_card(card), card.stale)
        return found, tuple(of_card(card, past=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{card.name}.jsonl is damaged: {error!r}") from error


def of_run(run: Run, rows: Sequence[Measurement]) -> Evidence | None:
    """A run of this machine with the ceilings that the run measured; None without ceilings."""
    if not run.record.get("limits") or not rows:
        return None
    limits, when = Limits(**run.record["limits"]), run.submitted.isoformat()
    return _made(f"run.{run.id}", run.record["environment"], when, limits, rows)


def _made(
    name: str, environment: Json, recorded: str, limits: Limits | None, rows: Sequence[Measurement],
    stale: Sequence[str] = (),
) -> Evidence:  # fmt: skip
    reading = max(fastest_read(rows), *((limits.copy_bytes, limits.read_bytes) if limits else (0.0,)))
    # One ceiling of device memory for all pages: a kernel that reads faster than the plain read sets it.
    limits = limits and dataclasses.replace(limits, read_bytes=reading)
    known = tuple(dataclasses.replace(m, limits=limits) for m in rows)
    arch, num_sms = environment.get("arch", ""), environment.get("num_sms", 0)
    return Evidence(
        name, environment["device"], arch, recorded, limits, known, reading, tuple(stale), num_sms
    )


def speedups(rows: Iterable[Measurement], slow: str, fast: str, mask: Mask) -> dict[str, dict[int, float]]:
    """Time of kernel ``slow`` over time of ``fast`` under one mask, by length. The key names the shapes and regime of a
    series: its rows differ only in length and batch."""
    times: dict[tuple[object, ...], dict[str, Measurement]] = {}
    for m in rows:
        if m.kernel in (slow, fast) and m.problem.mask == mask != FULL:
            times.setdefault((m.suite, m.problem, m.regime), {})[m.kernel] = m
    found: dict[str, dict[int, float]] = {}
    for by_kernel in times.values():
        if len(by_kernel) == 2:
            p, regime = by_kernel[slow].problem, by_kernel[slow].regime
            name = f"{p.dtype} d{p.head_dim}, {p.heads} heads, {regime}"
            found.setdefault(name, {})[p.seqlen_k] = by_kernel[slow].seconds / by_kernel[fast].seconds
    return {name: dict(sorted(values.items())) for name, values in found.items()}
