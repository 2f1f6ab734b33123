"""`cufa repro`: a measurement as a Python program that repeats the measurement."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ..cache import runs_dir
from ..gpu.architectures import Device
from ..kernels import KERNELS
from ..measure import cards
from ..measure.cases import Case, Contender, as_launched
from ..measure.inputs import Inputs
from ..measure.limits import measure_limits
from ..measure.measured import Json, Measured, digest, rows_of
from ..measure.regimes import Regime
from ..measure.runner import prepare, run_case
from ..problem.problem import Problem
from . import common

_PROGRAM = '''\
"""{title}.

Recorded on {device}, {recorded}, commit {commit}, {regime}.
Needs cufa {version} and CuPy (with --cpu NumPy){peers}. Inputs are standard normal, as in the recorded run;
its values are not kept.

    python FILE                measure, compare with float64, print beside the recorded figures
    python FILE --once LABEL   launch one contender once, for a profiler or a sanitizer
    python FILE --cpu          NumPy instead of a GPU: results and errors, not the kernel's time
"""

from cufa.commands.repro import repeat

REGIME = {regime!r}
CASES = [
{cases}]
RECORDED = [
{figures}]

if __name__ == "__main__":
    repeat(CASES, RECORDED, REGIME)
'''


@click.command("repro")
@click.argument("source")
@click.option(
    "--row", "rows", type=click.IntRange(0), multiple=True, help="Only this row, from 0. Repeatable."
)
@click.option("--sustained", is_flag=True, help="The sustained rows of a source with both regimes.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="[default: stdout]")
def repro_command(source: str, rows: tuple[int, ...], sustained: bool, output: Path | None) -> None:
    """Write one Python file that repeats the measurements of SOURCE: the same problems, tiles, splits and regime,
    checked against float64, each beside its recorded figure.

    SOURCE is a file of `cufa bench --json`, the id of a run of the dashboard, or a recorded suite or row, such as
    nvidia-h200.forward or nvidia-h200.forward.12: the ids in the downloads of the page History.

    Exit codes: 0 done; 2 wrong usage, or a row that this version cannot repeat.
    """
    try:
        measured, environment = rows_of_source(source)
        if max(rows, default=0) >= len(measured):
            raise ValueError(f"--row {max(rows)}: there are rows 0 to {len(measured) - 1}")
        chosen = [measured[n] for n in rows] if rows else measured
        alone = sustained or all(row.regime is Regime.SUSTAINED for row in chosen)
        regime = Regime.SUSTAINED if alone else Regime.IN_TURNS
        text = program([row for row in chosen if row.regime is regime], environment)
        output.write_text(text, encoding="utf-8") if output else click.echo(text, nl=False)
    except (KeyError, TypeError, ValueError) as error:
        raise click.UsageError(f"{source}: {error}") from error
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}") from error


def rows_of_source(source: str) -> tuple[list[Measured], Json]:
    """Rows, and the environment of their run. Raises ValueError for an unknown source."""
    files = (Path(source), runs_dir() / source / "record.json")
    file = next((x for x in files if x.is_file()), None)
    if file is not None:
        content = json.loads(file.read_text(encoding="utf-8"))
        return rows_of(content), content["environment"]
    name, _, rest = source.partition(".")
    known = cards.load_all()
    if name not in known:
        raise ValueError(f"no file, no run and no recorded card; cards: {', '.join(known)}")
    suite, _, number = rest.partition(".")
    rows = known[name].of_suite(suite)
    if number:
        rows = rows[int(number) : int(number) + 1]
    if not rows:
        suites = ", ".join(dict.fromkeys(row.suite for row in known[name].rows))
        raise ValueError(f"{name} has no such row; suites: {suites}")
    return rows, known[name].sessions[rows[0].recorded]


# --- Writing ------------------------------------------------------------------------------------------------


def program(rows: Sequence[Measured], environment: Json) -> str:
    """The program of rows of one regime. The rows of one case take turns, as they did when they were recorded.

    ``environment``: of the run, as :func:`cufa.measure.machine.environment` writes it. Raises ValueError if the rows
    have different regimes, or if a row's contender cannot be made again.
    """
    if len({row.regime for row in rows}) != 1:
        raise ValueError("rows: expected one regime, got none or both; filter the rows by regime")
    device = None
    if "arch" in environment:
        typical = Device.typical(environment["arch"])
        device = Device(environment["device"], typical.arch, environment.get("num_sms", typical.num_sms))
    cases, figures = list[Case](), list[Json]()
    for number, (_, group) in enumerate(itertools.groupby(rows, key=lambda row: (row.recorded, row.group))):
        measured = list(group)
        problem, lengths = measured[0].problem, measured[0].json.get("lengths")
        contenders = tuple(_contender(row, problem, device) for row in measured)
        cases.append(Case(problem, contenders, measured[0].case, lengths and tuple(lengths)))
        figures += [{"case": number} | _figures(row) for row in measured]
    return _PROGRAM.format(
        title=", ".join(dict.fromkeys(row.label for row in rows)) + f": {cases[0].title}"
        + (f", and {len(cases) - 1} more cases" if cases[1:] else ""),
        device=environment["device"],
        recorded=environment["recorded"],
        commit=environment.get("commit", "unknown"),
        regime=rows[0].regime.value,
        version=environment.get("versions", {}).get("cufa", ""),
        peers=" and the library of each peer" if any(row.is_peer for row in rows) else "",
        cases="".join(map(_case_text, cases)),
        figures="".join(f"    {x},\n" for x in figures),
    )  # fmt: skip


def _contender(row: Measured, case_problem: Problem, device: Device | None) -> Contender:
    """The contender of a row, with the tiles, splits and grid of the row: the planner may choose others today."""
    problem = None if row.problem == case_problem else row.problem
    if not row.is_ours:
        return Contender(row.label, problem=problem)
    try:
        kernel, split = KERNELS[row.json["kernel"]], row.json.get("split")
        config = kernel.read_config(row.json["config"])
        contender = Contender(kernel.algorithm, config, row.label, split and split["count"], problem=problem)
        if device is None:
            return contender
        plan = contender.plan(row.problem, device)
    except (KeyError, TypeError, ValueError) as error:
        commit = row.json.get("commit", "that was measured")
        raise ValueError(
            f"{row.label}, {row.problem}: {error}. Repeat this row in commit {commit}"
        ) from error
    as_recorded = as_launched(plan, row.json["grid"])
    return dataclasses.replace(contender, one_item_a_block=as_recorded is not plan)


def _figures(row: Measured) -> Json:
    kept = ("label", "p50_ns", "max_error", "kernel", "digest", "grid")
    return {name: row.json[name] for name in kept if name in row.json}


def _case_text(case: Case) -> str:
    """A case as JSON in Python's notation, a line for each contender."""
    content = case.as_json()
    problem = _without_defaults(content["problem"], Problem)
    contenders = "".join(f"            {_without_defaults(x, Contender)},\n" for x in content["contenders"])
    return (
        f"    {{\n        'name': {case.name!r},\n        'problem': {problem},\n"
        f"        'lengths': {content['lengths']},\n        'contenders': [\n{contenders}        ],\n    }},\n"
    )


