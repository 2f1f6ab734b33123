"""What a call costs before its kernel runs: host time of one call, and the first result of a new process."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..gpu.architectures import Device
from ..plan import tuning
from ..plan.planner import make_plan
from ..problem.mask import CAUSAL
from . import peers
from .backward_cases import of_forward
from .decode_cases import make_decode
from .inputs import Inputs
from .records import Json
from .suites import make
from .timing import host_time

#: Too small a problem for its kernel to matter.
_SMALL = make(1, 8, 128, 64, "float16", CAUSAL)
_TOKEN = make_decode(1, 8, 8, 128, head_dim=64, dtype="float16", lengths_given=True)
#: Of the process whose first result is waited for.
_FIRST = make(1, 8, 1024, 128, "float16", CAUSAL)


def kernels(device: Device) -> set[str]:
    """Names of the kernels whose calls are timed here."""
    return {plan.spec.name for plan in _plans(device)}


def _plans(device: Device) -> Iterator[Any]:
    fastest = tuning.fastest_kernels(device.name)
    yield from (make_plan(x, device, fastest=fastest) for x in (_SMALL, of_forward(_SMALL), _TOKEN, _FIRST))
    yield make_plan(_SMALL, device, "fa2")


def host_calls() -> list[Json]:
    """Host time of one asynchronous call on a problem too small to matter, in microseconds: ours (what auto
    picks, with and without ``out=``, on other arrays at every call, FA2, the backward, and decoding), and torch's
    SDPA; and what it takes to make a mask of 64 documents, of lengths here and on the GPU."""
    import cupy

    from .. import flash_attention, flash_attention_backward, flash_decode, masks

    problem = _SMALL

    def inputs(seed: int) -> list[Any]:
        arrays = Inputs(problem, on_gpu=True, seed=seed).arrays(problem)
        return [arrays[name] for name in "qkv"]

    q, k, v = inputs(0)
    out = cupy.empty_like(q)
    lse = flash_attention(q, k, v, causal=True, return_lse=True, out=out)[1]
    token, one = q[:, :, :1].copy(), cupy.empty_like(q[:, :, :1])
    length = cupy.array([100], "int32")
    documents = np.full(64, 128, np.int32)
    on_gpu, tokens = cupy.asarray(documents), int(documents.sum())
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
        "masks.documents(lengths), 64 of them": lambda: masks.documents(documents),
        "masks.documents(lengths, seqlen=8192), on the GPU": lambda: masks.documents(on_gpu, seqlen=tokens),
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
