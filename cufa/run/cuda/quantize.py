"""The quantiser to e4m3 on CuPy arrays: launches on the current stream, without a wait."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import cupy

from ...build.compiler import translation_unit
from ...kernels.quantize import MIN_CAPABILITY, NUM_MEMBERS, SOURCE, Quantizer
from ...plan.planner import MAX_GRID_YZ
from .backend import device, number_kernel
from .launches import NumberKernel
from .workspace import workspace_of


def quantize(
    build: Quantizer,
    x: Any,
    out: Any,
    scale_shape: tuple[int, ...],
    lengths: Any,
    sequences: int,
    sign_bits: bytes,
) -> Any:
    """Writes e4m3 of x to ``out`` and returns the scale. Axes are canonical; ``lengths`` is None or int32 on x's GPU,
    which is the current device. Raises ValueError for a GPU without e4m3, and for too many heads."""
    device_id = x.data.device_id
    if device(device_id).arch.capability < MIN_CAPABILITY:
        raise ValueError(
            f"x is on a GPU of {device(device_id).arch.name}, which cannot convert to e4m3: pass x.get()"
        )
    _, heads, seqlen, _ = x.shape
    if build.smooth and heads > MAX_GRID_YZ:
        raise ValueError(
            f"x has {heads:,} heads; CUDA limits a grid's second axis to {MAX_GRID_YZ:,}: pass fewer heads in one call"
        )
    num_scales, sizes = math.prod(scale_shape), (sequences, heads, seqlen)
    if not (heads and seqlen and sequences):
        out.fill(0)
        return cupy.ones(scale_shape, cupy.float32)
    num_sms, zeros = device(device_id).num_sms, build.zeros(*sizes)
    words = cupy.empty(num_scales + zeros, cupy.float32)
    scale = words[:num_scales].reshape(scale_shape)
    stream = cupy.cuda.get_current_stream(device_id)
    if zeros:
        words[num_scales:].data.memset_async(0, 4 * zeros, stream)
    if build.lengths != "dense":
        scale.fill(1)  # scales without tokens stay 1
    pointers = [x.data.ptr, out.data.ptr, words.data.ptr, 0, 0, 0 if lengths is None else lengths.data.ptr]
    with contextlib.ExitStack() as stack:
        if build.smooth:
            memory = workspace_of(stream, device_id)
            stack.enter_context(memory.lock)
            sum_bytes, mean_bytes = build.workspace(*sizes)
            if memory.partial_bytes < sum_bytes + mean_bytes:
                memory.grow(stream, device_id, 0, sum_bytes + mean_bytes)
            pointers[3:5] = memory.partial, memory.partial + sum_bytes
        numbers = build.numbers(pointers, sign_bits, x, out, sequences, num_scales, num_sms)
        for launch in build.launches(*sizes, num_sms):
            kernel = _kernel(build, launch.entry, launch.num_threads, launch.shared_memory, device_id)
            kernel(launch.grid[0], numbers, launch.grid[1])
    return scale


@functools.cache
def _kernel(
    build: Quantizer, entry: str, num_threads: int, shared_memory: int, device_id: int
) -> NumberKernel:
    unit, options = (
        translation_unit(SOURCE, build.constants),
        {"shared_memory": shared_memory, "as_structure": True},
    )
    return number_kernel(entry, unit, NUM_MEMBERS, num_threads, device_id, **options)
