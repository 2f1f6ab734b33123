"""Masks of several texts from lengths that are on a GPU: one small launch, and nothing that waits for it."""

from __future__ import annotations

import functools
from typing import Any

import cupy

from ..nvrtc.compiler import cupy_options, translation_unit
from .cuda import compiled_function

#: Of cuda_src/kernels/text_runs.cu.
SOURCE, ENTRY, THREADS, KEYS_OF_BLOCK = "kernels/text_runs.cu", "text_runs", 128, 128
FORMS = {"causal": 0, "both ways": 1, "question": 2}


def text_runs(lengths: Any, seqlen: int, form: str) -> Any:
    """lo, hi of each run of rows that a key is hidden from: int32 (2 or 4, batch, 1, seqlen), on the GPU.

    ``lengths`` is int32, (texts,) or (batch, texts). ``form`` is one of :data:`FORMS`: a token sees those of its own
    text up to itself; all of them; or up to itself, and those of the first text.
    """
    *batch, texts = lengths.shape
    sequences = batch[0] if batch else 1
    with cupy.cuda.Device(lengths.data.device_id):
        runs = cupy.ndarray((4 if form == "both ways" else 2, sequences, 1, seqlen), cupy.int32)
        if runs.size:
            if not lengths.flags.c_contiguous:
                lengths = cupy.ascontiguousarray(lengths)
            blocks = -(-sequences * -(-seqlen // 32) * 32 // KEYS_OF_BLOCK)
            arguments = lengths, runs, sequences, texts, seqlen, FORMS[form]
            _function(lengths.data.device_id)((blocks,), (THREADS,), arguments)
    return runs


@functools.cache
def _function(device_id: int) -> Any:
    return compiled_function(translation_unit(SOURCE, {}), device_id, cupy_options(), ENTRY)
