"""Recorded measurements by machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from cufa.dashboard.model.asked import figures
from cufa.dashboard.model.many import fastest_read, weight
from cufa.dashboard.model.measured_rows import of_card
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.worker.jobs import Json
from cufa.dashboard.worker.run import Run
from cufa.measure import cards
from cufa.measure.limits import Limits
from cufa.measure.regimes import Regime
from cufa.problem.mask import FULL, Mask
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """Measurements of one machine. Objects compare by identity and serve as keys of caches: a file that changes is read
    into a new object."""

    name: str
    device: str
    arch: str
    """"sm_90" and the like; empty for a CPU."""
    limits: Limits | None
    rows: tuple[Measurement, ...]
    read_bytes: float
    """Bytes per second of the fastest recorded read; 0: unknown."""
    num_sms: int = 0
    """0: unknown, or a CPU."""


def load(directory: Path | None = None) -> list[Evidence]:
    """All cards; the card with the most rows of current kernels comes first. Raises ValueError for a damaged file."""
    return [card for card, _ in _load(*_state_of(directory or cards.RECORDS_DIR))]


def past() -> list[Measurement]:
    """Rows of earlier sessions of the same cases, the oldest first. Raises ValueError for a damaged file."""
    return [m for _, earlier in _load(*_state_of(cards.RECORDS_DIR)) for m in earlier]


def measurements() -> list[Measurement]:
    """Rows of all cards. Raises ValueError for a damaged file."""
    return [m for card in load() for m in card.rows]


State = tuple[Path, tuple[tuple[str, int, int], ...]]


def _state_of(directory: Path) -> State:
    """A folder and the state of its files: a key of the cache."""
    stats = [(file.name, file.stat()) for file in sorted(directory.glob("*.jsonl"))]
    return directory, tuple((name, status.st_mtime_ns, status.st_size) for name, status in stats)


@functools.lru_cache(4)  # each rerun of a page asks
def _load(directory: Path, _: object) -> tuple[tuple[Evidence, tuple[Measurement, ...]], ...]:
    loaded = (_evidence(card) for card in cards.load_all(directory).values())
    return tuple(sorted(loaded, key=lambda pair: weight(pair[0].rows), reverse=True))


def _evidence(card: cards.Card) -> tuple[Evidence, tuple[Measurement, ...]]:
    """A card's evidence, and its rows of earlier sessions."""
    try:
        current = _made(card.name, card.environment, card.limits, of_card(card))
        return current, tuple(of_card(card, past=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{card.name}.jsonl is damaged: {error!r}") from error


def of_run(run: Run, rows: Sequence[Measurement]) -> Evidence | None:
    """A run of this machine with the ceilings that the run measured; None without ceilings."""
    if not run.record.get("limits") or not rows:
        return None
    return _made(f"run.{run.id}", run.record["environment"], Limits(**run.record["limits"]), rows)


def _made(name: str, environment: Json, limits: Limits | None, rows: Sequence[Measurement]) -> Evidence:
    reading = max(fastest_read(rows), *((limits.copy_bytes, limits.read_bytes) if limits else (0.0,)))
    # One ceiling of device memory for all pages: a kernel that reads faster than the plain read sets it.
    limits = limits and dataclasses.replace(limits, read_bytes=reading, copy_bytes=reading)
    known = tuple(dataclasses.replace(m, limits=limits) for m in rows)
    arch, num_sms = environment.get("arch", ""), environment.get("num_sms", 0)
    return Evidence(name, environment["device"], arch, limits, known, reading, num_sms)


def pairs(
    rows: Iterable[Measurement], slow: str, fast: str, mask: Mask
) -> dict[str, list[tuple[Measurement, ...]]]:
    """Times of the kernels ``slow`` and ``fast`` under one mask, by shapes and regime. The pairs of a series differ in
    length and batch only."""
    times: dict[tuple[Problem, Regime], dict[str, Measurement]] = {}
    for m in figures(m for m in rows if m.kernel in (slow, fast) and m.problem.mask == mask != FULL):
        times.setdefault((m.problem, m.regime), {})[str(m.kernel)] = m
    series: dict[str, list[tuple[Measurement, ...]]] = {}
    for (p, regime), by_kernel in sorted(times.items(), key=lambda x: x[0][0].seqlen_k):
        if len(by_kernel) == 2:
            name = f"{p.dtype} d{p.head_dim}, {p.heads} heads, {regime}"
            series.setdefault(name, []).append((by_kernel[slow], by_kernel[fast]))
    return series
