"""Measurement rows: one contender on one case, kept as JSON.

A run (`cufa bench --json`, the dashboard) keeps every sample of a row. The rows that ship with the package
(:mod:`cufa.measure.cards`) have ``n``, ``low_ns``, ``high_ns`` and ``over`` in place of the samples.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..build.compiler import source_digest
from ..gpu.architectures import Device
from ..kernels import KERNELS, Kernel
from ..plan.planner import Plan
from ..problem.problem import Problem
from . import timing
from .cases import READ, Work
from .check import Accuracy
from .limits import Limits
from .machine import environment
from .quantized import QUANTIZE
from .regimes import Regime
from .timing import Load, Ratio, Timing, as_nanoseconds

SCHEMA = 2
"""Version of a run's JSON."""
FLOP_CONVENTION = "4 * head_dim per visible score (backward: 10): the exact count that the mask lets through"

Json = dict[str, Any]

_NO_RESULT = (READ, QUANTIZE)
"""Labels of contenders that compute no attention, so that no result is checked."""


@functools.cache
def digest(spec: Kernel) -> str:
    """Digest of the sources of a kernel, without comments and white space."""
    return source_digest(*spec.sources)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measurement row: one contender on one case. Times are in nanoseconds; rates follow from time and work."""

    json: Json = dataclasses.field(repr=False)
    given_problem: Problem | None = None
    """The problem of the row; None: it is read from ``json``."""
    plan: Plan | None = dataclasses.field(default=None, compare=False)
    """The plan that ran in this process; None: the row was read from a file, or no kernel of cufa ran."""

    @property
    def suite(self) -> str:
        """Name of the suite; "" for a row of a run."""
        return str(self.json.get("suite", ""))

    @property
    def label(self) -> str:
        return str(self.json["label"])

    @property
    def case(self) -> str:
        """Name of the case, or "" where the problem names the case."""
        return str(self.json["case"])

    @property
    def title(self) -> str:
        return self.case or str(self.problem)

    @property
    def recorded(self) -> str:
        """Date and time of the recording session; "" for a row of a run."""
        return str(self.json.get("recorded", ""))

    @functools.cached_property
    def problem(self) -> Problem:
        return self.given_problem or Problem.from_json(self.json["problem"])

    @property
    def regime(self) -> Regime:
        return Regime(self.json["regime"])

    @functools.cached_property
    def timing(self) -> Timing:
        return Timing.of_row(self.json, self.regime)

    @property
    def p50_ns(self) -> float:
        return float(self.json["p50_ns"])

    @property
    def seconds(self) -> float:
        """Median time."""
        return self.p50_ns * 1e-9

    @property
    def tflops(self) -> float:
        return float(self.json["flops"]) / self.p50_ns * 1e-3

    @property
    def gbytes(self) -> float:
        """Effective traffic in GB/s: bytes of all operands, each counted once, over the median time."""
        return float(self.json["io_bytes"]) / self.p50_ns

    @property
    def error(self) -> float | None:
        """Largest absolute difference from float64 over the checked rows of the result. NaN: the result holds NaN or
        infinity. None: the contender computes no attention (:data:`_NO_RESULT`)."""
        found = self.json["max_error"]
        return found if found is not None or self.label in _NO_RESULT else math.nan

    @property
    def accuracy(self) -> Accuracy | None:
        """None: the case has no named distribution."""
        found = self.json.get("accuracy")
        return None if found is None else Accuracy(**found)

    @property
    def is_number(self) -> bool:
        """False if a checked result holds NaN or infinity."""
        return self.error is None or not math.isnan(self.error)

    @property
    def needs(self) -> dict[str, float]:
        """Lower bound in seconds by resource (:meth:`cufa.measure.bounds.Bounds.named`); empty: not computed."""
        return {name: ns * 1e-9 for name, ns in self.json.get("needs_ns", {}).items()}

    @property
    def predicted(self) -> float | None:
        """Predicted seconds (:func:`cufa.measure.bounds.predict`); None: not predicted."""
        found = self.json.get("predicted_ns")
        return None if found is None else found * 1e-9

    @property
    def is_ours(self) -> bool:
        return "kernel" in self.json

    @property
    def is_peer(self) -> bool:
        return not self.is_ours and self.label not in _NO_RESULT

    @property
    def load(self) -> Json:
        """Clock, power and energy of a contender that ran alone; empty where contenders took turns."""
        return dict(self.json.get("load", {}))

    @property
    def host_bound(self) -> bool:
        """Whether the host's launches, not the kernel, set the time."""
        return bool(self.load.get("host_bound"))

    @property
    def is_stale(self) -> bool:
        """Whether the row's kernel compiles to other machine code now. A run has no digest of machine code: there the
        digest of the sources decides."""
        return self.is_ours and not is_current(self.json["kernel"], self.json)

    @functools.cached_property
    def group(self) -> tuple[str, Regime, str | Problem]:
        """Equal for all contenders of a case, with and without a fixed addition order."""
        return self.suite, self.regime, self.case or dataclasses.replace(self.problem, deterministic=False)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A contender that does not serve the problem here, and why."""

    case: str
    label: str
    problem: Problem
    reason: str


def row_of(
    case: str, label: str, problem: Problem, timing: Timing, work: Work, floor: tuple[float, str], *,
    error: float | None = None, plan: Plan | None = None, lengths: tuple[int, ...] | None = None,
    accuracy: Accuracy | None = None,
) -> Measured:  # fmt: skip
    """The row of one contender, with all samples.

    ``floor``: see :meth:`Limits.floor`. ``error``: see :attr:`Measured.error`. ``plan``: None if no kernel of cufa ran.
    ``lengths``: valid keys of each sequence of a cache; None: the cache is full. ``accuracy``: None if the case has no
    named distribution.
    """
    least, bound = floor
    found: Json = {
        "case": case,
        "label": label,
        "problem": problem.as_json(),
        "regime": timing.regime.value,
        "samples_ns": as_nanoseconds(timing),
        "p10_ns": round(timing.p10 * 1e9),
        "p50_ns": round(timing.p50 * 1e9),
        "p90_ns": round(timing.p90 * 1e9),
        **dataclasses.asdict(work),
        "tflops": round(work.flops / timing.p50 * 1e-12, 3),
        "gbytes_per_s": round(work.io_bytes / timing.p50 * 1e-9, 3),
        "of_ceiling": round(least / timing.p50, 4),
        "ceiling": bound,
        # JSON has neither NaN nor infinity: null stands for both.
        "max_error": error if error is not None and math.isfinite(error) else None,
    }
    if lengths is not None:
        found["lengths"] = list(lengths)
    if timing.load is not None:
        found["load"] = _load_json(timing.load, work)
    if plan is not None:
        found |= plan_json(plan)
    if accuracy is not None:
        found["accuracy"] = dataclasses.asdict(accuracy)
    return Measured(found, problem, plan)


def plan_json(plan: Plan) -> Json:
    """Fields of a row about the plan that ran."""
    heads, schedule = plan.problem.batch * plan.problem.heads, plan.schedule
    return {
        "kernel": plan.spec.name,
        "digest": digest(plan.spec),
        "config": dataclasses.asdict(plan.config),
        "grid": [list(launch.grid) for launch in plan.launches],
        "tiles_visited": schedule.visited * heads,
        "tiles_skipped": schedule.skipped * heads,
        "workspace_bytes": plan.workspace,
        **({"split": dataclasses.asdict(plan.split)} if plan.split else {}),
    }


def _load_json(load: Load, work: Work) -> Json:
    """The load of a contender that ran alone. Figures that NVML did not give are null; ``missing`` has the reason."""
    power = load.power
    return {
        "calls": load.calls,
        "input_sets": load.sets,
        "host_bound": load.host_bound,
        "clock_mhz": power.clock_mhz,
        "watts": None if power.watts is None else round(power.watts, 1),
        "joules": None if power.joules is None else float(f"{power.joules:.4g}"),
        "tflop_per_joule": round(work.flops / power.joules * 1e-12, 4) if power.joules else None,
        "missing": power.missing,
        "throttled": {name: round(share, 3) for name, share in power.throttled.items()},
    }


def skipped_json(skipped: Skipped) -> Json:
    problem = skipped.problem.as_json()
    return {"case": skipped.case, "label": skipped.label, "problem": problem, "reason": skipped.reason}


def run_json(
    rows: Iterable[Measured], skipped: Iterable[Skipped], device: Device | None, limits: Limits | None
) -> Json:
    """A benchmark run with the environment and the conventions of its figures."""
    return {
        "schema": SCHEMA,
        "environment": environment(device),
        "limits": dataclasses.asdict(limits) if limits else None,
        "flop_convention": FLOP_CONVENTION,
        "rows": [row.json for row in rows],
        "skipped": [skipped_json(s) for s in skipped],
    }


def is_current(kernel: str, recorded: Json) -> bool:
    """Whether a row's or trace's kernel is unchanged: ``recorded["code"]``, the digest of its machine code, decides; if
    it is missing, ``recorded["digest"]``, the digest of its sources."""
    from .cards import current_code

    if "code" in recorded:
        return recorded["code"] in current_code()
    return kernel in KERNELS and recorded.get("digest") == digest(KERNELS[kernel])


def rows_of(run: Json) -> list[Measured]:
    """All rows of a run, in the order in which they were measured."""
    return [Measured(row) for row in run.get("rows", ())]


def by_case(rows: Iterable[Measured]) -> Iterator[dict[str, Measured]]:
    """The contenders of each case by their label."""
    for _, group in itertools.groupby(rows, key=lambda row: row.group):
        yield {row.label: row for row in group}


def speedup(slow: Measured, fast: Measured) -> Ratio:
    """How many times faster ``fast`` is. The 95% interval is that of common rounds if the contenders took turns."""
    if slow.group == fast.group and slow.recorded == fast.recorded:
        value = slow.p50_ns / fast.p50_ns
        if kept := fast.json.get("over", {}).get(slow.label):
            return Ratio(value, *kept)
        if kept := slow.json.get("over", {}).get(fast.label):
            return Ratio(value, 1 / kept[1], 1 / kept[0])
    return timing.speedup(slow.timing, fast.timing)


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; 0 if there are no ratios."""
    logs = [math.log(x) for x in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0
