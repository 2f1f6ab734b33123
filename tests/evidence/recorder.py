"""Measures the cases whose rows are missing, stale, or of another plan than today's.

All contenders of a case are measured in one session, because ratios need times measured alternately. Rows are written
after each case, so that losing the machine costs at most one case.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure.cards import Card
from cufa.measure.cases import Case, Contender
from cufa.measure.limits import measure_limits
from cufa.measure.measured import Measured, plan_json
from cufa.measure.measuring import WARM_SECONDS
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import SUITES
from cufa.problem.problem import Problem

from .card_file import CardFile
from .host_times import compile_lines, first_result_seconds, host_calls

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Part:
    """The cases of one suite under one regime."""

    suite: str
    regime: Regime = Regime.IN_TURNS
    seconds: float | None = None
    """Measuring time; None: the regime's default."""
    section: str = ""
    """Suite under which the rows are stored; "": ``suite``."""

    @property
    def name(self) -> str:
        return f"{self.suite}, {self.regime}"

    def cases(self, device: Device | None) -> list[Case]:
        return list(SUITES[self.suite].cases(device))

    @property
    def kept_in(self) -> str:
        return self.section or self.suite

    def group(self, case: Case) -> tuple[str, Regime, str | Problem]:
        """:attr:`cufa.measure.measured.Measured.group` of the rows of a case."""
        return self.kept_in, self.regime, case.name or dataclasses.replace(case.problem, deterministic=False)

    def least_seconds(self, case: Case) -> float:
        """Seconds of warm-up and measurement of one case, without inputs, references and compilation."""
        seconds = self.seconds or self.regime.seconds
        return seconds if self.regime is Regime.IN_TURNS else len(case.contenders) * (seconds + WARM_SECONDS)


_IN_TURNS = (
    "forward", "awkward", "chunks", "ladder", "versions", "float32", "fa1-blocks", "memory", "masks", "scores",
    "widths", "decode", "splits", "backward", "backward-beside", "backward-widths", "backward-ladder", "fp8",
    "fp8-speed",
)  # fmt: skip
#: Seconds that suffice for a time, but not for energy.
_SHORT = 1.0

#: All parts, in the order in which they are measured.
PARTS = (
    *map(Part, _IN_TURNS),
    Part("fa3", Regime.SUSTAINED, _SHORT, section="forward"),
    Part("decode-published", Regime.SUSTAINED, _SHORT, section="decode"),
    Part("backward", Regime.SUSTAINED, _SHORT / 2),
    Part("energy", Regime.SUSTAINED),
    Part("fp8-energy", Regime.SUSTAINED),
    Part("backward-energy", Regime.SUSTAINED),
)


class OutOfTime(Exception):
    """The next step would exceed the given time limit."""


@dataclasses.dataclass(frozen=True)
class Lacking:
    part: Part
    case: Case
    seed: int
    why: str


def lacking(card: Card | None, device: Device) -> Iterator[Lacking]:
    """The cases to measure, in order."""
    rows: dict[Any, dict[str, Measured]] = {}
    for row in card.rows if card else ():
        rows.setdefault(row.group, {})[row.label] = row
    for part in PARTS:
        for seed, case in enumerate(part.cases(device)):
            if why := _why(case, device, rows.get(part.group(case), {})):
                yield Lacking(part, case, seed, why)


def _why(case: Case, device: Device, rows: dict[str, Measured]) -> str:
    """Why a case must be measured. "": its rows match today's plans. Peers may be missing: machines differ in
    libraries."""
    for contender in case.contenders:
        if not contender.is_ours:
            continue
        try:
            plan = contender.plan(case.problem, device)
        except ValueError:  # no kernel serves this problem on this device
            continue
        row = rows.get(contender.label)
        if row is None:
            return "not measured"
        if row.is_stale:
            return f"{row.json['kernel']} changed"
        if row.json["kernel"] != plan.spec.name or not _same(row.json, plan_json(plan)):
            return "planned otherwise now"
    return ""


