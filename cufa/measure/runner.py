"""From a case to rows: all contenders timed in one run, errors beside times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..gpu.architectures import Device
from ..plan.planner import Plan
from ..problem.problem import Problem
from . import bounds, peers, sustained
from .cases import READ, Case, Contender, Work
from .check import Expected, max_error, sampled_reference
from .inputs import Inputs, given_to, poison, role_of
from .limits import Limits, streaming_read
from .power import Power, open_meter
from .regimes import Regime
from .timing import Run, Timing, Watch, measure


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender on one case, measured."""

    case: str
    """:attr:`Case.name`."""
    label: str
    problem: Problem
    timing: Timing
    error: float | None
    """Largest absolute difference from float64 over the rows checked; inputs are standard normal. None for
    what computes nothing."""
    plan: Plan | None
    """None for what is not ours."""
    floor: float
    """Seconds below which this machine cannot go (:meth:`Limits.floor`)."""
    bound: str
    """What sets the floor."""
    work: Work
    lengths: tuple[int, ...] | None = None
    """Valid keys of each sequence of a cache; None: all that there is room for."""
    needs: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that each resource needs by itself (:meth:`cufa.measure.bounds.Bounds.named`), where derived."""
    predicted: float | None = None
    """Seconds predicted from them."""
    load: sustained.Load | None = None
    """How it was measured alone; None where contenders took turns."""

    @property
    def title(self) -> str:
        return self.case or str(self.problem)

    @property
    def regime(self) -> Regime:
        return self.timing.regime

    @property
    def power(self) -> Power | None:
        return self.load.power if self.load else None

    @property
    def tflop_per_joule(self) -> float | None:
        joules = self.power.joules if self.power else None
        return self.work.flops / joules * 1e-12 if joules else None

    @property
    def seconds(self) -> float:
        """Median."""
        return self.timing.p50

    @property
    def tflops(self) -> float:
        return self.work.flops / self.timing.p50 * 1e-12

    @property
    def gbytes(self) -> float:
        """Effective traffic in GB/s: every operand once, over time."""
        return self.work.io_bytes / self.timing.p50 * 1e-9

    @property
    def of_ceiling(self) -> float:
        """1.0: as fast as this machine's measured ceilings allow."""
        return self.floor / self.timing.p50

    @property
    def is_number(self) -> bool:
        """The result, as far as there is one and it was checked, holds numbers only."""
        return self.error is None or self.error < float("inf")


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A contender that does not serve the problem here, and why."""

    case: str
    label: str
    problem: Problem
    reason: str


def predicted_speedup(slow: Plan, fast: Plan) -> float:
    """What tile counts alone predict: scores computed by one over scores computed by the other."""
    scores = [p.schedule.visited * p.config.block_q * p.config.block_kv for p in (slow, fast)]
    return scores[0] / scores[1] if scores[1] else float("inf")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A contender that runs here."""

    contender: Contender
    problem: Problem
    plan: Plan | None
    runs: tuple[Run, ...]
    """One for each set of inputs."""
    results: Callable[[], dict[str, Any]] | None
    """Fills the results of the first set with NaN, computes once more and returns them by their role."""
    arrays: tuple[dict[str, Any], ...]
    """Of each set; launches know only their addresses."""


#: Seeds of the sets of inputs of one case; cases count from 0.
_SEEDS_APART = 1 << 12


def run_case(
    case: Case,
    device: Device | None,
    limits: Limits,
    *,
    regime: Regime = Regime.IN_TURNS,
    seconds: float | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    only_all: bool = False,
) -> tuple[list[Row], list[Skipped]]:
    """Time all contenders on the same fresh random inputs and check each against float64.

    ``device`` is the current GPU, or None for the CPU. ``seconds`` is the time spent measuring: in total
    where they take turns, for each contender otherwise; None: as the regime has it. ``watch`` sees the
    samples as they are taken (:func:`~cufa.measure.timing.measure`). With ``only_all``
    nothing is measured where a contender is skipped.
    """
    on_gpu = device is not None
    work = Work.of(case.problem, case.lengths)
    sets = _num_sets(work, on_gpu) if regime is Regime.SUSTAINED else 1
    inputs = [
        Inputs(case.problem, case.lengths, on_gpu=on_gpu, seed=seed + _SEEDS_APART * n) for n in range(sets)
    ]
    entries: list[_Entry] = []
    skipped: list[Skipped] = []
    for contender in case.contenders:
        try:
            entries.append(_prepare(contender, case, device, inputs))
        except (ValueError, NotImplementedError, MemoryError) as error:
            skipped.append(Skipped(case.name, contender.label, case.problem_of(contender), str(error)))
    if not entries or (only_all and skipped):
        return [], skipped
    timings = _measure(entries, regime, on_gpu, regime.seconds if seconds is None else seconds, watch)
    expected: dict[Problem, dict[str, Expected]] = {}
    rows = []
    for entry in entries:
        timing, load = timings[entry.contender.label]
        off = _error(entry, case, expected, seed)
        rows.append(with_bounds(_row(entry, case, timing, off, limits, load), limits))
    return rows, skipped


