"""Run the tests that need a GPU on all cores, for `make gpu-test` and for recording."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cufa.kernels import KERNELS
from cufa.problem.checks import importable
from cufa.run.cpu.blas import usable_cores

TESTS_DIR = Path(__file__).parents[1]

Json = dict[str, Any]
Say = Callable[[str], None]


def run_gpu_tests(jobs: int, say: Say, every_case: bool) -> Json:
    """Run pytest -m gpu on all cores, then the tests that must run alone. Output goes to stderr.

    ``every_case``: all cases of tests with many cases, instead of the day's sample. Returns the counts of passed,
    failed and skipped tests, the names of failures, whether every case ran, and the passes of each kernel that is named
    in a test's parameters.
    """
    total: Json = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "every_case": every_case}
    by_kernel = dict.fromkeys(KERNELS, 0)
    start = time.perf_counter()
    for expression, workers in (("gpu and not alone", jobs), ("gpu and alone", 0)):
        say(f"pytest -m '{expression}'")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "junit.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-rf", "--durations=15", "-m", expression]
            command.append(f"--junitxml={report}")
            command += ["-n", str(workers)] if workers and importable("xdist") else []
            command += ["--every-case"] if every_case else []
            command += ["--ignore-glob=*dashboard*"]  # the dashboard's packages are not installed
            # References run in NumPy. If each worker's BLAS used all cores, the workers would compete for cores.
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
    return [name for name in KERNELS if parameters and name in parameters[1].split("-")]


def default_jobs() -> int:
    return min(16, usable_cores())
