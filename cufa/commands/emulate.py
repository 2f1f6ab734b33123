"""`cufa emulate`: execute a kernel's CUDA source on the CPU; count its work, or look for mistakes."""

from __future__ import annotations

from typing import Any

import click
import ml_dtypes
import numpy as np

from ..gpu.architectures import Device
from ..kernels import KERNELS, TileConfig, kernels_of
from ..measure import costs
from ..plan.candidates import serving_configs
from ..plan.planner import make_plan
from ..problem.problem import Problem
from ..problem.scores import softcap_derivative, softcapped
from ..problem.work import WORK
from ..reference.dense import attention_reference, attention_reference_backward
from ..run.emulate import blind_spots
from ..run.emulate.build import CompilerError
from ..run.emulate.calls import Emulation, EmulationError, emulate, emulate_backward
from ..run.emulate.launch import MODES
from . import common

#: Operations that the executor runs; the default first.
_OPERATIONS = ("forward", "backward")

#: Elements that kernels of these operations take without scales.
_DTYPES = tuple(
    dict.fromkeys(
        dtype
        for operation in _OPERATIONS
        for spec in kernels_of(operation).values()
        for dtype in spec.dtypes
        if not spec.scales
    )
)

#: Counters of a visited tile that `--recorded` shows; --json has all.
_COUNTED = tuple(name for name in costs.COUNTERS if name != "passes")

#: The tolerance is a sum: twice the error of the unfused computation (as in FlashAttention's tests), one rounding of
#: the result's largest number, a fraction of this number for sums in another order, and for lse 2**-15.
_TIMES, _OF_SUMS, _OF_LSE = 2, 2.0**-19, 2.0**-15


def _schedule(context: click.Context, parameter: click.Parameter, value: str) -> str | int:
    if value in ("ascending", "descending"):
        return value
    if value.isascii() and value.isdigit() and len(value) <= 10 and int(value) < 1 << 32:
        return int(value)
    raise click.BadParameter(f"{value!r}: 'ascending', 'descending' or a number (a seed) below 2**32")


@click.command("emulate")
@click.argument("operation", type=click.Choice(_OPERATIONS), default=_OPERATIONS[0])
@click.option("--algorithm", type=click.Choice(common.ALGORITHMS), default="fa2", show_default=True)
@click.option("--config", "tiles", metavar="128x64", help="Queries × keys of a tile.  [default: as planned]")
@common.shape_options(seqlen=256, dtypes=_DTYPES, dtype="float16")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="counted",
    show_default=True,
    help="counted: bytes, wavefronts, bank conflicts. checked: races, ranges, divergence. plain: neither.",
)
@click.option(
    "--schedule",
    default="ascending",
    callback=_schedule,
    help="Order of warps: ascending, descending, or a seed.",
)
@click.option(
    "--copies", type=click.Choice(["early", "late"]), help="When cp.async writes: issued, or awaited."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: all]")
@click.option("--arch", default="sm_90", show_default=True, help="Plan the tiles for this architecture.")
@click.option("--recorded", is_flag=True, help="Show recorded counters of a visited tile; needs no compiler.")
@common.json_option
def emulate_command(
    operation: str, algorithm: str, tiles: str | None, mode: str, schedule: str | int, copies: str | None,
    threads: int | None, arch: str, recorded: bool, as_json: bool, **shape: Any,
) -> None:  # fmt: skip
    """Execute the CUDA source of a kernel of OPERATION on this CPU, thread by thread. Needs a C++ compiler, no GPU.

    Exit status 1: checked mode has found something, the kernel deadlocks, or the result is wrong. It says
    nothing about speed or registers: `cufa bench` and `cufa compile` do.
    """
    if recorded:
        _recorded(as_json)
        return
    common.check_algorithm(algorithm, [operation])
    problem = common.problem_from(shape, None, operation)
    inputs = _inputs(problem)
    try:
        run, expected = _execute(
            problem, inputs, algorithm=algorithm, precision=shape["precision"], mode=mode, schedule=schedule,
            copies=copies, threads=threads, config=_config(tiles, problem, algorithm, arch), arch=arch,
        )  # fmt: skip
    except CompilerError as error:
        common.fail(common.Exit.MISSING, str(error))
    except EmulationError as error:
        common.fail(common.Exit.FAILED, str(error))
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    errors = {name: _largest(run.results[name], exact) for name, exact in expected.items()}
    if as_json:
        common.print_json(_document(run, errors))
    else:
        _print(run, errors)
    allowed = _tolerances(expected, _unfused(problem, *inputs))
    wrong = [name for name in expected if not errors[name] <= allowed[name]]
    for name in wrong:
        text = f"{name} is wrong: off by {errors[name]:.1e}, of which rounding explains {allowed[name]:.1e}"
        common.stderr().print(text, style="red", markup=False)
    if run.findings or wrong:
        raise SystemExit(int(common.Exit.FAILED))


