"""Recorded measurements as the figures want it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from cufa.dashboard.model.many import fastest_read, weight
from cufa.dashboard.model.measured_rows import of_card
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.worker.run import Run
from cufa.measure import cards
from cufa.measure.limits import Limits
from cufa.problem.mask import FULL, Mask


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What was measured on one machine. A file that is read once is one object, itself a key of caches."""

    name: str
    device: str
    arch: str
    """"sm_90" and the like; empty for a CPU."""
    recorded: str
    """Date and time of the newest row, ISO 8601."""
    limits: Limits | None
    rows: tuple[Measurement, ...]
    read_bytes: float
    """Bytes per second of the fastest reading recorded there; 0: none was."""
    stale: tuple[str, ...]
    """Kernels whose machine code has changed since."""
    num_sms: int = 0
    """0: not kept, or a CPU."""

    @property
    def where(self) -> str:
        """Machine and date, which no recorded figure goes without, and the kernels that have changed since."""
        changed = f" (changed since: {', '.join(self.stale)})" if self.stale else ""
        return f"{self.device}, {self.recorded[:10]}{changed}"


def load(directory: Path | None = None) -> list[Evidence]:
    """Every card, the one with the most measurements of today's kernels first; empty when there is none. Raises
    ValueError for a damaged file."""
    return [found for found, _ in _load(*_state_of(directory or cards.RECORDS_DIR))]


def past() -> list[Measurement]:
    """Earlier sessions of the same cases on the same cards, the oldest first. Raises ValueError for a damaged file."""
    return [m for _, earlier in _load(*_state_of(cards.RECORDS_DIR)) for m in earlier]


def measurements(directory: Path | None = None) -> list[Measurement]:
    """All rows of all cards. Raises ValueError when a file is damaged."""
    return [m for found in load(directory) for m in found.rows]


State = tuple[Path, tuple[tuple[str, int, int], ...]]


def _state_of(directory: Path) -> State:
    """A folder and its files as they are now: what has been read of them holds until this changes."""
    stats = [(file.name, file.stat()) for file in sorted(directory.glob("*.jsonl"))]
    return directory, tuple((name, found.st_mtime_ns, found.st_size) for name, found in stats)


@functools.lru_cache(4)  # every rerun of a page asks
def _load(directory: Path, _: object) -> tuple[tuple[Evidence, tuple[Measurement, ...]], ...]:
    found = (_evidence(card) for card in cards.load_all(directory).values())
    return tuple(sorted(found, key=lambda pair: weight(pair[0].rows), reverse=True))


def _evidence(card: cards.Card) -> tuple[Evidence, tuple[Measurement, ...]]:
    """A card, and its past."""
    try:
        limits, environment = card.limits, card.environment
        rows = of_card(card)
        reading = max(fastest_read(rows), *((limits.copy_bytes, limits.read_bytes) if limits else (0.0,)))
        found = Evidence(
            card.name,
            environment["device"],
            environment.get("arch", ""),
            environment["recorded"],
            limits,
            tuple(dataclasses.replace(m, read_ceiling=reading) for m in rows),
            reading,
            tuple(card.stale),
            environment.get("num_sms", 0),
        )
        return found, tuple(of_card(card, past=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{card.name}.jsonl is damaged: {error!r}") from error


def of_run(run: Run, rows: Sequence[Measurement]) -> Evidence | None:
    """A run made here and its rows, like a card: with the ceilings that it measured itself; None where it has
    none."""
    limits = run.record.get("limits")
    if not limits or not rows:
        return None
    ceilings = Limits(**limits)
    reading = max(fastest_read(rows), ceilings.copy_bytes, ceilings.read_bytes)
    environment = run.record["environment"]
    return Evidence(
        f"run.{run.id}",
        environment["device"],
        environment.get("arch", ""),
        run.submitted.isoformat(),
        ceilings,
        tuple(dataclasses.replace(m, read_ceiling=reading) for m in rows),
        reading,
        (),
    )


def speedups(rows: Iterable[Measurement], slow: str, fast: str, mask: Mask) -> dict[str, dict[int, float]]:
    """Time of kernel ``slow`` over time of ``fast`` under one mask by length, for each set of shapes and regime that
    differ only in length and batch; the key says which."""
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
