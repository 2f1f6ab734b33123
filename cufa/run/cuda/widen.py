"""e4m3 converted to 16-bit elements, on CuPy arrays: one launch on the current stream, without a wait."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from ...build.compiler import translation_unit
from ...kernels.quantize import MIN_CAPABILITY
from ...kernels.widen import ENTRY, NUM_MEMBERS, SOURCE, THREADS, constants, launch, numbers
from ...plan.planner import MAX_GRID_YZ
from .backend import device, number_kernel
from .launches import NumberKernel


def widen(x: Any, out: Any, scale: Any, mode: str, block: int, dtype: str) -> None:
    """Writes ``scale · x`` to ``out``, contiguous. x is uint8, (batch, heads, seqlen, head_dim); ``scale`` is float32,
    contiguous. Raises ValueError for a GPU without e4m3 and for too many heads."""
    device_id = x.data.device_id
    if device(device_id).arch.capability < MIN_CAPABILITY:
        raise ValueError(
            f"x is on a GPU of {device(device_id).arch.name}, which cannot convert e4m3: pass x.get()"
        )
    if x.shape[0] * x.shape[1] > MAX_GRID_YZ:
        raise ValueError(
            f"x has {x.shape[0]:,} sequences of {x.shape[1]:,} heads; a launch takes {MAX_GRID_YZ:,} in all: pass fewer"
        )
    if x.size:
        with cupy.cuda.Device(device_id):
            aligned = not any(n % 16 for n in (x.data.ptr, *x.strides[:3]))
            kernel = _kernel(x.shape[3], dtype, aligned, device_id)
            pointers = x.data.ptr, out.data.ptr, scale.data.ptr
            blocks, rows_of_blocks, _ = launch(x.shape).grid
            kernel(blocks, numbers(x, pointers, scale.shape, mode, block), rows_of_blocks)


@functools.cache
def _kernel(head_dim: int, dtype: str, aligned: bool, device_id: int) -> NumberKernel:
    unit = translation_unit(SOURCE, constants(head_dim, dtype, aligned))
    return number_kernel(ENTRY, unit, NUM_MEMBERS, THREADS, device_id, as_structure=True)
