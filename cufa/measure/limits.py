"""Measured ceilings of this machine. Rows of the benchmark state their share of a ceiling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.compiler import cupy_options, translation_unit
from ..gpu.architectures import Device
from ..problem.float8 import NAME as E4M3
from ..problem.problem import Problem
from .cases import Work
from .measuring import time_of
from .timing import Run, Timing

_COPY_BYTES = 1 << 30
_THREADS, _BLOCKS_PER_SM, _ITERATIONS = 256, 2, 1 << 13
_SOURCE = "limits/tensor_cores.cu"
#: One iteration of that source: mma.sync products per warp, exponentials per thread.
_PRODUCTS, _CHAINS = 16, 16
_FLOPS_A_PRODUCT = {"float16": 4096, "bfloat16": 4096, "tf32": 2048}
#: cuda_src/limits/wgmma.cu: floating-point operations of a warpgroup in one iteration, bytes of operand B.
_WGMMA_FLOPS = 4 * 2 * 64 * 256 * 16
_WGMMA_SHARED = 256 * 128


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates per second, from the 10th percentile of measured times."""

    copy_bytes: float
    """Bytes read plus bytes written by a large copy."""
    flops: dict[str, float]
    """Floating-point operations, by kind of product: float16, bfloat16 and tf32 on a GPU (the faster of
    ``mma.sync`` and, on Hopper, ``wgmma``), float32 and float64 (BLAS) on a CPU."""
    exponentials: float
    """``ex2.approx`` on a GPU, ``numpy.exp`` in float32 on a CPU."""
    sustained_flops: dict[str, float] = dataclasses.field(default_factory=dict)
    """As ``flops``, by ``wgmma`` on random operands when the power limit has lowered the clocks: the median of the
    second half of one second of load. Empty on GPUs without ``wgmma``."""
    read_bytes: float = 0.0
    """Bytes that a kernel reads if it only reads; 0: not measured."""
    mma_flops: dict[str, float] = dataclasses.field(default_factory=dict)
    """As ``flops``, by ``mma.sync`` alone, which all kernels but Hopper's use; operands are in registers. Empty: not
    measured."""
    launch_seconds: float = 0.0
    """Time of a launch of a kernel that does almost nothing; 0: not measured."""

    def floor(self, problem: Problem, work: Work | None = None) -> tuple[float, str]:
        """A lower bound of the problem's seconds on this machine, and the resource that sets the bound.

        It is the largest time of products, exponentials and compulsory traffic, as if all three overlapped perfectly.
        Pass ``work`` if sequences are shorter than the arrays.
        """
        kind, work = _product(problem, self.flops), work or Work.of(problem)
        name, rate = f"{kind} products", self.flops[kind]
        if problem.dtype == E4M3 and "bfloat16" in self.flops:  # tensor cores multiply e4m3 at twice the rate
            name, rate = "e4m3 products (2 × bfloat16)", 2 * self.flops["bfloat16"]
        parts = {
            name: work.flops / rate,
            "exponentials": work.scores / self.exponentials,
            "memory": work.io_bytes / max(self.copy_bytes, self.read_bytes),
        }
        bound = max(parts, key=lambda name: parts[name])
        return parts[bound], bound


def _product(problem: Problem, flops: dict[str, float]) -> str:
    """The kind of product of a problem. Float32 on a GPU is compared with tf32, the fastest way to multiply float32."""
    if problem.dtype in flops:
        return problem.dtype
    return "tf32" if "tf32" in flops else "float32"


@functools.cache
def measure_limits(device: Device | None) -> Limits:
    """Takes some five seconds on a GPU, one on a CPU; ``None`` is the CPU."""
    return _cpu_limits() if device is None else _gpu_limits(device)