def _without_defaults(content: Json, of: type[Problem | Contender]) -> Json:
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    return {name: x for name, x in content.items() if x != defaults[name]}


# --- Running ------------------------------------------------------------------------------------------------


def repeat(cases: Sequence[Json], recorded: Sequence[Json], regime: str) -> None:
    """The main function of a program: reads the command line, and exits as a command of cufa does."""
    labels = ", ".join(dict.fromkeys(x["label"] for x in recorded))

    @click.command(context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--once", metavar="LABEL", help=f"Launch one contender once: {labels}.")
    @click.option("--cpu", is_flag=True, help="NumPy instead of a GPU.")
    @click.option(
        "--seconds", type=common.Seconds(), help="Measuring time per case, or sustained per contender."
    )
    def command(once: str | None, cpu: bool, seconds: float | None) -> None:
        """Measure, compare with float64, and print each contender beside its recorded figures."""
        device = common.find_device("cpu" if cpu else "cuda")
        here = [_on(Case.from_json(case), device) for case in cases]
        if once:
            _launch_once(here, once, device)
        else:
            _measure(here, recorded, Regime(regime), device, seconds)

    command()


def _on(case: Case, device: Device | None) -> Case:
    """The case for a device: NumPy has other tiles, and runs no other library."""
    if device is not None:
        return case
    contenders = (
        Contender(c.algorithm, name=c.label, problem=c.problem) for c in case.contenders if c.is_ours
    )
    return dataclasses.replace(case, contenders=tuple(contenders))


def _launch_once(cases: Sequence[Case], label: str, device: Device | None) -> None:
    """Launch the first contender of this label and wait for its result."""
    names = {contender.label: (contender, case) for case in reversed(cases) for contender in case.contenders}
    if label not in names:
        raise click.UsageError(f"--once {label}: no such contender runs here; there are: {', '.join(names)}")
    contender, case = names[label]
    inputs = Inputs(case.problem, case.lengths, on_gpu=device is not None, seed=0)
    prepare(contender, case, device, [inputs]).runs[0]()
    if device is not None:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def _measure(
    cases: Sequence[Case], recorded: Sequence[Json], regime: Regime, device: Device | None, seconds: float | None
) -> None:  # fmt: skip
    """Print each contender beside its recorded figures. Exits with 1 if a result is not a number."""
    limits, wrong = measure_limits(device), False
    shown = common.table(["contender", "case"], ["recorded", "here", "ratio", "error then", "error here"])
    remarks = list[str]()
    for number, case in enumerate(cases):
        rows, skipped = run_case(case, device, limits, regime=regime, seconds=seconds, seed=number)
        remarks += [f"not run: {x.label}: {x.reason}" for x in skipped]
        for row in rows:
            wrong |= not row.is_number
            then = next(x for x in recorded if x["case"] == number and x["label"] == row.label)
            seconds_then = then["p50_ns"] * 1e-9
            errors = ("" if x is None else f"{x:.1e}" for x in (then["max_error"], row.error))
            times = common.seconds_text(seconds_then), common.seconds_text(row.seconds)
            shown.add_row(row.label, row.title, *times, f"{row.seconds / seconds_then:.2f}", *errors)
            remarks += _differences(then, row)
    common.stdout().print(shown)
    for remark in dict.fromkeys(remarks):
        common.stderr().print(remark, style="yellow", markup=False)
    if wrong:
        raise SystemExit(int(common.Exit.FAILED))


def _differences(then: Json, row: Measured) -> Iterator[str]:
    """Other differences from the recorded launch."""
    if row.plan is None:
        return
    if row.plan.device is None:
        yield f"{row.label}: here it is the same algorithm in NumPy, not the kernel"
        return
    if then["digest"] != digest(row.plan.spec):
        yield f"{row.label}: the source of {then['kernel']} has changed since"
    grid = [list(launch.grid) for launch in row.plan.launches]
    if then["grid"] != grid:
        yield f"{row.label}: the grid was {then['grid']}, here it is {grid}"
