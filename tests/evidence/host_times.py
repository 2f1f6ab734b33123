"""Costs of a call before its kernel runs: host time, first result of a new process, and compilation."""

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
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cufa.kernels import KERNELS, Kernel
from cufa.measure import peers
from cufa.measure.inputs import Inputs
from cufa.measure.peers import sdpa, tensors
from cufa.measure.quantized import Quantized
from cufa.measure.suites import make
from cufa.measure.timing import Run, Timing
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem import float8
from cufa.problem.mask import CAUSAL

Json = dict[str, Any]

#: A problem so small that the kernel takes less time than the call on the host.
_SMALL = make(1, 8, 128, 64, "float16", CAUSAL)


#: Python code by label, with the names of :func:`host_calls`; "": the label is the code.
_CALLS = {
    "flash_attention(q, k, v, causal=True)": "",
    "flash_attention(q, k, v, causal=True, out=out)": "",
    # With other arrays than in the previous call, a kernel's tensor maps must be encoded again.
    "flash_attention(*next(others), causal=True)": "",
    "flash_attention(q, k, v, causal=True, algorithm='fa2')": "",
    "flash_attention_backward(dout, q, k, v, out, lse, causal=True)": "",
    "flash_decode(q, k, v, cache_seqlens=n, out=out)": "flash_decode(token, k, v, cache_seqlens=n, out=one)",
    "masks.documents(lengths), 64 of them": "masks.documents(lengths)",
    "masks.documents(lengths, seqlen=8192), on the GPU": "masks.documents(on_gpu, seqlen=8192)",
}


def host_calls() -> list[Json]:
    """Host time of one asynchronous call on a small problem, in microseconds: of each of :data:`_CALLS`, and of torch's
    SDPA if torch is installed."""
    import cupy

    from cufa import flash_attention, flash_attention_backward, flash_decode, masks

    def inputs(seed: int) -> list[Any]:
        arrays = Inputs(_SMALL, on_gpu=True, seed=seed).arrays(_SMALL)
        return [arrays[name] for name in "qkv"]

    q, k, v = inputs(0)
    out = cupy.empty_like(q)
    lse = flash_attention(q, k, v, causal=True, return_lse=True, out=out)[1]
    token, lengths = q[:, :, :1].copy(), np.full(64, 128, np.int32)
    names = {
        "flash_attention": flash_attention, "flash_attention_backward": flash_attention_backward,
        "flash_decode": flash_decode, "masks": masks, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out,
        "token": token, "one": cupy.empty_like(token), "n": cupy.array([100], "int32"), "lengths": lengths,
        "on_gpu": cupy.asarray(lengths), "others": itertools.cycle([inputs(seed) for seed in range(1, 5)]),
    }  # fmt: skip
    synchronize = cupy.cuda.get_current_stream().synchronize
    calls = {label: eval(f"lambda: {code or label}", names) for label, code in _CALLS.items()}
    found = [(label, host_time(call, synchronize)) for label, call in calls.items()]
    if not peers.FAMILIES["torch"].missing:
        found += _torch_times(q, k, v, synchronize)
    return [
        {"call": label, **{f"p{p}_us": round(getattr(timing, f"p{p}") * 1e6, 2) for p in (10, 50, 90)}}
        for label, timing in found
    ]


def host_time(call: Run, synchronize: Run, calls: int = 2000, batch: int = 50) -> Timing:
    """Host seconds of one asynchronous call. The queue is drained between batches, so that a full launch queue never
    blocks the host. One sample per batch."""
    for _ in range(batch):
        call()
    samples: list[float] = []
    for _ in range(max(1, calls // batch)):
        synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - start) / batch)
    synchronize()
    return Timing(tuple(samples))


def _torch_times(q: Any, k: Any, v: Any, synchronize: Run) -> list[tuple[str, Timing]]:
    """Host time of a bare SDPA call, for each backend that serves the small problem, chosen outside."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arguments = [tensors.to_torch(x) for x in (q, k, v)]
    attention = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        *arguments,
        **sdpa.mask_options("torch flash", _SMALL),
    )
    found = []
    for name, backend in sdpa.BACKENDS.items():
        with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
            try:
                found.append((name, host_time(attention, synchronize)))
            except RuntimeError:
                continue
    return found


_FIRST_RESULT = """
import cupy, numpy, cufa
q = cupy.asarray(numpy.ones((1, 8, 1024, 128), numpy.float16))
cufa.flash_attention(q, q, q, causal=True)
cupy.cuda.get_current_stream().synchronize()
"""


def first_result_seconds() -> dict[str, float]:
    """Wall time of a process that imports CuPy and cufa and waits for one result: first without a kernel cache (cold),
    then with the cache of the first process (warm)."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONPATH": root}
        for state in ("cold", "warm"):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", _FIRST_RESULT], env=environment, check=True)
            seconds[state] = round(time.perf_counter() - start, 2)
    return seconds


def compile_lines(specs: Iterable[Kernel]) -> list[Json]:
    """Seconds of one cold compilation of each kernel of forward and backward."""
    from cufa.run.cuda import backend as cuda

    device = cuda.current_device()
    named = [spec for spec in specs if not OPERATIONS[spec.operation].split_selects_kernel]
    head_dims = [next(d for d in (128, 64, 256) if fitting_configs(spec, d, device)) for spec in named]
    timed = cold_compiles([(spec.name, d) for spec, d in zip(named, head_dims, strict=True)])
    return [
        {"what": "compile", "kernel": spec.name, "seconds": round(seconds, 2), "of": what}
        for spec, (seconds, what) in zip(named, timed, strict=True)
    ]


def cold_compiles(variants: Iterable[tuple[str, int]]) -> list[tuple[float, str]]:
    """(seconds, description of the build) of a cold compilation for each (kernel name, head_dim), one at a time. Runs
    in a new process, because CuPy reads the path of its cache only once."""
    with tempfile.TemporaryDirectory() as cache:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _use_cache, (cache,)) as alone:
            return list(alone.map(_cold_compile, variants))


def _use_cache(folder: str) -> None:
    os.environ["CUPY_CACHE_DIR"] = folder


def _cold_compile(variant: tuple[str, int]) -> tuple[float, str]:
    from cufa.run.cuda import backend as cuda

    spec, head_dim, device = KERNELS[variant[0]], variant[1], cuda.current_device()
    dtype = "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]
    problem = make(1, 16, 4096, head_dim, "bfloat16" if dtype == float8.NAME else dtype, CAUSAL)
    problem = Quantized().problem(problem) if dtype == float8.NAME else problem
    problem = dataclasses.replace(problem, operation=spec.operation)
    plan = make_plan(problem, device, kernel=spec.name)
    start = time.perf_counter()
    cuda.prepare(plan)
    return time.perf_counter() - start, f"{dtype}, head_dim {head_dim}, causal, {plan.config}"