Results = dict[str, np.ndarray[Any, Any]]


def _execute(
    problem: Problem, inputs: list[np.ndarray[Any, Any]], **options: Any
) -> tuple[Emulation, Results]:
    """A run, and the expected results by name."""
    how: dict[str, Any] = {"mask": problem.mask, "softcap": problem.softcap}
    q, k, v, dout = inputs
    if not WORK[problem.operation].by_keys:
        run = emulate(q, k, v, **how, **options)
        out, lse = attention_reference(q, k, v, **how, return_lse=True)
        return run, {"out": out, "lse": lse}
    out, lse = attention_reference(q, k, v, **how, return_lse=True)
    out, lse = out.astype(q.dtype), lse.astype(np.float32)
    options["deterministic"] = problem.deterministic
    run = emulate_backward(dout, q, k, v, out, lse, **how, **options)
    gradients = attention_reference_backward(dout, q, k, v, **how)
    return run, dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _tolerances(expected: Results, unfused: Results) -> dict[str, float]:
    """By result: the largest error that rounding explains."""
    tolerances = {}
    for name, exact in expected.items():
        rounding = float(ml_dtypes.finfo(unfused[name].dtype).eps) + _OF_SUMS
        largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
        tolerances[name] = _TIMES * _largest(unfused[name], exact) + rounding * largest
        tolerances[name] += _OF_LSE if name == "lse" else 0.0
    return tolerances


@np.errstate(all="ignore")
def _unfused(problem: Problem, q: Any, k: Any, v: Any, dout: Any) -> Results:
    """Every result as array operations give it: each array is rounded to the inputs' dtype, products are summed in
    float32."""
    group, cap = problem.group_size, problem.softcap

    def rounded(x: Any) -> Any:
        return x.astype(q.dtype).astype(np.float32)

    def operand(x: Any) -> Any:
        if problem.precision != "tf32":
            return x
        return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)

    def product(a: Any, b: Any) -> Any:
        return operand(a) @ operand(b)

    def sums(x: Any) -> Any:
        return x.reshape(problem.batch, problem.kv_heads, group, *x.shape[2:]).sum(axis=2)

    Q, dO = q.astype(np.float32), dout.astype(np.float32)
    K, V = (np.repeat(x.astype(np.float32), group, axis=1) for x in (k, v))
    S = product(Q, K.mT) * np.float32(problem.scale)
    S = S if cap is None else softcapped(S, cap)
    slope = 1 if cap is None else softcap_derivative(S, cap)
    S = np.where(problem.mask.dense(problem.seqlen_q, problem.seqlen_k), S, np.float32(-np.inf))
    m = S.max(axis=-1, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)
    lse = (m + np.log(np.exp(S - m).sum(axis=-1, keepdims=True)))[..., 0]
    P = np.exp(rounded(S) - m)
    total = P.sum(axis=-1, keepdims=True)
    P = rounded(P / np.where(total == 0, 1, total))
    dP = rounded(product(dO, V.mT))
    dS = rounded(P * (dP - (P * dP).sum(axis=-1, keepdims=True)) * slope * np.float32(problem.scale))
    results = {
        "out": product(P, V), "dq": product(dS, K), "dk": sums(product(dS.mT, Q)), "dv": sums(product(P.mT, dO))
    }  # fmt: skip
    return {name: x.astype(q.dtype) for name, x in results.items()} | {"lse": lse}


def _config(tiles: str | None, problem: Problem, algorithm: str, arch: str) -> TileConfig | None:
    """The algorithm's first config of such tiles. Raises ValueError that lists the tiles of the kernel."""
    if tiles is None:
        return None
    device = Device.typical(arch)
    spec = make_plan(problem, device, algorithm).spec
    fitting = serving_configs(spec, problem, device)
    named = {f"{config.block_q}x{config.block_kv}": config for config in reversed(fitting)}
    if tiles.replace("×", "x") not in named:
        there = ", ".join(reversed(named))
        raise ValueError(f"--config {tiles}: {spec.name} has at head dim {problem.head_dim} only {there}")
    return named[tiles.replace("×", "x")]


