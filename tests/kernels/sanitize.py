"""Every kernel over small shapes under compute-sanitizer, one line a kernel and tool: `make sanitize`.

    python tests/kernels/sanitize.py [KERNEL ...]

Each kernel first runs by itself, which compiles it and checks its results; then once under each tool. Its
cases are a process of their own (`--cases`), in which CuPy's memory pool is off: an access past the end of an
array would land in the pool's allocation and pass.

Exit status: 0 nothing found, 1 a finding or a wrong result, 3 no compute-sanitizer or no GPU for it.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from support import DTYPES, forward_operands

import cufa
from cufa.kernels import KERNELS, Kernel
from cufa.plan.planner import Plan, fitting_configs, make_plan
from cufa.problem.mask import CAUSAL, FULL
from cufa.problem.problem import Problem, default_scale
from cufa.run.cpu.blas import usable_cores

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 80
"""Of one process; the longest takes a few, and what hangs must not take the machine with it."""

#: (queries, keys): shorter than a tile, over its end, several tiles, queries that see no key.
LENGTHS = ((1, 1), (33, 150), (200, 130))
TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-4, "tf32": 1e-2}


def tools(spec: Kernel) -> tuple[str, ...]:
    """racecheck takes what arrives by cp.async.bulk for unordered: it does not follow barriers in shared
    memory (mbarrier) that are reached by PTX. The CPU's executor of kernels does, see test_emulate_fa3.py."""
    # fa1: where groups of warps meet at barriers of their own, it reports stores and loads of one buffer that
    # block_sync() separates (CUDA 13.0; K's zero padding and the loads after it, for one). The executor's own
    # detector follows both kinds of barrier, and finds any of them when it is taken out.
    misled = spec.uses_copy_engine or spec.algorithm == "fa1"
    return tuple(tool for tool in TOOLS if tool != "racecheck" or not misled)


# --- One kernel's cases, in a process under a tool --------------------------------------------------------


def run_cases(name: str) -> int:
    """Launches whose result is wrong, each told."""
    import cupy

    cupy.cuda.set_allocator(None)
    spec = KERNELS[name]
    outcomes = list(CASES[spec.operation](spec))
    for outcome in filter(None, outcomes):
        print(f"WRONG {name}: {outcome}")
    print(f"{len(outcomes)} launches")
    return sum(map(bool, outcomes))


def _forward(spec: Kernel) -> Iterator[str]:
    """What is wrong with each launch; "" for nothing. Inputs come from the host, so that the tools have no
    kernels to look at but these."""
    import cupy

    from cufa.run.cuda import backend as cuda

    plans = list(_plans(spec))
    with ThreadPoolExecutor(usable_cores()) as pool:
        prepared = list(pool.map(cuda.prepare, plans))
    rng = np.random.default_rng(0)
    for plan, ready in zip(plans, prepared, strict=True):
        p = plan.problem
        dtype = DTYPES[p.dtype]
        host = [rng.standard_normal(shape).astype(dtype) for shape in p.shapes[:3]]
        given = {n: cupy.asarray(x) for n, x in forward_operands(*host).items()}
        cuda.Binding(ready, given).launch(cuda.addresses(given))
        out, lse = given["out"], given["lse"]
        expected, expected_lse = cufa.attention_reference(*host, mask=p.mask, return_lse=True)
        tolerance = TOLERANCE["tf32" if p.precision == "tf32" else p.dtype]
        error = np.abs(out.get().astype(np.float64) - expected).max()
        close = np.allclose(lse.get(), expected_lse, rtol=1e-5, atol=tolerance)
        right = error <= tolerance and close
        yield "" if right else f"{p}, {plan.config}: error {error:.1e}, LSE {'right' if close else 'wrong'}"


def _plans(spec: Kernel) -> Iterator[Plan]:
    from cufa.run.cuda import backend as cuda

    device = cuda.current_device()
    for dtype in spec.dtypes:
        for precision in spec.precisions:
            if (dtype == "float32") == (precision == "native"):
                continue
            for head_dim, mask in ((64, CAUSAL), (40, FULL), (256, CAUSAL)):
                fitting = fitting_configs(spec, head_dim, device)
                for config in dict.fromkeys((*fitting[:1], *fitting[-1:])):
                    for seqlen_q, seqlen_k in LENGTHS if head_dim == 64 else LENGTHS[1:2]:
                        problem = Problem(
                            1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype, mask, default_scale(head_dim),
                            precision=precision, operation=spec.operation,
                        )  # fmt: skip
                        yield make_plan(problem, device, spec.algorithm, config=config)


def _decode(spec: Kernel) -> Iterator[str]:
    import cupy
    from decode_kernel_support import configs, operands_of, plan_of
    from decode_support import make_case

    from cufa.run.cuda import backend as cuda

    device = cuda.current_device()
    fp8 = "float8_e4m3" in spec.k_dtypes
    for dtype in spec.dtypes:
        # One new token in a contiguous cache; two, appended to pages, and more rows than the least tile has.
        for rows in ({"heads": 4}, {"heads": 40, "tokens": 2, "new": 2, "page_size": 64}):
            case = make_case([150, 2, 33, 400], head_dim=128, dtype=dtype, fp8=fp8, capacity=448, **rows)
            fitting = configs(spec.name, 128, device)
            for config in dict.fromkeys((fitting[0], fitting[-1])):
                plan = plan_of(case, spec.name, 3, config, device)
                operands = operands_of(case, cupy.asarray)
                cuda.run(plan, operands)
                try:
                    case.check(operands["out"].get(), operands["lse"].get())
                    yield ""
                except AssertionError as error:
                    yield f"{plan.problem}, {config}: {str(error).strip().splitlines()[0]}"


