"""`cufa tune`."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import click

from ..calls import tuning
from ..gpu.architectures import Device
from ..measure import decode_cases, measured
from ..measure.cases import Case, Contender
from ..measure.limits import Limits, measure_limits
from ..measure.measured import Measured
from ..measure.regimes import Regime
from ..measure.runner import run_case
from ..measure.suites import OPERATION_NAMES
from ..measure.timing import speedup
from ..plan.candidates import algorithms, serving_configs, tuning_key
from ..plan.planner import Plan, make_plan
from ..problem.problem import Problem
from . import common
from .rows import print_rows, print_skipped

#: A winner must beat the planned tiles by this much, twice: less is noise.
_MARGIN = 1.02
#: Measuring time of the second look at a winner, for both tilings together in turns and for each alone.
_CONFIRM_SECONDS = 1.0


#: Operations whose tiles, or cuts, are chosen by measurement, and all of their algorithms.
_TUNED = [*OPERATION_NAMES]
_ALGORITHMS = dict.fromkeys(algorithm for name in _TUNED for algorithm in algorithms(name))


@click.command("tune")
@click.argument("operation", type=click.Choice(_TUNED), default=_TUNED[0])
@click.option("--algorithm", type=click.Choice(list(_ALGORITHMS)), default="auto", show_default=True)
@common.shape_options(seqlen=4096)
@common.regime_options(2.0)
@click.option("--dry-run", is_flag=True, help="Measure and print, keep nothing.")
@common.json_option
def tune_command(
    operation: str, algorithm: str, regime: Regime, seconds: float, dry_run: bool, as_json: bool, **shape: Any
) -> None:
    """Measure every tile configuration of OPERATION that fits (decode: with several numbers of splits, both schedules
    and every way to merge), for one shape on this GPU, and keep the fastest in the user's cache folder. The planner
    uses it for shapes of the same class: kernel, dtype, head dim, mask, and length and query rows rounded down to a
    power of two. Tiles other than the planned ones are kept if they are at least 2% faster in two measurements on
    different inputs, and not slower at the card's power limit. Decoding with a maximum by bound is measured beside
    them and never kept: only a call can ask for it (softmax_max="bound").

    Exit codes: 0 done; 1 no configuration gave a right result, or the file cannot be written; 2 wrong usage;
    3 no GPU.
    """
    device = common.find_device("cuda")
    assert device is not None
    problem = common.problem_from(shape, device, operation)
    try:
        plan = make_plan(problem, device, algorithm, fastest=tuning.fastest_kernels(device.name))
    except ValueError as error:
        common.fail(common.Exit.MISSING, str(error))
    if operation == "decode":
        contenders = decode_cases.cuts(problem, device)
    else:
        configs = serving_configs(plan.spec, problem, device)
        contenders = tuple(Contender(plan.spec.algorithm, config) for config in configs)
    with common.progress() as bar:
        bar.add_task(f"{len(contenders)} configurations of {plan.spec.name}", total=None)
        limits = measure_limits(device)
        case = Case(problem, contenders)
        rows, skipped = run_case(case, device, limits, regime=regime, seconds=seconds)
        right = [row for row in rows if row.is_number and row.problem == problem]
        if not right:
            common.fail(common.Exit.FAILED, "no configuration gave a result")
        best = min(right, key=lambda row: row.seconds)
        planned = next(
            (row for row in right if row.plan and _way(row) == (plan.config, *_cut_of(plan))), best
        )
        over_planned = speedup(planned.timing, best.timing).value
        if over_planned < _MARGIN or not _confirmed(problem, planned, best, device, limits, regime):
            best, over_planned = planned, 1.0
    file = None if dry_run else _keep(device, problem, planned, best, over_planned)
    if as_json:
        document = measured.run_json(rows, skipped, device, limits)
        assert best.plan is not None
        document["winner"] = {
            "key": tuning_key(plan.spec, problem),
            "config": dataclasses.asdict(best.plan.config),
            **dict(_cut_of(best.plan)),
            "over_planned": over_planned,
            "file": str(file) if file else None,
        }
        common.print_json(document)
        return
    console = common.stdout()
    print_rows(sorted(rows, key=lambda row: row.seconds))
    print_skipped(skipped)
    assert best.plan is not None
    if best is planned:
        console.print(f"kept: {plan.config}, as planned; none is faster by {_MARGIN - 1:.0%}, twice")
    else:
        ratio = speedup(planned.timing, best.timing)
        console.print(
            f"fastest: {best.plan.config}; over the planned {plan.config} {ratio}, and again when repeated"
        )
    if file:
        common.stderr().print(f"kept in {file}", markup=False)


def _confirmed(
    problem: Problem, planned: Measured, best: Measured, device: Device, limits: Limits, regime: Regime
) -> bool:
    """Whether the winner beats the planned tiles again on other inputs under the requested regime, and does not lose
    under any other regime."""
    plans = {name: row.plan for name, row in (("planned", planned), ("best", best)) if row.plan}
    some = tuple(
        Contender(x.spec.algorithm, x.config, name, dict(_cut_of(x)).get("num_splits"))
        for name, x in plans.items()
    )
    for again in Regime:
        (slow, fast), _ = run_case(
            Case(problem, some), device, limits, regime=again, seconds=_CONFIRM_SECONDS, seed=1
        )
        if speedup(slow.timing, fast.timing).value < (_MARGIN if again is regime else 1.0):
            return False
    return True


def _cut_of(plan: Plan) -> tuple[tuple[str, Any], ...]:
    """Decode: the choices of a plan that are kept besides its tiles."""
    if not plan.operation.split_selects_kernel or plan.split is None:
        return ()
    return ("schedule", plan.split.kind), ("num_splits", plan.split.count)


def _way(row: Measured) -> tuple[Any, ...]:
    assert row.plan is not None
    return row.plan.config, *_cut_of(row.plan)


def _keep(device: Device, problem: Problem, planned: Measured, best: Measured, over_planned: float) -> Path:
    assert planned.plan is not None and best.plan is not None
    spec = best.plan.spec
    evidence = {
        **dict(_cut_of(best.plan)),
        "planned": dataclasses.asdict(planned.plan.config),
        "over_planned": round(over_planned, 4),
        "seconds": best.seconds,
        "regime": best.regime,
        "problem": str(problem),
        "device": device.name,
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digest": measured.digest(spec),
    }
    try:
        return tuning.save(device.name, tuning_key(spec, problem), best.plan.config, evidence)
    except OSError as error:
        common.fail(
            common.Exit.FAILED,
            f"cannot keep the winner: {error}. Set CUFA_CACHE_DIR to a folder that can be written.",
        )
