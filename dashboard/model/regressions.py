"""Regressions between two commits: every row that both measured on one machine, ranked."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import subprocess
from collections.abc import Iterable, Sequence

from cufa.dashboard.model.many import grouped, speedup, time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.sentences import count
from cufa.measure.machine import SOURCES
from cufa.measure.measured import geometric_mean
from cufa.measure.timing import Ratio

BEFORE = "before"
"""In place of the first commit: compare each row with its previous measurement."""
_CODE = ("cuda_src", "cufa/kernels", "cufa/plan", "cufa/schedule", "cufa/run/cuda", "cufa/build")
"""Paths whose content determines a kernel's time."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One row, measured twice on one machine in one regime."""

    before: Measurement
    after: Measurement
    ratio: Ratio
    """Time before over time after: below 1 is slower."""

    @property
    def slower(self) -> float:
        """Time after over time before, less 1."""
        return 1 / self.ratio.value - 1

    @property
    def host_bound(self) -> bool:
        return self.before.row.host_bound or self.after.row.host_bound

    @property
    def is_regression(self) -> bool:
        """The 95% interval of the ratio is below 1, and neither time is host-bound."""
        return self.ratio.high < 1 and not self.host_bound


@dataclasses.dataclass(frozen=True)
class Group:
    """The changes of one kernel in one suite and regime."""

    name: str
    changes: Sequence[Change]
    """The slowest first; host-bound rows last."""

    @property
    def counted(self) -> list[Change]:
        return [x for x in self.changes if not x.host_bound]

    @property
    def mean(self) -> float:
        """Geometric mean of time after over time before, less 1, without host-bound rows."""
        return geometric_mean(1 + x.slower for x in self.counted) - 1 if self.counted else 0.0

    @property
    def weight(self) -> float:
        """Sum of the logarithms of the slowdowns: how far, and in how many rows."""
        return sum(math.log1p(x.slower) for x in self.counted)


def version(m: Measurement) -> str:
    """The measured commit; the time of the session if no commit is recorded."""
    return str(m.environment.get("commit", "")).removesuffix("-dirty") or m.recorded[:16].replace("T", " ")


def versions(rows: Iterable[Measurement]) -> dict[str, str]:
    """Versions of one machine's rows in words, the newest first."""
    dated = grouped(sorted(rows, key=lambda m: time_of(m.recorded), reverse=True), version)
    return {name: f"{name} · {x[0].recorded[:10]} · {count(len(x), 'row')}" for name, x in dated.items()}


def changes(rows: Iterable[Measurement], a: str, b: str) -> list[Change]:
    """Changes of all rows measured in version ``b`` and in ``a`` (:data:`BEFORE`: in any earlier version)."""
    pairs = []
    for times in grouped(
        sorted(rows, key=lambda m: time_of(m.recorded)), lambda m: (m.suite, m.key)
    ).values():
        last = next((m for m in reversed(times) if version(m) == b), None)
        if last is None:
            continue
        earlier = [m for m in times if version(m) != b and (version(m) == a or a == BEFORE)]
        earlier = [m for m in earlier if a != BEFORE or m.recorded < last.recorded]
        if earlier:
            pairs.append(Change(earlier[-1], last, speedup(earlier[-1], last)))
    return pairs


def groups(rows: Iterable[Change]) -> list[Group]:
    """cufa's kernels, the heaviest regression first."""
    ours = grouped(
        (x for x in rows if x.after.kernel),
        lambda x: f"{x.after.kernel}, {x.after.suite}, {x.after.regime}",
    )
    made = (Group(name, sorted(x, key=lambda c: (c.host_bound, -c.slower))) for name, x in ours.items())
    return sorted(made, key=lambda group: -group.weight)


def drift(rows: Iterable[Change]) -> float | None:
    """Median change of other libraries, whose code is the same: the machine's part of a change. None: not timed."""
    theirs = [x.slower for x in rows if x.after.kernel is None and not x.host_bound]
    return statistics.median(theirs) if theirs else None


@functools.lru_cache(64)
def commits_between(a: str, b: str) -> tuple[str, ...]:
    """Commits after ``a`` up to ``b`` that touch code which determines a kernel's time, the newest first. Empty without
    a checkout that has both commits."""
    command = ["git", "log", "--format=%h %s", f"{a}..{b}", "--", *_CODE]
    try:
        done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.splitlines())