def _backward(spec: Kernel) -> Iterator[str]:
    """Each plan in both modes of determinism."""
    import cupy
    from backward_support import NAMES, assert_gradients, make_case

    from cufa.run.cuda import backend as cuda

    both = [(plan, deterministic) for plan in _plans(spec) for deterministic in (False, True)]
    device = cuda.current_device()
    plans = [
        make_plan(dataclasses.replace(plan.problem, deterministic=x), device, spec.algorithm, plan.config)
        for plan, x in both
    ]
    with ThreadPoolExecutor(usable_cores()) as pool:
        prepared = list(pool.map(cuda.prepare, plans))
    for plan, ready in zip(plans, prepared, strict=True):
        p = plan.problem
        case = make_case(
            *p.shapes[0][:2], p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.dtype, mask=p.mask
        )
        given = {x.name: None for x in plan.operation.operands}
        given |= {n: cupy.asarray(getattr(case, n)) for n in ("dout", "q", "k", "v", "out", "lse")}
        given |= {n: cupy.empty_like(given[n[1:]]) for n in NAMES}
        cuda.Binding(ready, given).launch(cuda.addresses(given))
        try:
            assert_gradients([given[n].get() for n in NAMES], case, p.precision)
            yield ""
        except AssertionError as error:
            yield f"{p}, {plan.config}: {str(error).strip().splitlines()[0]}"


CASES = {"forward": _forward, "decode": _decode, "backward": _backward}


# --- All kernels under all tools --------------------------------------------------------------------------


def find_sanitizer() -> str | None:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += sorted(glob.glob("/usr/local/cuda-*"), reverse=True)
    folders = [os.environ.get("PATH", ""), *(f"{root}/bin" for root in roots if root)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def check(sanitizer: str, name: str, tool: str) -> tuple[bool, str]:
    """(passed, what to print) of one kernel under one tool; "plain": under none."""
    command = [sys.executable, __file__, "--cases", name]
    if tool != "plain":
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *command]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"{name:20} {tool:10} did not end within {SECONDS} s"
    seconds = time.perf_counter() - start
    # Warnings, racecheck's word for writes after reads that only __syncwarp separates, are shown and pass.
    only_warnings = tool == "racecheck" and re.search(r"\(0 errors, \d+ warnings?\)", done.stdout)
    passed = done.returncode == 0 or (done.returncode == 9 and bool(only_warnings))
    said = re.findall(r"^\d+ launches$|(?<=SUMMARY: ).*", done.stdout, re.MULTILINE)
    verdict = ", ".join(said) or f"exit status {done.returncode}, nothing said"
    line = f"{name:20} {tool:10} {seconds:5.1f} s  {'ok    ' if passed else 'FAILED'}  {verdict}"
    return passed, line if passed else f"{line}\n{_excerpt(done.stdout)}"


def _excerpt(output: str, most: int = 40) -> str:
    """The first findings, and the last words of a process that broke."""
    lines = output.splitlines()
    shown = lines if len(lines) <= most else [*lines[: most // 2], "…", *lines[-most // 2 :]]
    return "\n".join(f"    {line}" for line in shown)


def main() -> int:
    match sys.argv[1:]:
        case ["--cases", name]:
            return int(run_cases(name) > 0)
        case names:
            pass
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        sys.exit(f"no kernel is called {unknown[0]}; there are {', '.join(KERNELS)}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "compute-sanitizer was not found. Fix: install the CUDA toolkit, or set CUDA_HOME to where it is"
        )
        return 3
    from cufa.run.cuda import backend as cuda

    if not cuda.device_count():
        print("CuPy sees no NVIDIA GPU")
        return 3
    capability = cuda.current_device().arch.capability
    specs = [KERNELS[name] for name in names or KERNELS if KERNELS[name].runs_on(capability)]
    probe = subprocess.run(
        [sanitizer, sys.executable, "-c", "import cupy; cupy.zeros(1)"], capture_output=True, text=True
    )
    if "not supported" in probe.stdout + probe.stderr:
        print("compute-sanitizer cannot look into this GPU:\n" + _excerpt(probe.stdout + probe.stderr))
        return 3
    start = time.perf_counter()
    failed = total = 0
    # A process takes its time mostly on a CPU: to start, to compile, to patch the kernels.
    with ThreadPoolExecutor(max(1, usable_cores() * 2 // 3)) as pool:
        # The plain runs come first, all of them: they leave the compiled kernels on disk for the others.
        for jobs in (
            [(spec.name, "plain") for spec in specs],
            [(spec.name, tool) for tool in TOOLS for spec in specs if tool in tools(spec)],
        ):
            for passed, line in pool.map(lambda job: check(sanitizer, *job), jobs):
                print(line, flush=True)
                failed += not passed
                total += 1
            if failed:
                break
    print(f"{total} runs over {len(specs)} kernels in {time.perf_counter() - start:.0f} s: {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