def _largest(result: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest absolute error; NaN if the result holds NaN. Equal infinities (rows that see nothing) agree."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(result.astype(np.float64) - expected)
    return float(np.where(result == expected, 0.0, difference).max())


def _inputs(problem: Problem) -> list[np.ndarray[Any, Any]]:
    """q, k, v and a gradient of the output."""
    rng, dtype = np.random.default_rng(0), problem.q_element.dtype
    return [rng.standard_normal(shape).astype(dtype) for shape in problem.shapes]


#: Counters that describe the emulation, not the kernel.
_INTERNAL = ("switches",)


def _document(run: Emulation, errors: dict[str, float]) -> dict[str, Any]:
    """Totals, and the spread over blocks of each launch: [fewest, median, most]."""
    spread = {
        entry: {
            name: [int(f(counts[name])) for f in (np.min, np.median, np.max)]
            for name in counts.dtype.names or ()
            if name not in _INTERNAL and counts[name].any()
        }
        for entry, counts in run.counters.items()
    }
    findings = [{"kind": f.kind, "count": f.count, "message": f.message} for f in run.findings]
    named = {"max_error" if x == "out" else f"max_{x}_error": error for x, error in errors.items()}
    unseen = {"cannot_see": blind_spots.as_lines()} if run.mode == "checked" else {}
    return {
        "problem": run.plan.problem.as_json(),
        "config": str(run.plan.config),
        "grids": {launch.entry: list(launch.grid) for launch in run.plan.launches},
        "totals": {name: count for name, count in run.totals.items() if name not in _INTERNAL},
        "per_block": spread,
        **named,
        "seconds": run.seconds,
        "findings": findings,
        **unseen,
    }


def _print(run: Emulation, errors: dict[str, float]) -> None:
    console = common.stdout()
    console.print(str(run.plan), markup=False)
    off = ", ".join(f"of {name} {error:.1e}" for name, error in errors.items())
    console.print(
        f"executed in {common.seconds_text(run.seconds)} on this CPU, max error against float64 {off}"
    )
    if len(run.records):
        schedule = run.plan.schedule
        same = np.array_equal(
            run.records["tiles_visited"].reshape(-1, schedule.num_blocks)[0], schedule.visits
        )
        console.print(f"tiles counted by the kernel {'equal' if same else 'DIFFER FROM'} the schedule")
    for entry, counts in run.counters.items():
        figures = ("fewest", "median", "most", "total")
        shown = common.table(["per block"], figures, f"{entry}, {len(counts):,} blocks")
        for name in counts.dtype.names or ():
            if counts[name].any() and name not in _INTERNAL:
                column = counts[name]
                found = (column.min(), np.median(column), column.max(), column.sum())
                shown.add_row(name.replace("_", " "), *(f"{int(x):,}" for x in found))
        console.print(shown)
    for finding in run.findings:
        console.print(str(finding), style="red", markup=False, soft_wrap=True)
    if run.mode != "checked":
        console.print("counts only: --mode checked looks for mistakes")
    elif not run.findings:
        console.print("nothing found. What checked mode cannot see:")
        for line in blind_spots.as_lines():
            console.print(f"- {line}", markup=False, soft_wrap=True)


def _recorded(as_json: bool) -> None:
    document = costs.load()
    if as_json:
        common.print_json(document)
        return
    console = common.stdout(180)  # every row on one line
    console.print(document["about"], markup=False)
    console.print("Counters of one visited tile; --json also has those of query, key and thread blocks.")
    shown = common.table(["kernel, tiles, head dim"], (name.replace("_", "\n") for name in _COUNTED))
    for kernel, entry in document["kernels"].items():
        for build in entry["configs"]:
            config = KERNELS[kernel].config_class.from_json(build["config"])
            for head_dim, counts in build["head_dims"].items():
                figures = (counts.get(name, {}).get("tile", 0) for name in _COUNTED)
                shown.add_row(f"{kernel} {config} d{head_dim}", *(f"{n:,}" if n else "–" for n in figures))
    console.print(shown)
