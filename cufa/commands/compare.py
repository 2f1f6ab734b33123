"""`cufa compare`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from ..measure import measured
from ..measure.cases import Case, contenders
from ..measure.limits import measure_limits
from ..measure.peers import PEERS
from ..measure.regimes import Regime
from ..measure.runner import predicted_speedup, run_case
from ..measure.suites import OPERATION_NAMES
from ..measure.timing import speedup
from ..plan.candidates import algorithms
from . import common
from .rows import print_rows

_ALGORITHMS = {name: algorithms(name)[1:] for name in OPERATION_NAMES}
_NAMES = click.Choice([*dict.fromkeys(a for names in _ALGORITHMS.values() for a in names), *PEERS])


@click.command("compare")
@click.argument("a", type=_NAMES)
@click.argument("b", type=_NAMES)
@click.option(
    "--operation",
    type=click.Choice(OPERATION_NAMES),
    help="Operation of both.  [default: the first that has them]",
)
@common.shape_options(seqlen=2048)
@common.device_option
@common.regime_options(1.0)
@common.json_option
def compare_command(
    a: str, b: str, operation: str | None, device: str, regime: Regime, seconds: float, as_json: bool,
    **shape: Any,
) -> None:  # fmt: skip
    """Time A and B in one run, taking turns or, with --sustained, each alone, and say how many times faster B
    is: the ratio of medians with a 95% confidence interval, and beside it the ratio that tile counts alone
    predict.

    Exit codes: 0 done; 1 a result was not a number; 2 wrong usage; 3 one of them cannot run here.
    """
    if a == b:
        raise click.UsageError("A and B are the same")
    target = common.find_device(device)
    problem = common.problem_from(shape, target, _operation_of(operation, a, b))
    with common.progress() as bar:
        bar.add_task(str(problem), total=None)
        limits = measure_limits(target)
        rows, skipped = run_case(
            Case(problem, contenders(a, b)), target, limits, regime=regime, seconds=seconds, only_all=True
        )
    if skipped:
        common.fail(common.Exit.MISSING, "\n".join(f"{s.label}: {s.reason}" for s in skipped))
    first, second = rows
    ratio = speedup(first.timing, second.timing)
    plans = [row.plan for row in rows if row.plan and not row.plan.split]
    predicted = predicted_speedup(*plans) if len(plans) == 2 else None
    if as_json:
        document = measured.run_json(rows, (), target, limits)
        document["speedup"] = {
            "of": b,
            "over": a,
            "regime": regime,
            **dataclasses.asdict(ratio),
            "predicted_by_tiles": predicted,
        }
        common.print_json(document)
    else:
        console = common.stdout()
        print_rows(rows)
        console.print(f"{b} is {ratio} as fast as {a} {regime} (median, 95% interval)")
        if predicted is not None:
            console.print(f"tile counts alone predict {predicted:.2f}×")
    if not all(row.is_number for row in rows):
        raise SystemExit(int(common.Exit.FAILED))


def _operation_of(wanted: str | None, *names: str) -> str:
    """The wanted operation, or the first, that has every algorithm among ``names`` (peers are of all operations)."""
    ours = {name for name in names if name not in PEERS}
    for operation, known in _ALGORITHMS.items():
        if ours <= set(known) and wanted in (None, operation):
            return operation
    if wanted is None:
        raise click.UsageError(f"{' and '.join(names)} are of different operations")
    raise click.UsageError(f"--operation {wanted} has {', '.join(_ALGORITHMS[wanted])}, not both of these")
