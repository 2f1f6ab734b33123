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
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..core.architectures import Device
from ..core.problem import Problem
from ..kernels import KERNELS, REGISTRY, TileConfig
from ..planner import Plan, fitting_configs, make_plan
from . import decode, peers, records
from .limits import measure_limits
from .records import Json
from .regimes import Regime
from .runner import random_inputs, run_problem
from .suites import EVIDENCE, SUITES, Case, make
from .timing import Timing, host_time

TESTS_DIR = Path(__file__).parents[2] / "tests"

Say = Callable[[str], None]


def record_evidence(
    device: Device, *, jobs: int, seconds: float, with_tests: bool, say: Say, keep: Callable[[Json], object]
) -> Json:
    """Run it all on the current GPU. ``seconds`` is the measuring time of each shape. ``keep`` is given the
    record twice, with the benchmark and then with the tests: a machine may be lost in between.

    Raises FileNotFoundError when the tests are wanted and not here: an installed package has none.
    """
    if with_tests and not TESTS_DIR.is_dir():
        raise FileNotFoundError(f"the GPU tests are not in {TESTS_DIR}: run this from a checkout")
    started = time.perf_counter()
    suites = {name: list(SUITES[name].cases(device)) for name in EVIDENCE}
    say("one cold compile of each kernel")
    kernels = _kernel_records(device)
    say("compiling the variants of the benchmark")
    _compile_in_parallel([case for cases in suites.values() for case in cases], jobs)
    record: Json = {
        "schema": records.SCHEMA,
        "environment": records.environment(device),
        "flop_convention": records.FLOP_CONVENTION,
        "kernels": kernels,
        "tests": None,
        "suites": {},
    }
    say("ceilings")
    limits = measure_limits(device)
    record["limits"] = dataclasses.asdict(limits)
    for name, cases in suites.items():
        say(f"benchmark: {SUITES[name].title}")
        rows, skipped = [], []
        for seed, (problem, contenders) in enumerate(cases):
            got, missed = run_problem(problem, contenders, device, limits, seconds=seconds, seed=seed)
            rows += got
            skipped += missed
        record["suites"][name] = {
            "title": SUITES[name].title,
            "rows": [records.row_record(row) for row in rows],
            "skipped": [records.skipped_record(s) for s in skipped],
            "gpu_after": records.gpu_state(),
        }
    say("benchmark: decode")
    record["decode"] = decode_record(device, seconds)
    say("time to the first result of a new process")
    record["first_result_seconds"] = first_result_seconds()
    say("host time of a call")
    record["host_calls"] = host_calls()
    keep(record)
    if with_tests:
        record["tests"] = tests = run_gpu_tests(jobs, say)
        for name, kernel in kernels.items():
            kernel["tests_passed"] = tests["passed_by_kernel"][name]
    record["seconds"] = round(time.perf_counter() - started, 1)
    keep(record)
    return record


def decode_record(device: Device, seconds: float) -> Json:
    """Decoding: rows of all cases."""
    rows = [
        row
        for case in decode.cases()
        for row in decode.run_case(case, device, torch=not peers.FAMILIES["torch"].missing, seconds=seconds)
    ]
    return {"rows": [decode.row_record(row) for row in rows], "gpu_after": records.gpu_state()}


def problems_with(record: Json) -> list[str]:
    """What makes a record no evidence: failed or missing tests, NaN, kernels that were not timed."""
    found = []
    tests = record["tests"]
    if tests is None:
        found.append("the GPU tests were not run")
    elif tests["failed"] or not tests["passed"]:
        found.append(f"{tests['failed']} GPU tests failed, {tests['passed']} passed: {tests['failures'][:3]}")
    timed = set()
    for name, suite in record["suites"].items():
        for row in suite["rows"]:
            timed.add(row.get("kernel"))
            if row["max_error"] is None:
                found.append(f"{name}: {row['label']} gave NaN on {row['problem']}")
    found += [
        f"decode: {row['label']} gave NaN on {row['case']}"
        for row in record.get("decode", {}).get("rows", [])
        if row["max_error"] is None and row["label"] != decode.READ
    ]
    found += [f"{x} is not recorded" for x in records.runnable_kernels(record) if x not in record["kernels"]]
    for name, kernel in record["kernels"].items():
        # Of the decode kernels, cases take those that plans choose for them: the others are only tested.
        if name in KERNELS and name not in timed:
            found.append(f"{name} was not timed")
        if tests and not kernel.get("tests_passed"):
            found.append(f"no GPU test ran {name}")
    return found


