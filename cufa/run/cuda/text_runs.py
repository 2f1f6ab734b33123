"""Masks of several texts from lengths that are on a GPU: one small launch, without a wait."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from ...build.compiler import translation_unit
from ...kernels.config import ceil_div
from .backend import number_kernel
from .launches import NumberKernel

#: The constants of cuda_src/shared/text_runs.cu.
SOURCE, ENTRY, WARPS, WARP_KEYS = "shared/text_runs.cu", "text_runs", 4, 256
FORMS = {"causal": 0, "both ways": 1, "question": 2}


def text_runs(lengths: Any, seqlen: int, form: str) -> Any:
    """lo, hi of each run of rows that a key is hidden from: int32 (2 or 4, batch, 1, seqlen), on the GPU.

    ``lengths`` is int32, (texts,) or (batch, texts). ``form`` is one of :data:`FORMS`: a token sees its own text up to
    itself; its whole text; or its text up to itself, and the first text.
    """
    device_id = lengths.data.device_id
    if cupy.cuda.runtime.getDevice() == device_id:
        return _text_runs(lengths, seqlen, form, device_id)
    with cupy.cuda.Device(device_id):
        return _text_runs(lengths, seqlen, form, device_id)


def _text_runs(lengths: Any, seqlen: int, form: str, device_id: int) -> Any:
    shape = lengths.shape
    sequences = shape[0] if len(shape) == 2 else 1
    runs = cupy.ndarray((4 if form == "both ways" else 2, sequences, 1, seqlen), lengths.dtype)
    if sequences and seqlen:
        if not lengths._c_contiguous:
            lengths = cupy.ascontiguousarray(lengths)
        blocks = ceil_div(sequences * ceil_div(seqlen, WARP_KEYS), WARPS)
        numbers = [lengths.data.ptr, runs.data.ptr, sequences, shape[-1], seqlen, FORMS[form]]
        _kernel(device_id)(blocks, numbers)
    return runs


@functools.cache
def _kernel(device_id: int) -> NumberKernel:
    return number_kernel(ENTRY, translation_unit(SOURCE, {}), 6, WARPS * 32, device_id)
