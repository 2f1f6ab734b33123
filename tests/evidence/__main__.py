"""The tool that records measurements: ``python -m tests.evidence COMMAND``, in a checkout.

``record`` measures, ``stamp`` follows it on a machine with the pinned NVRTC, then ``readme``.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import click

from cufa.commands.common import DAY, Exit, Seconds, fail, find_device, stderr, stdout
from cufa.gpu.architectures import Device
from cufa.measure import cards
from cufa.measure.machine import environment
from cufa.measure.suites import SUITES

from . import code, counting, fastest, gpu_tests, recorder, report, traced
from .card_file import CardFile

JOBS = click.option("--jobs", type=click.IntRange(1), default=gpu_tests.default_jobs, help="Processes.")


@click.group()
def main() -> None:
    """Record measurements on a GPU, keep track of what is stale, and write README's tables."""


def _card_here() -> tuple[Device, CardFile]:
    """This machine's GPU and its card file. Exits if there is no GPU."""
    device = find_device("cuda")
    assert device is not None
    return device, CardFile(cards.path_of(device.name), environment(device))


@main.command()
@JOBS
@click.option("--seconds", type=Seconds(), default=0.5, show_default=True, help="Of a case in turns.")
@click.option("--tests/--no-tests", "with_tests", default=True, help="Run the GPU tests, too.")
@click.option("--all", "everything", is_flag=True, help="Measure all cases, not only those missing or stale.")
@click.option("--inside", "with_inside", is_flag=True, help="Also renew the traces of the inside of blocks.")
@click.option("--limit", type=Seconds(), default=DAY, help="Begin nothing that usually ends later than this.")
@click.option(
    "--suite", "suites", multiple=True, type=click.Choice(list(SUITES)), help="Repeatable. Of these only."
)
def record(
    jobs: int, seconds: float, with_tests: bool, everything: bool, with_inside: bool, limit: float,
    suites: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure the cases that this card's file lacks or whose rows are stale, renew traces, and run the GPU tests.

    Exit codes: 0 all good; 1 a test failed, a result was wrong, or the time was up (rows are kept); 3 no GPU.
    """
    device, file = _card_here()
    started = time.perf_counter()

    def say(what: str) -> None:
        stderr().print(f"{time.perf_counter() - started:4.0f} s  {what}", markup=False, soft_wrap=True)

    for written in traced.renew(device, with_inside):
        say(written)
    try:
        recorder.record(
            file,
            device,
            jobs=jobs,
            seconds=seconds,
            limit=limit,
            everything=everything,
            suites=suites,
            say=say,
        )
    except recorder.OutOfTime as error:
        fail(Exit.FAILED, f"stopped in time: {error}")
    if with_tests:
        file.add("tests", **gpu_tests.run_gpu_tests(jobs, say, every_case=True))
    fastest.write([file.card])
    stdout().print(report.markdown({file.path.stem: file.card}), markup=False, soft_wrap=True)
    if found := recorder.problems_with(file.card):
        fail(Exit.FAILED, "\n".join(found))


@main.command()
@JOBS
@click.option("--record", "keep", is_flag=True, help="Add the result to this card's file; runs every case.")
@click.option("--every-case", is_flag=True, help="All cases of tests that have many, not the day's sample.")
def tests(jobs: int, keep: bool, every_case: bool) -> None:
    """Run the GPU tests: on all cores, then those that need the GPU to themselves.

    Exit codes: 0 all passed; 1 a test failed; 3 no GPU.
    """
    _, file = _card_here()
    say = functools.partial(stderr().print, markup=False, soft_wrap=True)
    found = gpu_tests.run_gpu_tests(jobs, say, every_case=every_case or keep)
    counts = ", ".join(f"{found[outcome]:,} {outcome}" for outcome in ("passed", "failed", "skipped"))
    click.echo(f"{counts} in {found['seconds']:.0f} s")
    if keep:
        file.add("tests", **found)
    if found["failed"] or not found["passed"]:
        fail(Exit.FAILED, "\n".join(found["failures"]) or "no test ran")


@main.command()
def stale() -> None:
    """List the cases that ``record`` would measure on each card, why, and their least time; needs no GPU."""
    for name, card in cards.load_all().items():
        found: dict[tuple[str, str], list[float]] = {}
        for x in recorder.lacking(card, card.device):
            found.setdefault((x.part.name, x.why), []).append(x.part.least_seconds(x.case))
        for (part, why), seconds in found.items():
            click.echo(f"{name}: {part}: {len(seconds)} cases: {why}; {sum(seconds):.0f} s or more")


@main.command()
@JOBS
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where a digest is wrong.")
def stamp(jobs: int, check: bool) -> None:
    """Compile the builds of all rows and traces: which give the same machine code as when they were measured?"""
    if not check:
        click.echo(code.stamp(jobs))
    elif found := code.wrong(code.stamped(), jobs):
        fail(Exit.FAILED, f"run `python -m tests.evidence stamp`: {len(found)} builds are not as recorded")


@main.command("costs")
def count_costs() -> None:
    """Execute every kernel's source on this CPU, and record what a unit of its work costs. Some minutes; needs g++."""
    counting.record()


@main.command("fastest")
def write_fastest() -> None:
    """Write which kernel was fastest for which class of problem to where the planner finds it."""
    for file in fastest.write(cards.load_all().values()):
        click.echo(file)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def readme(file: Path) -> None:
    """Write the tables into FILE, between its marker comments, and all tables beside the measurements."""
    try:
        report.write(file)
    except ValueError as error:
        fail(Exit.FAILED, f"{file}: {error}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m tests.evidence"))
