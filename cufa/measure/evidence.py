"""Everything that a machine with a GPU can show and CI cannot: GPU tests and benchmarks, in one record.

Order matters: one cold compile of each kernel alone, then the variants of the benchmark side by side (their
times are not recorded), then, with the machine quiet, the benchmark, and last the tests on all cores.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

from ..gpu.architectures import Device
from ..kernels import KERNELS, Kernel
from ..plan.operation import OPERATIONS
from ..plan.planner import fitting_configs, make_plan
from ..problem.mask import CAUSAL
from ..problem.problem import Problem
from . import part_run, records, renewal
from .cases import READ, Case, Contender
from .evidence_parts import EVIDENCE
from .gpu_tests import Say, check_tests_are_here, run_gpu_tests
from .host_times import first_result_seconds, host_calls
from .limits import launch_seconds, measure_limits, mma_rates
from .recorded import rows_of
from .records import Json
from .suites import SUITES, make


class OutOfTime(Exception):
    """What comes next would not end within the time that was given."""


def record_evidence(
    device: Device,
    *,
    jobs: int,
    seconds: float,
    with_tests: bool,
    say: Say,
    keep: Callable[[Json], object],
    begun: Json | None = None,
    renew: bool = False,
    limit: float = math.inf,
) -> Json:
    """Run it all on the current GPU. ``seconds`` is the measuring time of each case where contenders take
    turns. ``keep`` is given the record after every part, and within long ones: a machine may be lost in between, and
    ``begun`` is then the record that goes on with what it lacks. With ``renew`` what changed kernels made stale is
    taken out of it first (:mod:`cufa.measure.renewal`), and what is measured now says so where its machine or day is
    another.

    ``limit``: seconds; what usually would end after them is not begun.

    Raises OutOfTime where that ends it, with all that was measured kept; FileNotFoundError when the tests are wanted
    and not here (an installed package has none); and ValueError when ``begun`` is of another GPU or, without
    ``renew``, of kernels that changed since.
    """
    if with_tests:
        check_tests_are_here()
    started = time.perf_counter()
    here = records.environment(device)
    record = begun or _new_record(here)

    def check_time(what: str, needed: float) -> None:
        left = limit - (time.perf_counter() - started)
        if needed > left:
            keep(record)
            raise OutOfTime(f"{what} usually takes {needed:.0f} s, and {left:.0f} s are left")

    if begun:
        _check_device(begun, device)
    if renew:
        _take_out_stale(record, device, say)
    _check_kernels(record)
    missing = [KERNELS[name] for name in records.missing_kernels(record)]
    if missing:
        say("one cold compile of each kernel")
        record["kernels"] |= _kernel_records(missing, device, renewal.differing(record, here))
    if "limits" not in record:
        say("ceilings")
        record["limits"] = dataclasses.asdict(measure_limits(device))
    elif not record["limits"].get("mma_flops"):  # rows are a percentage of the others, which stay
        say("the ceiling of mma.sync, and the time of a launch")
        record["limits"] |= {"mma_flops": mma_rates(device), "launch_seconds": launch_seconds(device)}
    _measure_parts(record, device, jobs, seconds, here, say, keep, check_time)
    if "host_calls" not in record:
        say("time to the first result of a new process")
        record["first_result_seconds"] = first_result_seconds()
        say("host time of a call")
        record["host_calls"] = host_calls()
        record["host_measured"] = renewal.differing(record, here)
        keep(record)
    if with_tests:
        check_time("testing", renewal.usual_test_seconds(records.load_all().values()))
        add_tests(record, run_gpu_tests(jobs, say, every_case=True))
        record["tests"]["measured"] = renewal.differing(record, here)
    renewal.settle(record)
    record["seconds"] = round(record.get("seconds", 0.0) + time.perf_counter() - started, 1)
    keep(record)
    return record


def _new_record(here: Json) -> Json:
    """With nothing measured yet."""
    return {
        "schema": records.SCHEMA,
        "environment": here,
        "flop_convention": records.FLOP_CONVENTION,
        "kernels": {},
        "tests": None,
        "suites": {},
        "parts": [],
    }


def _take_out_stale(record: Json, device: Device, say: Say) -> None:
    stale = renewal.stale_parts(record, device)
    for name, why in stale.items():
        say(f"to be measured: {name}: {why}")
    renewal.take_out(record, stale, device)


def _check_device(begun: Json, device: Device) -> None:
    if begun["environment"]["device"] != device.name:
        raise ValueError(f"the record is of {begun['environment']['device']}, this GPU is {device.name}")


def _check_kernels(record: Json) -> None:
    stale = records.stale_kernels(record)
    if stale:
        raise ValueError(
            f"{', '.join(stale)} changed since the record was made; `cufa evidence --renew` measures what they run "
            "in again"
        )


def _measure_parts(
    record: Json,
    device: Device,
    jobs: int,
    seconds: float,
    here: Json,
    say: Say,
    keep: Callable[[Json], object],
    check_time: Callable[[str, float], None],
) -> None:
    """What the record lacks, part after part."""
    done = record.setdefault("parts", [])
    parts = [(x, x.cases(device)) for x in EVIDENCE if x.name not in done]
    if not parts:
        return
    say("compiling the variants of the benchmark")
    _compile_in_parallel([case for _, cases in parts for case in cases], jobs)
    recorded = records.load_all().values()
    for part, cases in parts:
        say(f"benchmark: {SUITES[part.suite].title}, {part.regime}")
        of_case = renewal.usual_seconds(part, device, recorded) / max(len(cases), 1)
        in_time = functools.partial(check_time, f"a case of {part.name}", of_case)
        part_run.measure(record, part, cases, device, seconds, here, keep, in_time)


def add_tests(record: Json, tests: Json) -> None:
    """What :func:`~cufa.measure.gpu_tests.run_gpu_tests` found, kept with the kernels that it was found for. Raises
    ValueError where a kernel has changed since it was timed."""
    _check_kernels(record)
    record["tests"] = tests
    for name, kernel in record["kernels"].items():
        kernel["tests_passed"] = tests["passed_by_kernel"][name]


def problems_with(record: Json) -> list[str]:
    """What makes a record no evidence: failed or missing tests, NaN, kernels that were not timed."""
    found = []
    tests = record["tests"]
    if tests is None:
        found.append("the GPU tests were not run")
    elif tests["failed"] or not tests["passed"]:
        found.append(f"{tests['failed']} GPU tests failed, {tests['passed']} passed: {tests['failures'][:3]}")
    rows = rows_of(record)
    found += [
        f"{row.suite}: {row.label} gave NaN on {row.case or row.problem}"
        for row in rows
        if row.json["max_error"] is None and row.label != READ
    ]
    timed = {row.json.get("kernel") for row in rows}
    for name, kernel in record["kernels"].items():
        # Where a plan may choose among many for each case, those that no case takes are only tested.
        if "compile_seconds" in kernel and name not in timed:
            found.append(f"{name} was not timed")
        if tests and not kernel.get("tests_passed"):
            found.append(f"no GPU test ran {name}")
    return found


def _kernel_records(specs: Iterable[Kernel], device: Device, differing: Json) -> dict[str, Json]:
    """Digest of each kernel and, of those that a call may name, seconds of one compile; with the date where it is not
    the record's."""
    named = [spec for spec in specs if not OPERATIONS[spec.operation].splits]
    head_dims = [next(d for d in (128, 64, 256) if fitting_configs(spec, d, device)) for spec in named]
    timed = cold_compiles([(spec.name, d) for spec, d in zip(named, head_dims, strict=True)])
    compiled = {
        spec.name: {"compile_seconds": round(seconds, 2), "compiled": what}
        for spec, (seconds, what) in zip(named, timed, strict=True)
    }
    when = {"recorded": differing["recorded"]} if "recorded" in differing else {}
    return {
        spec.name: {
            "source": spec.source,
            "digest": records.digest(spec),
            **compiled.get(spec.name, {}),
            **when,
        }
        for spec in specs
    }


