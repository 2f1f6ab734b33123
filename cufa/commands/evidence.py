"""`cufa evidence`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import click

from ..build.sass import MissingDisassemblerError
from ..build.static_compile import MissingCompilerError
from ..measure import evidence, fastest, gpu_tests, records, renewal, report, traces
from ..measure.evidence_parts import EVIDENCE
from .common import Exit, Seconds, fail, find_device, stderr, stdout


@click.group("evidence", invoke_without_command=True)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=records.RECORDS_DIR,
    help="Folder for the record.  [default: cufa/records]",
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Processes that compile and test.  [default: cores, at most 16]"
)
@click.option(
    "--seconds",
    type=Seconds(),
    default=0.5,
    show_default=True,
    help="Measuring time of a shape in turns.",
)
@click.option(
    "--tests/--no-tests", "with_tests", default=True, help="Without its tests a record is no evidence."
)
@click.option(
    "--continue",
    "go_on",
    is_flag=True,
    help="Go on with the record in the folder, where the machine was lost.",
)
@click.option(
    "--renew",
    is_flag=True,
    help="Take the record in the folder and measure again only what `cufa evidence stale` names, and the tests.",
)
@click.option(
    "--limit",
    type=Seconds(),
    help="Begin nothing that usually ends after so many seconds: for a machine that is lent. Go on with --continue.",
)
@click.pass_context
def evidence_command(
    context: click.Context,
    output: Path,
    jobs: int | None,
    seconds: float,
    with_tests: bool,
    go_on: bool,
    renew: bool,
    limit: float | None,
) -> None:
    """Run the GPU tests and the benchmark on this machine's GPU, and write them with the digests of the
    kernels' sources to one file, which ships with the package. CI has no GPU: it fails when a kernel changes
    after its evidence. What one changed kernel makes stale is measured again with --renew, which says in the record
    which parts are of another day or machine.

    Exit codes: 0 all good; 1 a test failed or a result was wrong (the record is written all the same);
    2 wrong usage; 3 no GPU, or no tests here.
    """
    if context.invoked_subcommand:
        return
    device = find_device("cuda")
    assert device is not None
    started = time.perf_counter()

    def say(what: str) -> None:
        stderr().print(f"{time.perf_counter() - started:4.0f} s  {what}", markup=False)

    file = records.evidence_path(device.name, output)
    begun = read_record(file) if go_on or renew else None
    if begun is None or renew:
        say("traces: which block ran when, on which SM")
        folder, plans = output / traces.TRACES_DIR.name, traces.evidence_plans(device)
        for plan in traces.renewed(device, plans, folder) if renew else plans:
            traces.save(traces.record(plan), folder)
    try:
        record = evidence.record_evidence(
            device,
            jobs=jobs or gpu_tests.default_jobs(),
            seconds=seconds,
            with_tests=with_tests,
            say=say,
            keep=lambda record: records.save(record, file),
            begun=begun,
            renew=renew,
            limit=limit or math.inf,
        )
    except evidence.OutOfTime as error:
        fail(
            Exit.FAILED,
            f"stopped in time: {error}. {file} has what was measured; `--continue` goes on with it",
        )
    except FileNotFoundError as error:
        fail(Exit.MISSING, str(error))
    except ValueError as error:
        fail(Exit.FAILED, f"{file}: {error}")
    say(f"written to {file}")
    if output == records.RECORDS_DIR:
        fastest.write([record])
    stdout().print(report.markdown({file.stem: record}), markup=False, soft_wrap=True)
    lacks = renewal.stale_parts(record, device)
    found = [*evidence.problems_with(record), *(f"{name}: {why}" for name, why in lacks.items())]
    if found:
        fail(Exit.FAILED, "\n".join(found))


def read_record(file: Path) -> records.Json:
    """One record, or the end of the command where there is none to be read."""
    try:
        return records.upgrade(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        fail(Exit.USAGE, f"{file}: {error}")


@evidence_command.command("tests")
@click.option("--jobs", type=click.IntRange(1), help="Processes that test.  [default: cores, at most 16]")
@click.option(
    "--into",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Record of these kernels, made with --no-tests, that keeps the result.",
)
@click.option(
    "--every-case",
    is_flag=True,
    help="All cases of tests that have many, as a recording and --into run them, not the day's sample.",
)
def run_tests(jobs: int | None, into: Path | None, every_case: bool) -> None:
    """Run the GPU tests alone, as a recording does: on all cores, then those that need the GPU to themselves.

    Exit codes: 0 all passed; 1 a test failed, or the record is of other kernels; 3 no GPU, or no tests here.
    """
    find_device("cuda")
    record = read_record(into) if into else None
    try:
        gpu_tests.check_tests_are_here()
    except FileNotFoundError as error:
        fail(Exit.MISSING, str(error))
    tests = gpu_tests.run_gpu_tests(
        jobs or gpu_tests.default_jobs(),
        lambda what: stderr().print(what, markup=False),
        every_case=every_case or into is not None,
    )
    counts = ", ".join(f"{tests[outcome]:,} {outcome}" for outcome in ("passed", "failed", "skipped"))
    click.echo(f"{counts} in {tests['seconds']:.0f} s")
    if into and record:
        try:
            evidence.add_tests(record, tests)
        except ValueError as error:
            fail(Exit.FAILED, f"{into}: {error}")
        records.save(record, into)
    if tests["failed"] or not tests["passed"]:
        fail(Exit.FAILED, "\n".join(tests["failures"]) or "no test ran")


@evidence_command.command("show")
def show() -> None:
    """Print what was recorded, as Markdown tables; needs no GPU."""
    click.echo(report.markdown(records.load_all()))


@evidence_command.command("stale")
def stale() -> None:
    """Print what --renew would measure again on the card of each record, why, and the least time that it takes;
    needs no GPU.

    Exit codes: 0 nothing; 1 something is stale.
    """
    found = False
    for name, record in records.load_all().items():
        device = renewal.device_of(record)
        why = renewal.stale_parts(record, device)
        for part in (part for part in EVIDENCE if part.name in why):
            seconds = renewal.least_seconds(part, device)
            click.echo(f"{name}.json: {part.name}: {why[part.name]}; {seconds:.0f} s or more")
            found = True
    if found:
        sys.exit(Exit.FAILED)


@evidence_command.command("same-code")
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder cuda_src as it was when the records were made, such as that of another checkout.",
)
def same_code(before: Path) -> None:
    """Compile what was recorded from the sources as they were and as they are; where machine code and registers are
    the same, the evidence becomes that of the sources as they are. Needs no GPU.

    Exit codes: 0 done; 2 no kernels in the folder; 3 no compiler, or no package that reads its results.
    """
    try:
        from ..measure.same_code import SameCode

        comparison = SameCode(before.resolve(), lambda what: stderr().print(what, markup=False))
        for name, record in records.load_all().items():
            if comparison.restamp_record(record):
                records.save(record, records.RECORDS_DIR / f"{name}.json")
        comparison.restamp_traces(records.RECORDS_DIR)
    except ImportError as error:
        fail(Exit.MISSING, f"{error}; install it with: pip install pyelftools")
    except (MissingCompilerError, MissingDisassemblerError) as error:
        fail(Exit.MISSING, str(error))
    except ValueError as error:
        fail(Exit.USAGE, str(error))


@evidence_command.command("fastest")
def fastest_kernels() -> None:
    """Write which kernel was fastest for which class of problem, from the records, to where plans find it."""
    for file in fastest.write(records.load_all().values()):
        click.echo(file)


@evidence_command.command("readme")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def readme(file: Path) -> None:
    """Write what was recorded into FILE, between its marker comments, and all tables beside the records."""
    try:
        report.write(file)
    except ValueError as error:
        fail(Exit.FAILED, f"{file}: {error}")
