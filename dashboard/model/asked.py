"""Chooses the measurements that a page shows. Only this module chooses among measurements of one quantity.

:func:`unlike` names the differences from a page's controls; :func:`where` names the cards, the days, and the kernels
that have changed since.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.model.many import days, time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.kernels import TileConfig
from cufa.measure.regimes import Regime
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Asked:
    """The quantity that a page asks for. None or "": any value."""

    problem: Problem | None = None
    kernel: str | None = None
    """Name in the registry."""
    config: TileConfig | None = None
    regime: Regime | None = None
    card: str = ""
    """Card of the controls. Its figures come first; figures of other cards follow (:func:`unlike`)."""
    suite: str = ""
    """Suite of the controls, which decides if several suites timed one quantity."""

    def is_of(self, m: Measurement) -> bool:
        """Whether this is a measurement of the quantity, on any card."""
        return (
            self.kernel in (None, m.kernel)
            and self.regime in (None, m.regime)
            and self.problem in (None, m.problem)
            and (self.config is None or is_of(self.config, m.row.json.get("config")))
        )

    def _rank(self, m: Measurement) -> tuple[Any, ...]:
        return m.suite == self.suite, not m.is_stale, time_of(m.recorded), m.load.get("joules") is not None


def figures(measured: Iterable[Measurement], wanted: Asked | None = None) -> list[Measurement]:
    """One measurement of each quantity (machine, contender, problem, lengths, regime), those of the asked card first.
    Preference: the asked suite, then the kernel's present machine code, the latest, one with joules, the first."""
    wanted = wanted or Asked()
    best: dict[tuple[object, ...], Measurement] = {}
    for m in filter(wanted.is_of, measured):
        known = best.setdefault(m.quantity, m)
        if known is not m and wanted._rank(m) > wanted._rank(known):
            best[m.quantity] = m
    return sorted(best.values(), key=lambda m: not is_same_card(m.machine, wanted.card) if wanted.card else 0)


def together(measured: Iterable[Measurement], wanted: Sequence[Asked]) -> list[Measurement]:
    """One measurement per asked quantity, all from one source, if possible of the asked card; else an empty list."""
    measured = list(measured)
    first, *others = (figures(measured, a) for a in wanted)
    for m in first:
        beside = [next((x for x in rows if x.source == m.source), None) for rows in others]
        chosen = [x for x in (m, *beside) if x is not None]
        if len(chosen) == len(wanted):
            return chosen
    return []


def unlike(
    card: str, of_card: str, recorded: str, problem: Problem | None = None, measured: Problem | None = None
) -> str:
    """The measured card, day and problem, if card or problem differ from the controls; else ""."""
    if is_same_card(of_card, card) and problem == measured:
        return ""
    return f"Unlike the controls above, measured on {of_card}, {recorded[:10]}" + (
        f": {measured}" if measured is not None else ""
    )


def where(measured: Sequence[Measurement]) -> str:
    """Machines and days, and the GPU kernels that have changed since the measurements."""
    machines = dict.fromkeys(f"{m.machine}{'' if m.is_gpu else ' (CPU)'}" for m in measured)
    changed = ", ".join(str(kernel) for kernel in dict.fromkeys(m.kernel for m in measured if m.is_stale))
    return f"{' and '.join(machines)}, {days(measured)}" + (f" (changed since: {changed})" if changed else "")


def is_of(config: TileConfig, recorded: object) -> bool:
    """Whether a record names this config; fields unknown to the record or to this version are ignored."""
    if not isinstance(recorded, dict):
        return False
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    return all(fields[name] == value for name, value in recorded.items() if name in fields)
