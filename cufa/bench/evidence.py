"""Everything that a machine with a GPU can show and CI cannot: GPU tests and benchmarks, in one record.

Order matters: one cold compile of each kernel alone, then the variants of the benchmark side by side (their
times are not recorded), then, with the machine quiet, the benchmark, and last the tests on all cores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ..core.architectures import Device
from ..core.mask import CAUSAL
from ..core.operation import OPERATIONS
from ..core.problem import Problem
from ..kernels import KERNELS
from ..planner import fitting_configs, make_plan
from . import peers, records
from .cases import READ, Case, Contender
from .gpu_tests import Say, check_tests_are_here, run_gpu_tests
from .inputs import Inputs
from .limits import Limits, measure_limits
from .recorded import rows_of
from .records import Json
from .regimes import Regime
from .runner import run_case
from .suites import EVIDENCE, SUITES, Part, make
from .timing import host_time


def record_evidence(
    device: Device,
    *,
    jobs: int,
    seconds: float,
    with_tests: bool,
    say: Say,
    keep: Callable[[Json], object],
    begun: Json | None = None,
) -> Json:
    """Run it all on the current GPU. ``seconds`` is the measuring time of each case where contenders take
    turns. ``keep`` is given the record after every part: a machine may be lost in between, and ``begun`` is then
    the record that goes on with what it lacks.

    Raises FileNotFoundError when the tests are wanted and not here (an installed package has none), and ValueError
    when ``begun`` is of another GPU or of kernels that changed since.
    """
    if with_tests:
        check_tests_are_here()
    started = time.perf_counter()
    record = begun or _new_record(device, say)
    if begun:
        _check_goes_on(begun, device)
    done = record.setdefault("parts", [])
    parts = [(x, list(SUITES[x.suite].cases(device))) for x in EVIDENCE if x.name not in done]
    say("compiling the variants of the benchmark")
    _compile_in_parallel([case for _, cases in parts for case in cases], jobs)
    limits = Limits(**record["limits"])
    for part, cases in parts:
        say(f"benchmark: {SUITES[part.suite].title}, {part.regime}")
        _measure(record["suites"], part, cases, device, limits, seconds)
        done.append(part.name)
        keep(record)
    if "host_calls" not in record:
        say("time to the first result of a new process")
        record["first_result_seconds"] = first_result_seconds()
        say("host time of a call")
        record["host_calls"] = host_calls()
        keep(record)
    if with_tests:
        add_tests(record, run_gpu_tests(jobs, say, every_case=True))
    record["seconds"] = round(record.get("seconds", 0.0) + time.perf_counter() - started, 1)
    keep(record)
    return record


def _new_record(device: Device, say: Say) -> Json:
    """With the kernels and the ceilings of this GPU, and nothing measured yet."""
    say("one cold compile of each kernel")
    kernels = _kernel_records(device)
    say("ceilings")
    return {
        "schema": records.SCHEMA,
        "environment": records.environment(device),
        "flop_convention": records.FLOP_CONVENTION,
        "kernels": kernels,
        "tests": None,
        "suites": {},
        "limits": dataclasses.asdict(measure_limits(device)),
    }


def _check_goes_on(begun: Json, device: Device) -> None:
    if begun["environment"]["device"] != device.name:
        raise ValueError(f"the record is of {begun['environment']['device']}, this GPU is {device.name}")
    _check_kernels(begun)


def _check_kernels(record: Json) -> None:
    stale = records.stale_kernels(record)
    if stale:
        raise ValueError(f"{', '.join(stale)} changed since the record was made; record anew")


def add_tests(record: Json, tests: Json) -> None:
    """What :func:`~cufa.bench.gpu_tests.run_gpu_tests` found, kept with the kernels that it was found for. Raises
    ValueError where a kernel has changed since it was timed."""
    _check_kernels(record)
    record["tests"] = tests
    for name, kernel in record["kernels"].items():
        kernel["tests_passed"] = tests["passed_by_kernel"][name]


def _measure(
    suites: Json, part: Part, cases: Iterable[Case], device: Device, limits: Limits, seconds: float
) -> None:
    """Add the rows of one part to the section of the record that it is kept in."""
    if part.seconds is not None or part.regime is not Regime.IN_TURNS:
        seconds = part.seconds or part.regime.seconds
    title = SUITES[part.kept_in].title
    section = suites.setdefault(part.kept_in, {"title": title, "rows": [], "skipped": []})
    for seed, case in enumerate(cases):
        rows, skipped = run_case(case, device, limits, regime=part.regime, seconds=seconds, seed=seed)
        section["rows"] += [records.row_record(row) for row in rows]
        section["skipped"] += [records.skipped_record(s) for s in skipped]
    section["gpu_after"] = records.gpu_state()


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
    found += [f"{x} is not recorded" for x in records.runnable_kernels(record) if x not in record["kernels"]]
    for name, kernel in record["kernels"].items():
        # Where a plan may choose among many for each case, those that no case takes are only tested.
        if "compile_seconds" in kernel and name not in timed:
            found.append(f"{name} was not timed")
        if tests and not kernel.get("tests_passed"):
            found.append(f"no GPU test ran {name}")
    return found


def _kernel_records(device: Device) -> dict[str, Json]:
    """Digest of each kernel that this GPU runs and, of those that a call may name, seconds of one compile."""
    served = [spec for spec in KERNELS.values() if spec.runs_on(device.arch.capability)]
    named = [spec for spec in served if not OPERATIONS[spec.operation].splits]
    head_dims = [128 if fitting_configs(spec, 128, device) else 64 for spec in named]
    timed = cold_compiles([(spec.name, d) for spec, d in zip(named, head_dims, strict=True)])
    compiled = {
        spec.name: {"compile_seconds": round(seconds, 2), "compiled": what}
        for spec, (seconds, what) in zip(named, timed, strict=True)
    }
    return {
        spec.name: {"source": spec.source, "digest": records.digest(spec), **compiled.get(spec.name, {})}
        for spec in served
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
    from ..backends import cuda

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
    from ..backends import cuda

    contender, problem = job
    try:
        plan = contender.plan(problem, cuda.current_device())
    except ValueError:  # no kernel serves it here: the benchmark will say so
        return
    cuda.prepare(plan)


def host_calls() -> list[Json]:
    """Host time of one asynchronous call on a problem too small to matter, in microseconds: ours (what auto
    picks, with and without ``out=``, on other arrays at every call, FA2, the backward, and decoding), and torch's
    SDPA."""
    import cupy

    from .. import flash_attention, flash_attention_backward, flash_decode

    problem = make(1, 8, 128, 64, "float16", CAUSAL)

    def inputs(seed: int) -> list[Any]:
        arrays = Inputs(problem, on_gpu=True, seed=seed).arrays(problem)
        return [arrays[name] for name in "qkv"]

    q, k, v = inputs(0)
    out = cupy.empty_like(q)
    lse = flash_attention(q, k, v, causal=True, return_lse=True, out=out)[1]
    token, one = q[:, :, :1].copy(), cupy.empty_like(q[:, :, :1])
    length = cupy.array([100], "int32")
    synchronize = cupy.cuda.get_current_stream().synchronize
    # A kernel that takes tensor maps encodes them anew when the arrays are not those of the last call.
    others = itertools.cycle([inputs(seed) for seed in range(1, 5)])
    calls: dict[str, Callable[[], Any]] = {
        "flash_attention(q, k, v, causal=True)": lambda: flash_attention(q, k, v, causal=True),
        "flash_attention(q, k, v, causal=True, out=out)": lambda: flash_attention(
            q, k, v, causal=True, out=out
        ),
        "flash_attention(*next(others), causal=True)": lambda: flash_attention(*next(others), causal=True),
        "flash_attention(q, k, v, causal=True, algorithm='fa2')": lambda: flash_attention(
            q, k, v, causal=True, algorithm="fa2"
        ),
        "flash_attention_backward(dout, q, k, v, out, lse, causal=True)": lambda: flash_attention_backward(
            out, q, k, v, out, lse, causal=True
        ),
        "flash_decode(q, k, v, cache_seqlens=n, out=out)": lambda: flash_decode(
            token, k, v, cache_seqlens=length, out=one
        ),
    }
    found = [(label, host_time(call, synchronize)) for label, call in calls.items()]
    if not peers.FAMILIES["torch"].missing:
        found += peers.torch_host_times(
            problem, q, k, v, functools.partial(host_time, synchronize=synchronize)
        )
    return [
        {"call": label, **{f"p{p}_us": round(timing.percentile(p) * 1e6, 2) for p in (10, 50, 90)}}
        for label, timing in found
    ]


_FIRST_RESULT = """
import cupy, numpy, cufa
q = cupy.asarray(numpy.ones((1, 8, 1024, 128), numpy.float16))
cufa.flash_attention(q, q, q, causal=True)
cupy.cuda.get_current_stream().synchronize()
"""


def first_result_seconds() -> dict[str, float]:
    """Wall time of a process that imports CuPy and cufa and waits for one result: with no kernel cache
    (cold), then with the one that this left (warm)."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONPATH": root}
        for state in ("cold", "warm"):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", _FIRST_RESULT], env=environment, check=True)
            seconds[state] = round(time.perf_counter() - start, 2)
    return seconds