def _kernel_records(device: Device) -> dict[str, Json]:
    """Digest of each kernel that this GPU runs and, of those of flash_attention, seconds of one compile."""
    served = [spec for spec in KERNELS.values() if spec.runs_on(device.arch.capability)]
    head_dims = [128 if fitting_configs(spec, 128, device) else 64 for spec in served]
    timed = cold_compiles([(spec.name, d) for spec, d in zip(served, head_dims, strict=True)])
    compiled = {
        spec.name: {"compile_seconds": round(seconds, 2), "compiled": what}
        for spec, (seconds, what) in zip(served, timed, strict=True)
    }
    return {
        spec.name: {"source": spec.source, "digest": records.digest(spec), **compiled.get(spec.name, {})}
        for spec in REGISTRY.values()
        if spec.runs_on(device.arch.capability)
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
    problem = make(1, 16, 4096, head_dim, dtype, causal=True)
    config = spec.choose(problem, fitting_configs(spec, head_dim, device), device.num_sms)
    launches = spec.launches(problem, config, spec.shared_memory(config, head_dim))
    plan = Plan(problem, spec, config, device, launches, spec.workspace(problem, config), ())
    start = time.perf_counter()
    cuda.prepare(plan)
    return time.perf_counter() - start, f"{dtype}, head_dim {head_dim}, causal, {config}"


def _compile_in_parallel(cases: Iterable[Case], jobs: int) -> None:
    """Fill CuPy's disk cache: one process a job, as each compiles on one core."""
    wanted: dict[tuple[Any, ...], tuple[Problem, str, TileConfig | None]] = {}
    for problem, contenders in cases:
        for contender in contenders:
            if not contender.is_peer:
                code = dataclasses.replace(problem, batch=1, heads=1, kv_heads=1)  # does not depend on these
                key = (code, contender.algorithm, contender.config)
                wanted[key] = (problem, contender.algorithm, contender.config)
    context = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's CUDA context
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile_one, wanted.values()))


def _compile_one(job: tuple[Problem, str, TileConfig | None]) -> None:
    from ..backends import cuda

    problem, algorithm, config = job
    try:
        plan = make_plan(problem, cuda.current_device(), algorithm, config=config)
    except ValueError:  # no kernel serves it here: the benchmark will say so
        return
    cuda.prepare(plan)


def run_gpu_tests(jobs: int, say: Say) -> Json:
    """pytest -m gpu on all cores, then what must run alone; its output goes to stderr.

    Returns passed, failed and skipped, the names of failures, and the passes by kernel, counted by the
    kernel's name in the test's parameters.
    """
    total: Json = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    by_kernel = dict.fromkeys(REGISTRY, 0)
    start = time.perf_counter()
    for expression, workers in (("gpu and not alone", jobs), ("gpu and alone", 0)):
        say(f"pytest -m '{expression}'")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "junit.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-rf", "--durations=15", "-m", expression]
            command.append(f"--junitxml={report}")
            command += ["-n", str(workers)] if workers and _importable("xdist") else []
            command += ["--ignore-glob=*dashboard*"]  # has no GPU tests, and needs packages of its own
            # The references are NumPy's; side by side, each worker's BLAS on all cores would only wait.
            env = {**os.environ, **({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} if workers else {})}
            where: dict[str, Any] = {"cwd": TESTS_DIR.parent, "stdout": sys.stderr, "env": env}
            subprocess.run([*command, str(TESTS_DIR)], check=False, **where)
            cases = list(xml.etree.ElementTree.parse(report).iter("testcase")) if report.exists() else []
        for case in cases:
            outcome = _outcome(case)
            total[outcome] += 1
            if outcome == "failed":
                total["failures"].append(case.get("name"))
            for name in _kernels_of(case.get("name", "")):
                by_kernel[name] += outcome == "passed"
    return {**total, "seconds": round(time.perf_counter() - start, 1), "passed_by_kernel": by_kernel}


def _outcome(case: xml.etree.ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def _kernels_of(test_name: str) -> list[str]:
    """Kernels named among the parameters, e.g. ``test_lengths[fa2_forward-float16-native-1-1-full]``."""
    parameters = re.search(r"\[(.*)\]$", test_name)
    return [name for name in REGISTRY if parameters and name in parameters[1].split("-")]


def host_calls() -> list[Json]:
    """Host time of one asynchronous call on a problem too small to matter, in microseconds: ours (what auto
    picks, with and without ``out=``, on other arrays at every call, FA2, and decoding), and torch's SDPA."""
    import cupy

    from .. import flash_attention, flash_decode

    problem = make(1, 8, 128, 64, "float16", causal=True)
    q, k, v = random_inputs(problem, on_gpu=True, seed=0)
    out = cupy.empty_like(q)
    token, one = q[:, :, :1].copy(), cupy.empty_like(q[:, :, :1])
    length = cupy.array([100], np.int32)
    synchronize = cupy.cuda.get_current_stream().synchronize
    # A kernel that takes tensor maps encodes them anew when the arrays are not those of the last call.
    others = itertools.cycle([random_inputs(problem, on_gpu=True, seed=seed) for seed in range(1, 5)])
    calls: dict[str, Callable[[], Any]] = {
        "flash_attention(q, k, v, causal=True)": lambda: flash_attention(q, k, v, causal=True),
        "flash_attention(q, k, v, causal=True, out=out)": lambda: flash_attention(
            q, k, v, causal=True, out=out
        ),
        "flash_attention(*next(others), causal=True)": lambda: flash_attention(*next(others), causal=True),
        "flash_attention(q, k, v, causal=True, algorithm='fa2')": lambda: flash_attention(
            q, k, v, causal=True, algorithm="fa2"
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


def _importable(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def default_jobs() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def timing_of(row: Json) -> Timing:
    """The samples of a recorded row, in seconds. (Rows that name no regime are older than the second one.)"""
    return Timing(tuple(np.array(row["samples_ns"]) * 1e-9), Regime(row.get("regime", Regime.IN_TURNS)))
