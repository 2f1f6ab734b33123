"""Shared by the commands: options, exit codes, output streams, tables, and finding the device."""

from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..calls.shapes import FORWARD_DTYPES, MAX_CAPACITY, MAX_TOKENS
from ..gpu.architectures import Device
from ..measure.cases import of_forward
from ..measure.decode_cases import make_decode
from ..measure.regimes import Regime
from ..measure.suites import OPERATION_NAMES, make
from ..plan.candidates import algorithms
from ..problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MAX_SIZE, Problem
from .mask_options import FORWARD_ONLY, MASK_OPTIONS, decoding_mask, forward_mask

F = TypeVar("F", bound=Callable[..., Any])

ALGORITHMS = tuple(name for name in algorithms() if name != "auto")
"""Algorithms of the forward operation."""


SIZE = click.IntRange(1, MAX_SIZE)
"""Length of an axis: kernels count with 32 bits."""


class Exit(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2  # click's own
    MISSING = 3


def stdout(width: int = 120) -> Console:
    """For results; of this width when they go to a file. (Consoles are made at each use, so that redirected streams are
    honoured.)"""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def stderr() -> Console:
    """For progress and remarks."""
    return Console(stderr=True, highlight=False)


def table(text: Iterable[str], figures: Iterable[str], title: str = "", **columns: Any) -> Table:
    """Columns of text, then columns of figures; ``columns``: options of all of them."""
    found = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in text:
        found.add_column(name, **columns)
    for name in figures:
        found.add_column(name, justify="right", **columns)
    return found


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
    """The current GPU, or None for the CPU. Exits when ``choice`` is "cuda" and there is no GPU; the message proposes
    the CPU if the command has --device and ``cpu_will_do``."""
    if choice == "cpu":
        return None
    try:
        from ..run.cuda import backend as cuda

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


device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: the GPU when there is one.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def stacked(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


DAY = 24 * 3600.0
"""In seconds."""


class Seconds(click.FloatRange):
    """A measuring time, at most a day."""

    def __init__(self) -> None:
        super().__init__(min=0.01, max=DAY)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        seconds = super().convert(value, parameter, context)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds.", parameter, context)
        return float(seconds)


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
        type=Seconds(),
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


def shape_options(
    seqlen: int, dtypes: Sequence[str] = FORWARD_DTYPES, dtype: str | None = None
) -> Callable[[F], F]:
    """--batch, --heads, --window and so on; :func:`problem_from` turns them into a Problem. ``dtype`` is the
    default of --dtype; without one it depends on the device."""
    return stacked(
        click.option("--batch", type=SIZE, default=1, show_default=True),
        click.option("--heads", type=SIZE, default=8, show_default=True, help="Query heads."),
        click.option("--kv-heads", type=SIZE, help="Key/value heads (GQA, MQA).  [default: heads]"),
        click.option("--seqlen", type=SIZE, default=seqlen, show_default=True, help="Queries."),
        click.option("--seqlen-k", type=SIZE, help="Keys.  [default: seqlen]"),
        click.option("--head-dim", type=click.IntRange(8, MAX_HEAD_DIM), default=64, show_default=True),
        click.option(
            "--dtype",
            type=click.Choice(dtypes),
            default=dtype,
            show_default=dtype is not None,
            help=None if dtype else "[default: bfloat16 on a GPU, float32 on the CPU]",
        ),
        *MASK_OPTIONS,
        click.option("--precision", type=click.Choice(["float32", "tf32"]), help="For float32 on a GPU."),
        click.option("--deterministic", is_flag=True, help="Backward: the same bits in every run."),
    )


_MOST_ELEMENTS = 2**57
"""An exabyte with 8 bytes each: larger arrays are refused before NumPy's 64-bit sizes overflow."""


def problem_from(
    options: dict[str, Any], device: Device | None, operation: str = OPERATION_NAMES[0]
) -> Problem:
    """A Problem from :func:`shape_options`; wrong combinations are usage errors."""
    heads, kv_heads, head_dim = options["heads"], options["kv_heads"], options["head_dim"]
    if kv_heads and heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    if head_dim % HEAD_DIM_STEP:
        raise click.UsageError(f"--head-dim {head_dim} is not a multiple of {HEAD_DIM_STEP}")
    dtype = options["dtype"] or ("float32" if device is None else "bfloat16")
    if options["precision"] and dtype != "float32":
        raise click.UsageError(f"--precision is a choice for float32, not {dtype}")
    try:
        problem = _MAKERS[operation]({**options, "dtype": dtype, "kv_heads": kv_heads or heads})
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    for shape in problem.shapes:
        if math.prod(shape) > _MOST_ELEMENTS:
            raise click.UsageError(f"an array of shape {shape} is larger than any memory")
    return problem


def _forward(options: dict[str, Any]) -> Problem:
    if options["deterministic"]:
        raise click.UsageError("--deterministic is a choice for the backward: all else always is")
    return _dense(options)


def _backward(options: dict[str, Any]) -> Problem:
    return of_forward(_dense(options), deterministic=options["deterministic"])


def _dense(options: dict[str, Any]) -> Problem:
    mask = forward_mask(options)
    return make(
        options["batch"], options["heads"], options["seqlen"], options["head_dim"], options["dtype"], mask,
        kv_heads=options["kv_heads"], seqlen_k=options["seqlen_k"], precision=options["precision"],
        softcap=options["softcap"],
    )  # fmt: skip


def _decode(options: dict[str, Any]) -> Problem:
    """--seqlen are the query tokens, one unless they are given, and --seqlen-k the cached ones."""
    foreign = (*FORWARD_ONLY, "precision", "deterministic")
    if given(foreign):
        names = ", ".join(f"--{name}" for name in foreign)
        raise click.UsageError(
            "the tokens of a decoding call are the last of their sequence, in the precision of their dtype: "
            f"leave out {names}"
        )
    tokens, capacity = options["seqlen"] if given({"seqlen"}) else 1, options["seqlen_k"] or 8192
    for name, size, most in (("seqlen", tokens, MAX_TOKENS), ("seqlen-k", capacity, MAX_CAPACITY)):
        if size > most:
            raise click.UsageError(f"--{name} {size}: a decoding call takes at most {most:,}")
    return make_decode(
        options["batch"], options["heads"], options["kv_heads"], capacity,
        tokens=tokens, head_dim=options["head_dim"],
        dtype=options["dtype"], mask=decoding_mask(options), softcap=options["softcap"],
    )  # fmt: skip


#: For each operation, the function that makes a problem of one shape.
_MAKERS: dict[str, Callable[[dict[str, Any]], Problem]] = {
    "forward": _forward,
    "decode": _decode,
    "backward": _backward,
}


def check_algorithm(name: str, operations: Iterable[str]) -> None:
    """Raises a usage error unless one of the operations has the algorithm ``name``; the error lists their
    algorithms."""
    known = {operation: algorithms(operation)[1:] for operation in operations}
    if not any(name in names for names in known.values()):
        there = "; ".join(f"{operation} has {', '.join(names)}" for operation, names in known.items())
        raise click.UsageError(f"--algorithm {name}: {there}")


def given(options: Iterable[str]) -> bool:
    """Whether any of the options stood on the command line."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in options)


def _short(value: float, unit: str, most: float) -> str:
    """Three digits, or all digits from ``most`` on."""
    return f"{value:.3g} {unit}" if value < most else f"{value:.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return _short(seconds / scale, unit, 1000)
    return f"{seconds * 1e6:.3g} µs"


def bytes_text(count: float) -> str:
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return _short(count / scale, unit, 1000)
    return f"{count:.0f} B"


def rate_text(tflops: float) -> str:
    return _short(tflops, "TFLOP/s", 100) if tflops >= 1 else _short(tflops * 1e3, "GFLOP/s", 100)
