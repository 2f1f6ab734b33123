"""`cufa bench`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from ..gpu.architectures import Device
from ..measure import float8_cases, measured, peers
from ..measure.cases import Case, Contender
from ..measure.limits import measure_limits
from ..measure.measured import Measured, Skipped
from ..measure.regimes import Regime
from ..measure.runner import run_case
from ..measure.suites import OPERATION_NAMES, SUITES, Suite
from ..plan.candidates import algorithms as algorithms_of
from . import common
from .rows import print_needs, print_rows, print_skipped

#: Algorithms of all operations, without duplicates.
_ALGORITHMS = tuple(dict.fromkeys(a for name in OPERATION_NAMES for a in algorithms_of(name)[1:]))

_FP8 = "fp8"
"""The forward with inputs of e4m3, in place of an operation."""


@click.command("bench")
@click.argument("operation", type=click.Choice((*OPERATION_NAMES, _FP8)), required=False)
@click.option(
    "--suite",
    type=click.Choice(list(SUITES)),
    help="A named set of shapes; else one shape by the options below.",
)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    type=click.Choice(_ALGORITHMS),
    help="Repeatable.  [default: all]",
)
@click.option(
    "--peers",
    "families",
    multiple=True,
    type=click.Choice(list(peers.FAMILIES)),
    help="Also time another library, if it is here: torch's SDPA backends, torch's compiled FlexAttention, "
    "FlashAttention-4. Repeatable.",
)
@common.shape_options(seqlen=1024)
@common.device_option
@common.regime_options(Regime.IN_TURNS.seconds)
@common.json_option
def bench_command(
    operation: str | None, suite: str | None, algorithms: tuple[str, ...], families: tuple[str, ...],
    device: str, regime: Regime, seconds: float, as_json: bool, **shape: Any,
) -> None:  # fmt: skip
    """Time kernels over shapes: median, p10 and p90, TFLOP/s, effective GB/s, percentage of the ceilings
    measured on this machine, and the largest error against float64.

    OPERATION is forward, decode or backward: its cases of a suite, its own suite when none is named, or one shape of
    it. For decoding, --seqlen are the query tokens (1 unless given) and --seqlen-k the cached ones.

    fp8 in its place is the forward in e4m3 beside bfloat16: root mean square and largest error against float64 on five
    distributions of inputs, with scales per head, block and token, with and without rotation and smoothing. With
    --seqlen-k the needle is looked for among that many keys. `--suite fp8-speed` has times, `--suite
    fp8-energy --sustained` joules.

    Contenders of a shape take turns in one run, with a cold L2 cache. With --sustained each runs alone, warmed
    up and back to back, and its SM clock, power and joules per call stand beside its time: at its power limit
    a card is slower. FLOPs are counted as 4 · head_dim per visible score, 10 ·
    head_dim in the backward.

    Exit codes: 0 done; 1 a result was not a number; 2 wrong usage; 3 no GPU where one was asked for, or a
    library of --peers is missing.
    """
    chosen = _suite(suite, operation) if suite or not common.given(shape) else None
    if operation == _FP8 and algorithms:
        raise click.UsageError("fp8 chooses its kernels: leave out --algorithm")
    target = common.find_device(device, cpu_will_do=chosen is None or not chosen.gpu_only)
    for family in (peers.FAMILIES[name] for name in families):
        if family.missing:
            common.fail(
                common.Exit.MISSING,
                f"--peers {family.name}: {family.missing} (cufa never needs it otherwise)",
            )
    cases = _cases(chosen, operation, shape, target)
    for name in algorithms:
        common.check_algorithm(name, dict.fromkeys(case.problem.operation for case in cases))
    rows: list[Measured] = []
    skipped: list[Skipped] = []
    with common.progress() as bar:
        task = bar.add_task("measuring this machine's ceilings", total=len(cases))
        limits = measure_limits(target)
        for seed, case in enumerate(cases):
            bar.update(task, description=case.title)
            case = dataclasses.replace(case, contenders=_choose(case, algorithms, families))
            got, missed = run_case(case, target, limits, regime=regime, seconds=seconds, seed=seed)
            rows += got
            skipped += missed
            bar.advance(task)
    if as_json:
        common.print_json(measured.run_json(rows, skipped, target, limits))
    else:
        print_rows(rows)
        print_needs(rows)
        print_skipped(skipped)
    wrong = [row for row in rows if not row.is_number]
    for row in wrong:
        common.stderr().print(f"not a number: {row.label} on {row.title}", style="red", markup=False)
    if wrong or not rows:
        raise SystemExit(int(common.Exit.FAILED))


def _suite(name: str | None, operation: str | None) -> Suite:
    """The named suite, or the operation's first. The suite ``OPERATION-NAME`` takes precedence over ``NAME``."""
    if operation == _FP8 and not name:
        return SUITES[_FP8]
    if name:
        return SUITES.get(f"{operation}-{name}", SUITES[name])
    return next(suite for suite in SUITES.values() if operation in (None, suite.operation))


def _cases(
    suite: Suite | None, operation: str | None, shape: dict[str, Any], device: Device | None
) -> list[Case]:
    if operation == _FP8:
        if suite is not None:
            return list(suite.cases(device))
        problem = common.problem_from({**shape, "dtype": "bfloat16"}, device)
        needle_keys = shape["seqlen_k"] or float8_cases.NEEDLE_KEYS[device is not None]
        return list(float8_cases.accuracy(problem, needle_keys, device is not None))
    if suite is None:
        problem = common.problem_from(shape, device, operation or OPERATION_NAMES[0])
        names = algorithms_of(problem.operation)[1:]
        return [Case(problem, tuple(Contender(name) for name in names))]
    if suite.gpu_only and device is None:
        here = ", ".join(s.name for s in SUITES.values() if not s.gpu_only)
        common.fail(common.Exit.MISSING, f"--suite {suite.name} is made for a GPU; {here} run here")
    cases = [case for case in suite.cases(device) if operation in (None, case.problem.operation)]
    if not cases:
        raise click.UsageError(f"--suite {suite.name} has no case of {operation}")
    return cases


def _choose(case: Case, algorithms: tuple[str, ...], families: tuple[str, ...]) -> tuple[Contender, ...]:
    """The case's kernels or the requested ones, then the requested families of peers: the case's own peers of a family
    if it names any, else all of the family."""
    ours = [c for c in case.contenders if c.is_ours and (not algorithms or c.algorithm in algorithms)]
    if not ours:
        known = algorithms_of(case.problem.operation)
        ours = [Contender(a) for a in algorithms if a in known]
    chosen = ours + [c for c in case.contenders if not c.is_ours and not c.is_peer]
    for name in families:
        wanted = peers.FAMILIES[name].peers
        chosen += [c for c in case.contenders if c.algorithm in wanted] or [Contender(p) for p in wanted]
    return tuple(chosen)
