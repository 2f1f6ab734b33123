"""`cufa inside`: the phases of each warp of a kernel, in a table and as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..build.phases import WORDS, mistakes
from ..gpu.architectures import Device
from ..measure import inside
from ..measure.inside_sums import Sums, lanes, perfetto, sums
from ..plan.planner import make_plan
from ..run.emulate.build import CompilerError
from . import common

_OPERATIONS = ("forward", "backward")


@click.command("inside")
@click.argument("operation", type=click.Choice(_OPERATIONS), default=_OPERATIONS[0])
@click.option("--algorithm", type=click.Choice(common.ALGORITHMS), default="fa3", show_default=True)
@common.shape_options(seqlen=512, dtypes=("float16", "bfloat16"), dtype="bfloat16")
@click.option("--executed", is_flag=True, help="Execute it on the CPU even where there is a GPU.")
@click.option("--arch", default="sm_90", show_default=True, help="Executed: the architecture to plan for.")
@click.option(
    "--perfetto",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a trace for ui.perfetto.dev.",
)
@click.option("--recorded", metavar="NAME", help="Show a recorded trace instead; 'list' names them.")
@common.json_option
def inside_command(
    operation: str, algorithm: str, executed: bool, arch: str, file: Path | None, recorded: str | None,
    as_json: bool, **shape: Any,
) -> None:  # fmt: skip
    """See what each warp of a kernel of OPERATION waits for, multiplies and stores, and when.

    On a GPU the trace is measured, by a build with stamps that ordinary builds lack. Without a GPU the kernel is
    executed on the CPU, and the trace says in which order things happen, not how long they take.
    """
    if recorded == "list":
        for name in inside.load_all():
            click.echo(name)
        return
    try:
        trace = (
            _made(operation, algorithm, executed, arch, shape) if recorded is None else _recorded(recorded)
        )
    except CompilerError as error:
        common.fail(common.Exit.MISSING, str(error))
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    found = trace.intervals()
    if file is not None:
        _write(file, perfetto(trace, found))
    sm_sums = sums(trace, found)
    if as_json:
        common.print_json(_document(trace, sm_sums))
    else:
        _print(trace, sm_sums, len({lane.role for lane in lanes(trace, found)}))


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise click.UsageError(
            f"--perfetto {file}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def _recorded(name: str) -> inside.InsideTrace:
    known = inside.load_all()
    if name not in known:
        there = ", ".join(known) or "none is recorded yet"
        raise ValueError(f"--recorded {name}: no inside trace of this name; there are: {there}")
    return known[name]


def _made(
    operation: str, algorithm: str, executed: bool, arch: str, shape: dict[str, Any]
) -> inside.InsideTrace:
    common.check_algorithm(algorithm, [operation])
    device = common.find_device("cpu" if executed else "auto")
    problem = common.problem_from(shape, device, operation)
    plan = make_plan(problem, device or Device.typical(arch), algorithm)
    return inside.execute(plan) if device is None else inside.record(plan)


def _document(trace: inside.InsideTrace, sm_sums: Sums) -> dict[str, Any]:
    return {
        "kernel": trace.kernel,
        "problem": trace.problem.as_json(),
        "config": str(trace.config),
        "clock": trace.clock,
        "unit": trace.unit,
        "slowdown": trace.slowdown,
        "sm": sm_sums.sm,
        "lanes": sm_sums.lanes,
        "span": sm_sums.span,
        "products": sm_sums.products,
        "softmax": sm_sums.softmax,
        "softmax_beside_products": sm_sums.overlap,
        "softmax_exposed": sm_sums.exposed,
        "phases": sm_sums.phases,
        "mistakes": mistakes(trace.logs),
    }


def _print(trace: inside.InsideTrace, sm_sums: Sums, roles: int) -> None:
    console = common.stdout()
    console.print(f"{trace.kernel}: {trace.problem}, {trace.config}", markup=False)
    if trace.is_time:
        console.print(
            f"SM {sm_sums.sm} of {trace.environment['device']}: {sm_sums.lanes} warps, {sm_sums.span:,.1f} µs"
        )
        if trace.slowdown is not None:
            console.print(f"with stamps a run takes {trace.slowdown:.2f}× the time of one without")
    else:
        console.print(
            f"executed on the CPU: order, not time; {sm_sums.lanes} warps, {sm_sums.span:,.0f} primitives"
        )
    for text in mistakes(trace.logs):
        console.print(text, style="red", markup=False)
    shown = common.table(
        ["phase"], [trace.unit, f"of all warps' {'time' if trace.is_time else 'primitives'}"]
    )
    for name, time in sorted(sm_sums.phases.items(), key=lambda item: -item[1]):
        shown.add_row(WORDS[name], f"{time:,.1f}", f"{sm_sums.share(time):.1%}")
    console.print(shown)
    if not trace.is_time:
        console.print("what runs beside what, and what is exposed, only a trace of a GPU can say")
    elif sm_sums.softmax and sm_sums.products:
        console.print(
            f"{sm_sums.overlap:.1%} of the softmax runs beside products; {sm_sums.exposed:,.1f} {trace.unit} of it "
            f"({sm_sums.exposed / sm_sums.span:.1%}) do not"
        )
