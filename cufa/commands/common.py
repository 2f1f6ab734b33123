"""What the commands share: options, exit codes, where output goes, and finding the device."""

from __future__ import annotations

import enum
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bench.power import Power
from ..bench.regimes import Regime
from ..bench.runner import Row, Skipped
from ..bench.suites import make
from ..core.architectures import Device
from ..core.problem import HEAD_DIM_STEP, ITEMSIZE, MAX_HEAD_DIM, Problem
from ..planner import ALGORITHMS as _WITH_AUTO

F = TypeVar("F", bound=Callable[..., Any])

ALGORITHMS = tuple(name for name in _WITH_AUTO if name != "auto")


class Exit(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2  # click's own
    MISSING = 3


def stdout() -> Console:
    """For results; wide enough for a table when they go to a file. (Consoles are made at each use, so that
    redirected streams are honoured.)"""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def stderr() -> Console:
    """For progress and remarks."""
    return Console(stderr=True, highlight=False)


def fail(code: Exit, message: str) -> NoReturn:
    stderr().print(message, style="red", markup=False)
    raise SystemExit(int(code))


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=1))


def progress() -> Progress:
    """On stderr, gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr(), transient=True)


def find_device(choice: str, cpu_will_do: bool = True) -> Device | None:
    """The current GPU, or None for the CPU. Exits when ``choice`` is "cuda" and there is none; proposes the
    CPU then, if the command has the choice and ``cpu_will_do``."""
    if choice == "cpu":
        return None
    try:
        from ..backends import cuda

        if cuda.device_count():
            return cuda.current_device()
        reason = "CuPy sees no GPU"
    except (ImportError, ValueError) as error:
        reason = str(error)
    if choice == "cuda":
        has_choice = "device" in click.get_current_context().params
        instead = "; --device cpu runs here" if has_choice and cpu_will_do else ""
        fail(Exit.MISSING, f"No usable GPU: {reason}. `cufa doctor` says what to do{instead}.")
    return None


def device_option(function: F) -> F:
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: the GPU when there is one.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def seconds_option(default: float) -> Callable[[F], F]:
    """``default`` is for contenders that take turns."""
    return click.option(
        "--seconds",
        type=click.FloatRange(min=0.01),
        default=default,
        show_default=True,
        help="Time spent measuring each shape.",
    )


def regime_options(in_turns_seconds: float) -> Callable[[F], F]:
    """--sustained and --seconds: the command is given ``regime`` and ``seconds``."""
    alone = Regime.SUSTAINED.seconds
    sustained = click.option(
        "--sustained",
        is_flag=True,
        help="Each contender alone, back to back, with clock, power and joules; otherwise they take turns.",
    )
    seconds_given = click.option(
        "--seconds",
        type=click.FloatRange(min=0.01),
        help=f"Time spent measuring each shape, or with --sustained each contender.  "
        f"[default: {in_turns_seconds:g}; with --sustained {alone:g}]",
    )

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*arguments: Any, sustained: bool, seconds: float | None, **options: Any) -> Any:
            regime = Regime.SUSTAINED if sustained else Regime.IN_TURNS
            if seconds is None:
                seconds = alone if sustained else in_turns_seconds
            return function(*arguments, regime=regime, seconds=seconds, **options)

        return sustained(seconds_given(command))  # type: ignore[return-value]

    return decorate


def shape_options(seqlen: int) -> Callable[[F], F]:
    """--batch, --heads and so on; :func:`problem_from` turns them into a Problem."""
    options = [
        click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
        click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Query heads."),
        click.option(
            "--kv-heads", type=click.IntRange(1), help="Key/value heads (GQA, MQA).  [default: heads]"
        ),
        click.option("--seqlen", type=click.IntRange(1), default=seqlen, show_default=True, help="Queries."),
        click.option("--seqlen-k", type=click.IntRange(1), help="Keys.  [default: seqlen]"),
        click.option("--head-dim", type=click.IntRange(8, MAX_HEAD_DIM), default=64, show_default=True),
        click.option(
            "--dtype",
            type=click.Choice(list(ITEMSIZE)),
            help="[default: float16 on a GPU, float32 on the CPU]",
        ),
        click.option("--causal/--full", default=False, show_default=True),
        click.option("--precision", type=click.Choice(["float32", "tf32"]), help="For float32 on a GPU."),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def problem_from(options: dict[str, Any], device: Device | None) -> Problem:
    """A Problem from :func:`shape_options`; wrong combinations are usage errors."""
    dtype = options["dtype"] or ("float32" if device is None else "float16")
    heads, kv_heads, head_dim = options["heads"], options["kv_heads"], options["head_dim"]
    if kv_heads and heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    if head_dim % HEAD_DIM_STEP:
        raise click.UsageError(f"--head-dim {head_dim} is not a multiple of {HEAD_DIM_STEP}")
    if options["precision"] and dtype != "float32":
        raise click.UsageError(f"--precision is a choice for float32, not {dtype}")
    return make(
        options["batch"], heads, options["seqlen"], head_dim, dtype, options["causal"],
        kv_heads=kv_heads, seqlen_k=options["seqlen_k"], precision=options["precision"],
    )  # fmt: skip


def seconds_text(seconds: float) -> str:
    """Three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return (
                f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
            )
    return f"{seconds * 1e6:.3g} µs"


