"""Bits of masks on a GPU: bits by row from a function (:mod:`cufa.problem.where`), bits by key from bits by row. Each
takes one launch on the current stream, without a wait."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cupy

from ...build.compiler import translation_unit
from ...build.score_text import change_text
from ...kernels.config import ceil_div
from ...kernels.mask_bits import NUM_MEMBERS, SOURCE, WARPS, blocks, numbers
from ...problem.bits import WORD, Bits
from ...problem.where import Where
from .launches import NumberKernel


def words(
    mask: Where, sizes: tuple[int, ...], out: Any = None, edges: Sequence[Any] = (), sequences: int = 0
) -> Any:
    """Words by row of a mask of (batch, heads, seqlen_q, seqlen_k): int32, on the current GPU, in ``out`` if given.
    ``edges``: cu_seqlens of queries and keys of that many packed sequences, which one matrix holds; of 0: each has a
    matrix."""
    batch, heads, rows, keys = sizes
    if out is None:
        out = cupy.empty((batch, heads, rows, ceil_div(keys, WORD)), cupy.int32)
    device_id = out.data.device_id
    with cupy.cuda.Device(device_id):
        arrays = [cupy.asarray(x) for x in mask.arrays.values()]
        for name, x in zip(mask.arrays, arrays, strict=True):
            if x.data.device_id != device_id:
                raise ValueError(
                    f"{name} is on GPU {x.data.device_id}, but q is on GPU {device_id}: copy it there"
                )
        text = change_text(mask.change, sequences or batch, heads, rows, keys)
        edges = [cupy.asarray(x) for x in edges]
        places = [x.data.ptr for x in arrays], 0, out.data.ptr
        members = numbers(arrays, *places, sizes, [x.data.ptr for x in edges], sequences)
        _launch("mask_bits", text, members, sizes, device_id)
    return out


def transposed(by_row: Any, keys: int, out: Any = None) -> Any:
    """Words by key, int32 (batch, heads, keys, words of rows), from words by row; in ``out`` if given."""
    batch, heads, rows, _ = by_row.shape
    device_id = by_row.data.device_id
    with cupy.cuda.Device(device_id):
        if out is None:
            out = cupy.empty((batch, heads, keys, ceil_div(rows, WORD)), cupy.int32)
        sizes = batch, heads, rows, keys
        _launch("transpose_bits", "", numbers((), (), by_row.data.ptr, out.data.ptr, sizes), sizes, device_id)
    return out


Bits.transposed_on_gpu = staticmethod(transposed)


def _launch(entry: str, text: str, members: list[int], sizes: Sequence[int], device_id: int) -> None:
    if blocks(sizes):
        _kernel(entry, text, device_id)(blocks(sizes), members)


@functools.lru_cache(256)
def _kernel(entry: str, text: str, device_id: int) -> NumberKernel:
    from .backend import number_kernel  # which imports this module

    unit = translation_unit(SOURCE, {}, text)
    return number_kernel(entry, unit, NUM_MEMBERS, WARPS * 32, device_id, as_structure=True)