def cold_compiles(variants: Iterable[tuple[str, int]]) -> list[tuple[float, str]]:
    """Seconds that the kernel of each (name, head_dim) takes to compile, nothing cached, each alone; and of
    what. CuPy looks for its cache once, so that takes a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _use_cache, (cache,)) as alone:
            return list(alone.map(_cold_compile, variants))


def _use_cache(folder: str) -> None:
    os.environ["CUPY_CACHE_DIR"] = folder


def _cold_compile(variant: tuple[str, int]) -> tuple[float, str]:
    from ..run.cuda import backend as cuda

    spec, head_dim, device = KERNELS[variant[0]], variant[1], cuda.current_device()
    dtype = "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]
    problem = dataclasses.replace(make(1, 16, 4096, head_dim, dtype, CAUSAL), operation=spec.operation)
    plan = make_plan(problem, device, kernel=spec.name)
    start = time.perf_counter()
    cuda.prepare(plan)
    return time.perf_counter() - start, f"{dtype}, head_dim {head_dim}, causal, {plan.config}"


def _compile_in_parallel(cases: Iterable[Case], jobs: int) -> None:
    """Fill CuPy's disk cache: one process per job, as each compiles on one core."""
    wanted: dict[tuple[Problem, Contender], tuple[Contender, Problem]] = {}
    for case in cases:
        for contender in case.contenders:
            if contender.is_ours:
                wanted.setdefault((_code(case.problem_of(contender)), contender), (contender, case.problem))
    context = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's CUDA context
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile_one, wanted.values()))


def _code(problem: Problem) -> Problem:
    """What is compiled does not depend on how much there is of it."""
    return dataclasses.replace(problem, batch=1, heads=problem.group_size, kv_heads=1)


def _compile_one(job: tuple[Contender, Problem]) -> None:
    from ..run.cuda import backend as cuda

    contender, problem = job
    try:
        plan = contender.plan(problem, cuda.current_device())
    except ValueError:  # no kernel serves it here: the benchmark will say so
        return
    cuda.prepare(plan)
