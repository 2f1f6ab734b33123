"""Rows of records, read back: what tables, summary and dashboard are made of."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..problem.problem import Problem
from .cases import READ
from .regimes import Regime
from .timing import Timing

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One contender on one case, as it was measured."""

    json: Json = dataclasses.field(repr=False)
    suite: str = ""
    """Of a run, what was measured had none."""

    @property
    def label(self) -> str:
        return str(self.json["label"])

    @property
    def case(self) -> str:
        """Name of the case, or "" where the problem says it all."""
        return str(self.json["case"])

    @functools.cached_property
    def problem(self) -> Problem:
        return Problem.from_json(self.json["problem"])

    @property
    def regime(self) -> Regime:
        return Regime(self.json["regime"])

    @functools.cached_property
    def timing(self) -> Timing:
        return Timing(tuple(np.array(self.json["samples_ns"]) * 1e-9), self.regime)

    @property
    def p50_ns(self) -> float:
        return float(self.json["p50_ns"])

    @property
    def tflops(self) -> float:
        return float(self.json["tflops"])

    @property
    def tbytes(self) -> float:
        """Effective traffic, TB/s."""
        return float(self.json["gbytes_per_s"]) / 1e3

    @property
    def is_ours(self) -> bool:
        return "kernel" in self.json

    @property
    def is_peer(self) -> bool:
        return not self.is_ours and self.label != READ

    @property
    def load(self) -> Json:
        """How it ran alone; empty where contenders took turns."""
        return dict(self.json.get("load", {}))

    @property
    def host_bound(self) -> bool:
        """The time is that of the host's calls, not of the kernel."""
        return bool(self.load.get("host_bound"))

    @property
    def group(self) -> tuple[str, Regime, str | Problem]:
        """What it shares with the contenders that it was measured with; the order of their sums may differ."""
        return self.suite, self.regime, self.case or dataclasses.replace(self.problem, deterministic=False)


def rows_of(record: Json) -> list[Recorded]:
    """All rows of evidence or of a run, in the order in which they were measured."""
    suites = [(name, suite["rows"]) for name, suite in record.get("suites", {}).items()]
    return [Recorded(row, name) for name, rows in [*suites, ("", record.get("rows", ()))] for row in rows]


def widest_first(evidence: dict[str, Json]) -> list[Json]:
    """Records in the order in which pages show them: the GPU that moves most bytes per second first."""
    return sorted(evidence.values(), key=lambda record: -float(record["limits"]["copy_bytes"]))


def by_case(rows: Iterable[Recorded]) -> Iterator[dict[str, Recorded]]:
    """The contenders of each case by their label."""
    for _, group in itertools.groupby(rows, key=lambda row: row.group):
        yield {row.label: row for row in group}


def best_peer(found: dict[str, Recorded]) -> str:
    """The fastest of another library in one case; "" when none was timed."""
    peers = [row for row in found.values() if row.is_peer]
    return min(peers, key=lambda row: row.p50_ns).label if peers else ""


def speedups(
    rows: Iterable[Recorded], ours: str, peer: str, regime: Regime, wanted: Callable[[Problem], bool]
) -> Iterator[tuple[Problem, float]]:
    """Each wanted problem that ``ours`` was timed on beside ``peer``, and how many times faster it was. "" is our
    first, or the fastest peer, of each case. A time that is the host's is not the kernels', and left out."""
    chosen = [row for row in rows if row.regime is regime and not row.host_bound and wanted(row.problem)]
    for found in by_case(chosen):
        fast = ours or next((label for label, row in found.items() if row.is_ours), "")
        slow = peer or best_peer(found)
        if {fast, slow} <= found.keys():
            yield found[fast].problem, found[slow].p50_ns / found[fast].p50_ns


def geometric_mean(ratios: Iterable[float]) -> float:
    """0 of none."""
    logs = [math.log(x) for x in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0
