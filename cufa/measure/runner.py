"""From a case to rows: times all contenders in one run and checks their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..gpu.architectures import Device
from ..plan.planner import Plan
from ..problem.problem import Problem
from . import measuring, peers
from .cases import READ, Case, Contender, Work
from .check import MANY_ROWS, ROWS, Expected, accuracy, max_error, sampled_reference
from .inputs import Inputs, given_to, poison, role_of
from .limits import Limits, streaming_read
from .measured import Measured, Skipped, row_of
from .predictions import with_needs
from .regimes import Regime
from .timing import Run, Watch


def predicted_speedup(slow: Plan, fast: Plan) -> float:
    """The speedup that tile counts alone predict: scores that ``slow`` computes over scores that ``fast`` computes."""
    scores = [p.schedule.visited * p.config.block_q * p.config.block_kv for p in (slow, fast)]
    return scores[0] / scores[1] if scores[1] else float("inf")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender that runs here."""

    label: str
    problem: Problem
    plan: Plan | None
    runs: tuple[Run, ...]
    """One for each set of inputs."""
    results: Callable[[], dict[str, Any]] | None
    """Fills the results of the first set of inputs with NaN, computes them again and returns them by role."""
    arrays: tuple[dict[str, Any], ...]
    """Arrays of each set of inputs. The entry keeps them alive: a launch has only their addresses."""
    work: Work | None = None
    """None: the problem's work."""


#: Seeds of one case's sets of inputs differ by multiples of this. A run's cases have the seeds 0, 1, 2, ...
_SEEDS_APART = 1 << 12


def run_case(
    case: Case, device: Device | None, limits: Limits, *, regime: Regime = Regime.IN_TURNS,
    seconds: float | None = None, seed: int = 0, watch: Watch | None = None, only_all: bool = False,
) -> tuple[list[Measured], list[Skipped]]:  # fmt: skip
    """Time all contenders on the same fresh random inputs and check each against float64.

    ``device`` is the current GPU, or None for the CPU. ``seconds`` and ``watch`` are those of
    :func:`~cufa.measure.measuring.measure`. With ``only_all`` nothing is measured if a contender must be skipped.
    """
    on_gpu = device is not None
    work, sets = Work.of(case.problem, case.lengths), 1
    if on_gpu and regime is Regime.SUSTAINED:
        sets = measuring.sets_wanted(work.io_bytes, measuring.GpuLane().l2_bytes)
    seeds = (seed + _SEEDS_APART * n for n in range(sets))
    inputs = [
        Inputs(case.problem, case.lengths, on_gpu=on_gpu, seed=x, distribution=case.distribution)
        for x in seeds
    ]
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for contender in case.contenders:
        try:
            entries.append(prepare(contender, case, device, inputs))
        except (ValueError, NotImplementedError, MemoryError) as error:
            skipped.append(Skipped(case.name, contender.label, case.problem_of(contender), str(error)))
    if not entries or (only_all and skipped):
        return [], skipped
    runs = {entry.label: entry.runs for entry in entries}
    timings = measuring.measure(runs, regime, on_gpu=on_gpu, seconds=seconds, watch=watch)
    expected: dict[Problem, dict[str, Expected]] = {}
    rows = []
    for entry in entries:
        problem, largest, summary = entry.problem, None, None
        if entry.results is not None:
            exact, results = case.problem if problem.scales else problem, entry.results()
            if exact not in expected:
                count = MANY_ROWS if case.distribution else ROWS
                expected[exact] = sampled_reference(exact, entry.arrays[0], case.lengths, seed, count)
            largest = max_error(problem, results, expected[exact])
            if case.distribution:
                v = entry.arrays[0]["v"]
                summary = accuracy(exact, case.distribution, results["o"], v, expected[exact]["o"])
        work = Work.of(problem, case.lengths) if entry.work is None else entry.work
        row = row_of(
            case.name, entry.label, problem, timings[entry.label], work, limits.floor(problem, work),
            error=largest, plan=entry.plan, lengths=case.lengths, accuracy=summary,
        )  # fmt: skip
        rows.append(row if device is None else with_needs(row, device, limits))
    return rows, skipped


def prepare(contender: Contender, case: Case, device: Device | None, inputs: Sequence[Inputs]) -> Entry:
    """The contender on a case's inputs. Raises ValueError or NotImplementedError if it cannot run here."""
    problem, plan = case.problem_of(contender), None
    if device is None and not (contender.is_ours or contender.quantized):
        raise NotImplementedError("timed on a GPU only")
    arrays = tuple(one.arrays(case.problem if contender.quantized else problem) for one in inputs)
    results: Callable[[], dict[str, Any]] | None = None
    work = None
    if contender.quantized:
        recipe = contender.quantized
        if contender.is_ours:
            plan = contender.plan(case.problem, device)
            runs = tuple(
                recipe.run(problem, each, device is not None, contender.algorithm) for each in arrays
            )
            results = _poisoned(runs[0], {"o": arrays[0]["o"]})
        else:
            runs = tuple(functools.partial(recipe.made, each) for each in arrays)
            work = Work(0, sum(x.size * (x.itemsize + 1) for x in (arrays[0][role] for role in "qkv")), 0)
    elif contender.is_ours:
        plan = contender.plan(case.problem, device)
        runs = tuple(bind(plan, given_to(plan.operation, each)) for each in arrays)
        roles = [role_of(x) for x in plan.operation.results]
        results = _poisoned(runs[0], {role: arrays[0][role] for role in roles if role in arrays[0]})
    elif contender.algorithm == READ:
        num_bytes = problem.kv_bytes(case.lengths)
        runs = tuple(streaming_read([each["k"], each["v"]], num_bytes) for each in arrays)
    elif case.lengths is not None or "block_table" in arrays[0]:
        raise NotImplementedError("other libraries are not measured with lengths or pages")
    else:
        pairs = [peers.make(contender.algorithm, problem, each) for each in arrays]
        runs, results = tuple(run for run, _ in pairs), pairs[0][1]
    return Entry(contender.label, problem, plan, runs, results, arrays, work)


def _poisoned(run: Run, results: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def computed() -> dict[str, Any]:
        for x in results.values():
            poison(x)
        run()
        return results

    return computed


def bind(plan: Plan, given: dict[str, Any]) -> Run:
    """A function that launches the plan on these arrays and does no other work."""
    if plan.device is None:
        from ..run.cpu.run import run_on_cpu

        return functools.partial(run_on_cpu, plan, given)
    from ..run.cuda import backend as cuda

    return functools.partial(cuda.Binding(cuda.prepare(plan), given).launch, cuda.addresses(given))
