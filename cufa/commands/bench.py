"""`cufa bench`."""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.table import Table

from ..bench import decode, peers, records
from ..bench.limits import measure_limits
from ..bench.regimes import Regime
from ..bench.runner import Contender, Row, Skipped, run_problem
from ..bench.suites import SUITES, Case
from ..core.architectures import Device
from .common import (
    ALGORITHMS,
    Exit,
    device_option,
    fail,
    find_device,
    json_option,
    print_json,
    print_rows,
    print_skipped,
    problem_from,
    progress,
    regime_options,
    seconds_text,
    shape_options,
    stderr,
    stdout,
)


@click.command("bench")
@click.argument("operation", type=click.Choice(["forward", "decode"]), default="forward")
@click.option(
    "--suite",
    type=click.Choice(list(SUITES)),
    help="A named set of shapes; else one shape by the options below.",
)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    type=click.Choice(ALGORITHMS),
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
@shape_options(seqlen=1024)
@device_option
@regime_options(0.5)
@json_option
def bench_command(
    operation: str,
    suite: str | None,
    algorithms: tuple[str, ...],
    families: tuple[str, ...],
    device: str,
    regime: Regime,
    seconds: float,
    as_json: bool,
    **shape: Any,
) -> None:
    """Time kernels over shapes: median, p10 and p90 with a cold L2 cache, TFLOP/s, effective GB/s, percentage
    of the ceilings measured on this machine, and the largest error against float64.

    `cufa bench decode` times flash_decode instead, over its own shapes: microseconds, and TB/s of keys and
    values beside a plain streaming read. It needs a GPU; of the options, --peers, --device, --seconds and
    --json apply.

    Contenders of a shape take turns in one run. With --sustained each runs alone, warmed up and back to back,
    and its SM clock, power and joules per call stand beside its time: a card that is held at its power limit
    is another machine. FLOPs are counted as 4 · head_dim per visible score, forward.

    Exit codes: 0 done; 1 a result was not a number; 2 wrong usage; 3 no GPU where one was asked for, or a
    library of --peers is missing.
    """
    if operation == "decode":
        _refuse_for_decode({"suite": suite, "algorithms": algorithms, **shape})
    target = find_device(device, cpu_will_do=operation == "forward")
    for family in (peers.FAMILIES[name] for name in families):
        if family.missing:
            fail(Exit.MISSING, f"--peers {family.name}: {family.missing} (cufa never needs it otherwise)")
    if operation == "decode":
        _bench_decode(target, "torch" in families, seconds, as_json)
        return
    if suite is None and _given(shape):
        cases: list[Case] = [
            (problem_from(shape, target), tuple(Contender(a) for a in algorithms or ALGORITHMS))
        ]
    else:
        chosen_suite = SUITES[suite or "quick"]
        if chosen_suite.gpu_only and target is None:
            fail(
                Exit.MISSING,
                f"--suite {chosen_suite.name} is made for a GPU; quick, versions and memory run here",
            )
        cases = list(chosen_suite.cases(target))
    rows: list[Row] = []
    skipped: list[Skipped] = []
    with progress() as bar:
        task = bar.add_task("measuring this machine's ceilings", total=len(cases))
        limits = measure_limits(target)
        for seed, (problem, contenders) in enumerate(cases):
            bar.update(task, description=str(problem))
            chosen = _choose(contenders, algorithms, families)
            got, missed = run_problem(
                problem, chosen, target, limits, regime=regime, seconds=seconds, seed=seed
            )
            rows += got
            skipped += missed
            bar.advance(task)
    if as_json:
        print_json(records.run_record(rows, skipped, target, limits))
    else:
        print_rows(rows)
        _print_needs(rows)
        print_skipped(skipped)
    wrong = [row for row in rows if not row.error < float("inf")]
    for row in wrong:
        stderr().print(f"not a number: {row.label} on {row.problem}", style="red", markup=False)
    if wrong or not rows:
        raise SystemExit(int(Exit.FAILED))


def _bench_decode(device: Device | None, torch: bool, seconds: float, as_json: bool) -> None:
    """All cases."""
    if device is None:
        fail(
            Exit.MISSING, "decode is timed on a GPU, and there is none here (or --device cpu asked for none)"
        )
    rows: list[decode.DecodeRow] = []
    with progress() as bar:
        todo = list(decode.cases())
        task = bar.add_task("compiling", total=len(todo))
        for case in todo:
            bar.update(task, description=case.title)
            rows += decode.run_case(case, device, torch=torch, seconds=seconds)
            bar.advance(task)
    if as_json:
        document = {"schema": records.SCHEMA, "environment": records.environment(device)}
        print_json({**document, "rows": [decode.row_record(row) for row in rows]})
    else:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("batch × heads × cached", "contender", "median", "p10", "p90", "TB/s", "error", "how"):
            table.add_column(name, justify="left" if name in ("contender", "how") else "right")
        for row in rows:
            times = (seconds_text(t) for t in (row.timing.p50, row.timing.p10, row.timing.p90))
            how = f"{row.plan.schedule}, {row.plan.num_splits}" if row.plan else ""
            error = "" if row.error is None else f"{row.error:.1e}"
            table.add_row(row.case, row.label, *times, f"{row.tbytes:.2f}", error, how)
        stdout().print(table)
    if any(row.error is not None and not row.error < float("inf") for row in rows):
        raise SystemExit(int(Exit.FAILED))


def _print_needs(rows: list[Row]) -> None:
    """For FA3: what each resource needs by itself, in percent of the time measured; the time predicted."""
    derived = [row for row in rows if row.predicted is not None]
    if not derived:
        return
    table = Table(title="of the time measured, by itself", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("kernel")
    table.add_column("head dim, seq, mask", no_wrap=True)
    for name in ("predicted", *derived[0].needs):
        table.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for row in derived:
        p = row.problem
        shape = f"{p.head_dim}, {p.seqlen_q}×{p.seqlen_k}, {'causal' if p.causal else 'full'}"
        shares = (f"{seconds / row.seconds:.0%}" for seconds in row.needs.values())
        table.add_row(row.label, shape, seconds_text(row.predicted or 0.0), *shares)
    stdout().print(table)


def _refuse_for_decode(options: dict[str, Any]) -> None:
    parameters = click.get_current_context().command.params
    given = sorted(p.opts[0] for p in parameters if p.name in options and _given({p.name: None}))
    if given:
        raise click.UsageError(
            f"`bench decode` has shapes and kernels of its own: {', '.join(given)} cannot be chosen there"
        )


def _given(options: dict[str, Any]) -> bool:
    """Whether any of them stood on the command line."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in options)


def _choose(
    contenders: tuple[Contender, ...], algorithms: tuple[str, ...], families: tuple[str, ...]
) -> list[Contender]:
    """A case's own kernels, or those asked for; peers only when asked for, those of the case first."""
    ours = [c for c in contenders if not c.is_peer and (not algorithms or c.algorithm in algorithms)]
    if not ours:
        ours = [Contender(a) for a in algorithms]
    for name in families:
        wanted = peers.FAMILIES[name].peers
        ours += [c for c in contenders if c.algorithm in wanted] or [Contender(p) for p in wanted]
    return ours