def _same(row: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Whether tiles and splits are equal in all fields that both have. An older row may lack a field."""
    pairs = ((row.get(name) or {}, plan.get(name) or {}) for name in ("config", "split"))
    return all(
        theirs[field] == mine for theirs, ours in pairs for field, mine in ours.items() if field in theirs
    )


def record(
    file: CardFile, device: Device, *, jobs: int, seconds: float, limit: float, everything: bool, say: Say,
    suites: Collection[str] = (),
) -> None:  # fmt: skip
    """Measure and record the lacking cases, of ``suites`` if any are named. ``seconds``: measuring time of a case in
    alternation. ``limit``: seconds; raises OutOfTime before a step that would usually exceed it."""
    started = time.perf_counter()
    card = None if everything else file.card
    others = card.others if card else {}
    if "ceilings" not in others:
        say("ceilings")
        file.add("ceilings", **dataclasses.asdict(measure_limits(device)))
    todo = [x for x in lacking(card, device) if not suites or x.part.suite in suites]
    changed = {x.why.removesuffix(" changed") for x in todo}
    specs = [s for s in KERNELS.values() if s.runs_on(device.arch.capability)]
    for line in compile_lines(s for s in specs if f"compile {s.name}" not in others or s.name in changed):
        file.add(**line)
    say("compiling the variants of the benchmark")
    _compile_in_parallel([x.case for x in todo], jobs)
    limits = file.card.limits
    assert limits is not None
    for x in todo:
        left = limit - (time.perf_counter() - started)
        if 3 * x.part.least_seconds(x.case) > left:
            raise OutOfTime(f"{left:.0f} s are left; what is measured is in {file.path}")
        say(f"{x.part.name}: {x.case.title}: {x.why}")
        regime = x.part.regime
        of_case = x.part.seconds or (seconds if regime is Regime.IN_TURNS else None)
        rows, _ = run_case(x.case, device, limits, regime=regime, seconds=of_case, seed=x.seed)
        file.add_rows(x.part.kept_in, rows)
    if "host" not in others or changed & {"fa3_forward", "fa3_backward", "fa2_forward"}:
        say("host time of a call, and to the first result of a new process")
        file.add("host", calls=host_calls(), first_result=first_result_seconds())


def problems_with(card: Card) -> list[str]:
    """Reasons not to release: failed or missing tests, NaN, and kernels that no test ran."""
    tests, found = card.others.get("tests"), []
    if tests is None:
        return ["the GPU tests were not run"]
    if tests["failed"] or not tests["passed"]:
        found.append(f"{tests['failed']} GPU tests failed, {tests['passed']} passed: {tests['failures'][:3]}")
    found += [
        f"{row.suite}: {row.label} gave NaN on {row.case or row.problem}"
        for row in card.rows
        if not row.is_number
    ]
    here = [s.name for s in KERNELS.values() if s.runs_on(card.device.arch.capability)]
    found += [f"no GPU test ran {name}" for name in here if not tests["passed_by_kernel"].get(name)]
    timed = {row.json.get("kernel") for row in card.rows}
    compiled = (line["kernel"] for what, line in card.others.items() if what.startswith("compile "))
    return found + [f"{kernel} was not timed" for kernel in compiled if kernel not in timed]


def _compile_in_parallel(cases: Iterable[Case], jobs: int) -> None:
    """Fill CuPy's disk cache. Each compilation uses one core: one process per job."""
    wanted: dict[tuple[Problem, Contender], tuple[Contender, Problem]] = {}
    for case, contender in ((x, c) for x in cases for c in x.contenders if c.is_ours):
        p = case.problem_of(contender)
        # Builds depend neither on the batch nor on the number of query groups.
        code = dataclasses.replace(p, batch=1, heads=p.group_size, kv_heads=1)
        wanted.setdefault((code, contender), (contender, case.problem))
    context = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's CUDA context
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile_one, wanted.values()))


def _compile_one(job: tuple[Contender, Problem]) -> None:
    from cufa.run.cuda import backend as cuda

    contender, problem = job
    try:
        plan = contender.plan(problem, cuda.current_device())
    except ValueError:  # no kernel serves the problem on this device: the benchmark reports it
        return
    cuda.prepare(plan)
