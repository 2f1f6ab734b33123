"""Promised limits of the package's times, measured one after another: ``make bench-promises``.

Run it on an idle machine. Tests have no such limits, because they would fail on a busy machine.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.calls.backward import flash_attention_backward
from cufa.calls.forward import flash_attention
from cufa.measure import peers
from cufa.measure.cases import Case, Contender
from cufa.measure.decode_cases import make_decode
from cufa.measure.limits import Limits
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.problem.problem import default_scale

from . import host_times


@dataclasses.dataclass(frozen=True)
class Promise:
    what: str
    at_most: float
    unit: str
    measure: Callable[[], float]


def promises(on_gpu: bool) -> list[Promise]:
    found = [
        Promise("import cufa, beyond the interpreter's own start (its thread)", 0.3, "s", import_seconds),
        Promise(f"the CPU path, over naive NumPy, {_SHAPE}", 1.0, "", lambda: _over_numpy(causal=False)),
        Promise(f"the same, causal, {_SHAPE}", 1.0, "", lambda: _over_numpy(causal=True)),
        Promise(f"causal, over the same without a mask, {_SHAPE}", 0.75, "", _causal_over_full),
        Promise(f"its gradients, over naive NumPy's, causal, {_GRADIENT_SHAPE}", 0.5, "", _gradients_over_numpy),
    ]  # fmt: skip
    return found + (_gpu_promises() if on_gpu else [])


def _gpu_promises() -> list[Promise]:
    first_result = functools.cache(host_times.first_result_seconds)
    calls = functools.cache(lambda: {call["call"]: call["p50_us"] for call in host_times.host_calls()})

    def cold_compile() -> float:
        return max(host_times.cold_compiles([("fa3_forward", d) for d in (64, 128, 256)]))[0]

    found = [
        Promise("the first result of a new process, nothing compiled", 10, "s", lambda: first_result()["cold"]),
        Promise("the first result of a new process, compiled before", 2, "s", lambda: first_result()["warm"]),
        Promise(
            "the host's part of flash_decode", 15, "µs",
            lambda: calls()["flash_decode(q, k, v, cache_seqlens=n, out=out)"],
        ),
        Promise("one regime over the other, where power does not matter", 2, "", _regimes_apart),
    ]  # fmt: skip
    if _is_hopper():
        found.append(
            Promise("one compile of fa3_forward, the longest of three head dims", 3, "s", cold_compile)
        )
    if _is_hopper() and not peers.FAMILIES["torch"].missing:
        what = "the host's part of flash_attention, over torch cudnn's"
        ours = "flash_attention(q, k, v, causal=True)"
        found.append(Promise(what, 1, "", lambda: calls()[ours] / calls()["torch cudnn"]))
    return found


def _regimes_apart() -> float:
    """Ratio of decode times in the two regimes, expected near 1: decode is memory-bound, and its inputs exceed L2."""
    from cufa.run.cuda import backend as cuda

    case = Case(make_decode(1, 32, 8, 8 << 10), (Contender(),))
    limits = Limits(1e12, {"bfloat16": 1e15}, 1e12)
    device = cuda.current_device()
    rows = [run_case(case, device, limits, regime=regime, seconds=0.5)[0][0] for regime in Regime]
    return max(row.seconds for row in rows) / min(row.seconds for row in rows)


def _is_hopper() -> bool:
    from cufa.run.cuda import backend as cuda

    return cuda.current_device().arch.capability == 90


# --- On the CPU -------------------------------------------------------------------------------------------

_SEQLEN = 4096
_SHAPE = f"8 heads × {_SEQLEN}, d64, float32"
_GRADIENT_SEQLEN = 2048
_GRADIENT_SHAPE = f"8 heads × {_GRADIENT_SEQLEN}, d64, float32"
_ROUNDS = 5


def import_seconds() -> float:
    """Processor time of the importing thread. NumPy's BLAS starts a thread for each core, up to 64, and each
    waits busily for 29 ms: on 64 cores 1.8 s of the process's time."""
    code = "import time; t = time.thread_time(); import cufa; print(time.thread_time() - t)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(_ROUNDS))


def naive_numpy(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention as a NumPy user would write it."""
    s = (q @ k.swapaxes(-1, -2)) * np.float32(default_scale(q.shape[-1]))
    if causal:
        s = np.where(np.tri(*s.shape[-2:]) > 0, s, np.float32(-np.inf))
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ v


def _over_numpy(causal: bool) -> float:
    return _seconds(flash_attention, causal) / _seconds(naive_numpy, causal)


def _causal_over_full() -> float:
    return _seconds(flash_attention, True) / _seconds(flash_attention, False)


@functools.cache
def _seconds(attention: Callable[..., Any], causal: bool) -> float:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, _SEQLEN, 64), np.float32)
    return _fastest(lambda: attention(q, k, v, causal=causal))


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some rounds: other work on the machine only adds time."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(_ROUNDS))


def naive_numpy_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
    """(dq, dk, dv) as a NumPy user would write them."""
    scale = np.float32(default_scale(q.shape[-1]))
    s = (q @ k.swapaxes(-1, -2)) * scale
    if causal:
        s = np.where(np.tri(*s.shape[-2:]) > 0, s, np.float32(-np.inf))
    p = np.exp(s - lse[..., None])
    ds = p * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(axis=-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def _gradients_over_numpy() -> float:
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 8, _GRADIENT_SEQLEN, 64), np.float32)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True, device="cpu")
    arrays = dout, q, k, v, out, lse
    ours = _fastest(lambda: flash_attention_backward(*arrays, causal=True, device="cpu"))
    return ours / _fastest(lambda: naive_numpy_backward(*arrays, causal=True))


def main(found: list[Promise]) -> int:
    """Measure and print each promise. Returns 1 if a promise is broken, else 0."""
    broken = 0
    for promise in found:
        measured = promise.measure()
        kept = measured <= promise.at_most
        unit = f" {promise.unit}" if promise.unit else ""
        word = "kept" if kept else "BROKEN"
        print(f"{word:6}  {measured:8.3g} of {promise.at_most:g}{unit:3}  {promise.what}", flush=True)
        broken += not kept
    return int(broken > 0)


if __name__ == "__main__":
    from cufa.calls.dispatch import gpu_available

    sys.exit(main(promises(on_gpu=gpu_available())))