def bytes_text(count: float) -> str:
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def rate_text(tflops: float) -> str:
    value, unit = (tflops, "TFLOP/s") if tflops >= 1 else (tflops * 1e3, "GFLOP/s")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def print_rows(rows: Sequence[Row]) -> None:
    """The tables of `cufa bench`: one per problem, one line per contender."""
    console = stdout()
    for (problem, regime), group in itertools.groupby(rows, key=lambda row: (row.problem, row.regime)):
        table = Table(
            title=f"{problem}; {regime}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
        )
        table.add_column("kernel")
        power = ("TFLOP/J", "J/call", "clock", "power") if regime is Regime.SUSTAINED else ()
        for name in ("p50", "p10", "p90", "speed", *power, "GB/s", "% of ceiling", "max error"):
            table.add_column(name, justify="right")
        for row in group:
            table.add_row(
                row.label,
                *(seconds_text(t) for t in (row.timing.p50, row.timing.p10, row.timing.p90)),
                rate_text(row.tflops),
                *(_power_cells(row) if power else ()),
                f"{row.gbytes:.3g}" if row.gbytes < 100 else f"{row.gbytes:.0f}",
                f"{100 * row.of_ceiling:.0f}% {row.bound}",
                f"{row.error:.1e}",
            )
        console.print(table)
    _print_remarks(rows)


def _power_cells(row: Row) -> list[str]:
    power = row.power or Power()
    return [
        "–" if row.tflop_per_joule is None else f"{row.tflop_per_joule:.2f}",
        "–" if power.joules is None else f"{power.joules:.3g}",
        "–" if power.clock_mhz is None else f"{power.clock_mhz:.0f} MHz",
        "–" if power.watts is None else f"{power.watts:.0f} W",
    ]


def _print_remarks(rows: Sequence[Row]) -> None:
    """What the figures of contenders that ran alone lack."""
    console = stderr()
    for reason in dict.fromkeys(row.power.missing for row in rows if row.power and row.power.missing):
        console.print(f"not measured: {reason}", style="yellow", markup=False)
    for row in rows:
        if row.load and row.load.host_bound:
            console.print(
                f"{row.label} on {row.problem}: the GPU waited for the host, the time is not the kernel's",
                style="yellow",
                markup=False,
            )


def print_skipped(skipped: Sequence[Skipped]) -> None:
    console = stderr()
    for reason in dict.fromkeys((s.label, s.reason) for s in skipped):
        console.print(f"not run: {reason[0]}: {reason[1]}", style="yellow", markup=False)