def with_bounds(row: Row, limits: Limits) -> Row:
    """The row with what can be derived for its kernel."""
    if row.plan is None or not bounds.covers(row.plan, limits):
        return row
    needs = bounds.bounds_of(row.plan, limits).named()
    return dataclasses.replace(row, needs=needs, predicted=bounds.predict(row.plan, limits))


def _row(
    entry: _Entry,
    case: Case,
    timing: Timing,
    error: float | None,
    limits: Limits,
    load: sustained.Load | None,
) -> Row:
    work = Work.of(entry.problem, case.lengths)
    floor, bound = limits.floor(entry.problem, work)
    return Row(
        case.name, entry.contender.label, entry.problem, timing, error, entry.plan, floor, bound, work,
        case.lengths, load=load,
    )  # fmt: skip


def _error(
    entry: _Entry, case: Case, expected: dict[Problem, dict[str, Expected]], seed: int
) -> float | None:
    if entry.results is None:
        return None
    if entry.problem not in expected:
        expected[entry.problem] = sampled_reference(entry.problem, entry.arrays[0], case.lengths, seed)
    return max_error(entry.problem, entry.results(), expected[entry.problem])


def _num_sets(work: Work, on_gpu: bool) -> int:
    """Sets of inputs that calls in a row go round, for L2 to be cold."""
    if not on_gpu:
        return 1
    import cupy

    runtime = cupy.cuda.runtime
    l2_bytes = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
    return sustained.sets_wanted(work.io_bytes, l2_bytes)


def _measure(
    entries: Sequence[_Entry], regime: Regime, on_gpu: bool, seconds: float, watch: Watch | None
) -> dict[str, tuple[Timing, sustained.Load | None]]:
    if regime is Regime.IN_TURNS:
        runs = {entry.contender.label: entry.runs[0] for entry in entries}
        taken = measure(runs, on_gpu=on_gpu, seconds=seconds, watch=watch)
        return {label: (timing, None) for label, timing in taken.items()}
    lane: sustained.Lane = sustained.GpuLane() if on_gpu else sustained.CpuLane()
    all_runs = {entry.contender.label: entry.runs for entry in entries}
    return {**sustained.measure_alone(all_runs, lane, open_meter(on_gpu), seconds, watch=watch)}


def _prepare(contender: Contender, case: Case, device: Device | None, inputs: Sequence[Inputs]) -> _Entry:
    """Raises ValueError or NotImplementedError, with a reason, when it does not serve the problem here."""
    problem = case.problem_of(contender)
    if device is None and not contender.is_ours:
        raise NotImplementedError("timed on a GPU only")
    arrays = tuple(one.arrays(problem) for one in inputs)
    if contender.is_ours:
        plan = contender.plan(case.problem, device)
        runs = tuple(_bind(plan, each) for each in arrays)
        roles = [role_of(x) for x in plan.operation.results]
        results = {role: arrays[0][role] for role in roles if role in arrays[0]}
        return _Entry(contender, problem, plan, runs, _poisoned(runs[0], results), arrays)
    if contender.algorithm == READ:
        num_bytes = problem.kv_bytes(case.lengths)
        runs = tuple(streaming_read([each["k"], each["v"]], num_bytes) for each in arrays)
        return _Entry(contender, problem, None, runs, None, arrays)
    if case.lengths is not None or "block_table" in arrays[0]:
        raise NotImplementedError("lengths and pages are not handed to other libraries here")
    pairs = [peers.make(contender.algorithm, problem, each) for each in arrays]
    return _Entry(contender, problem, None, tuple(run for run, _ in pairs), pairs[0][1], arrays)


def _poisoned(run: Run, results: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def computed() -> dict[str, Any]:
        for x in results.values():
            poison(x)
        run()
        return results

    return computed


def _bind(plan: Plan, arrays: dict[str, Any]) -> Run:
    """A call of the plan on these arrays, with as little in front of it as there can be."""
    given = given_to(plan.operation, arrays)
    if plan.device is None:
        from ..run.cpu.run import run_on_cpu

        return functools.partial(run_on_cpu, plan, given)
    from ..run.cuda import backend as cuda

    return functools.partial(cuda.Binding(cuda.prepare(plan), given).launch, cuda.addresses(given))