def _gpu_limits(device: Device) -> Limits:
    # Each ceiling is measured alone: products lower the clock, and a copy in turns with them would run at that clock.
    copy_bytes = _gpu_copy_rate()
    mma_flops = mma_rates(device)
    flops = dict(mma_flops)
    sustained = {}
    if device.arch.capability == 90:
        work = device.num_sms * (_THREADS // 128) * _ITERATIONS * _WGMMA_FLOPS
        for kind in ("float16", "bfloat16"):
            t = _timing("limits/wgmma.cu", "wgmma_limit", kind, device.num_sms, _WGMMA_SHARED)
            flops[kind] = max(flops[kind], work / t.p10)
            sustained[kind] = work / float(np.median(t.samples[len(t.samples) // 2 :]))
    blocks = _BLOCKS_PER_SM * device.num_sms
    exponentials = blocks * _THREADS * _ITERATIONS * _CHAINS
    rate = exponentials / _timing(_SOURCE, "exp2_limit", "float16", blocks).p10
    return Limits(copy_bytes, flops, rate, sustained, _gpu_read_rate(), mma_flops, launch_seconds(device))


def mma_rates(device: Device) -> dict[str, float]:
    """:attr:`Limits.mma_flops` of the current GPU; takes a second and a half."""
    blocks = _BLOCKS_PER_SM * device.num_sms
    products = blocks * (_THREADS // 32) * _ITERATIONS * _PRODUCTS
    return {
        kind: products * each / _timing(_SOURCE, "mma_limit", kind, blocks).p10
        for kind, each in _FLOPS_A_PRODUCT.items()
    }


def launch_seconds(device: Device) -> float:
    """:attr:`Limits.launch_seconds` of the current GPU."""
    return _timing(_SOURCE, "exp2_limit", "float16", device.num_sms, iterations=0).p10


def _timing(
    source: str, entry: str, kind: str, blocks: int, shared_memory: int = 0, iterations: int = _ITERATIONS
) -> Timing:
    import cupy

    arguments = (cupy.empty(blocks * _THREADS, cupy.float32), np.int32(iterations))
    run = launch_of(source, entry, _constants(kind), (blocks, _THREADS, shared_memory), arguments)
    return time_of(run, on_gpu=True, seconds=1.0 if shared_memory else 0.5)


def launch_of(
    source: str, entry: str, constants: dict[str, bool], shape: tuple[int, int, int],
    arguments: tuple[Any, ...],
) -> Run:  # fmt: skip
    """A launch of a kernel below ``cuda_src/limits``. ``shape``: blocks, threads of a block, bytes of shared memory."""
    import cupy

    blocks, threads, shared_memory = shape
    options = cupy_options(90 if source == "limits/wgmma.cu" else 80)
    module = cupy.RawModule(code=translation_unit(source, constants), options=options)
    function = module.get_function(entry)
    return functools.partial(function, (blocks,), (threads,), arguments, shared_mem=shared_memory)


def _constants(kind: str) -> dict[str, bool]:
    """Constants of cuda_src/limits/tensor_cores.cu and wgmma.cu, by kind of product."""
    return {"BFLOAT16": kind == "bfloat16", "TF32": kind == "tf32"}


def streaming_read(arrays: Sequence[Any], num_bytes: int) -> Run:
    """A launch that reads ``num_bytes`` once, an equal share of each array, and does nothing else."""
    import cupy

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    blocks, threads = 2 * device["multiProcessorCount"], 1024
    sink, each = cupy.empty(blocks * threads, np.float32), num_bytes // len(arrays)
    parts = [cupy.ascontiguousarray(x).reshape(-1).view(np.uint8)[:each] for x in arrays]
    whole = parts[0] if len(parts) == 1 else cupy.concatenate(parts)
    arguments = (whole, np.uint64(whole.size // 16), sink)
    return launch_of(_SOURCE, "read_limit", _constants("float16"), (blocks, threads, 0), arguments)


def _gpu_read_rate() -> float:
    import cupy

    run = streaming_read([cupy.empty(_COPY_BYTES, cupy.uint8)], _COPY_BYTES)
    return _COPY_BYTES / time_of(run, on_gpu=True, seconds=0.5).p10


def _gpu_copy_rate() -> float:
    import cupy

    source = cupy.empty(_COPY_BYTES, cupy.uint8)
    run = functools.partial(cupy.copyto, cupy.empty_like(source), source)
    return 2 * _COPY_BYTES / time_of(run, on_gpu=True, seconds=0.5).p10


def _cpu_limits() -> Limits:
    rng = np.random.default_rng(0)
    source = np.ones(1 << 24, np.float64)  # 128 MiB: several times what caches hold
    copy = time_of(functools.partial(np.copyto, np.empty_like(source), source), on_gpu=False, seconds=0.1)
    n, flops = 1024, {}
    for dtype in (np.float32, np.float64):
        a, b = rng.standard_normal((2, n, n)).astype(dtype)
        run = functools.partial(np.matmul, a, b, out=np.empty((n, n), dtype))
        flops[np.dtype(dtype).name] = 2 * n**3 / time_of(run, on_gpu=False, seconds=0.15).p10
    x = -rng.random(1 << 16, np.float32)
    exp = time_of(functools.partial(np.exp, x, out=np.empty_like(x)), on_gpu=False, seconds=0.05)
    return Limits(2 * source.nbytes / copy.p10, flops, x.size / exp.p10)
