"""Arrays of an emulated kernel: the memory that it may touch, and poison around that memory."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ...calls.arrays import byte_range

_POISON = 0xFF  # NaN in float16, bfloat16 and float32


@dataclasses.dataclass(frozen=True)
class GlobalArray:
    """Memory that a kernel is given."""

    name: str
    array: npt.NDArray[Any]
    writable: bool
    valid: npt.NDArray[np.uint8] | None = None
    """One byte for each element from the first element on: 0 for padding. None: no padding."""

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class _Array(ctypes.Structure):
    """``CufaArray`` of cuda_src/host/launch.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("valid", ctypes.c_void_p),
        ("granule", ctypes.c_uint32),
        ("writable", ctypes.c_int32),
        ("before", ctypes.c_void_p),
        ("now", ctypes.c_void_p),
    ]


#: The accesses of a launch to each array that it may write: a byte per element (cuda_src/host/launch.h, CufaTouched).
Touched = list[npt.NDArray[np.uint8]]


def untouched(memory: list[GlobalArray]) -> Touched:
    """Zeros, which a launch fills in."""
    ranges = [byte_range(x.array) for x in memory]
    return [
        np.zeros((end - begin) // x.array.itemsize + 1 if x.writable else 0, np.uint8)
        for x, (begin, end) in zip(memory, ranges, strict=True)
    ]


def as_ctypes(
    memory: list[GlobalArray], before: Touched | None = None, now: Touched | None = None
) -> ctypes.Array[_Array]:
    """The table that the runtime reads; all of ``memory``, ``before`` and ``now`` must outlive it."""
    table = (_Array * max(len(memory), 1))()
    for i, (row, x) in enumerate(zip(table, memory, strict=False)):
        begin, end = byte_range(x.array)
        row.name, row.begin, row.bytes = x.name.encode(), begin, end - begin
        row.valid = None if x.valid is None else x.valid.ctypes.data
        row.granule, row.writable = x.array.itemsize, x.writable
        row.before = before[i].ctypes.data if before and x.writable else None
        row.now = now[i].ctypes.data if now and x.writable else None
    return table


def guarded_copy(name: str, x: npt.NDArray[Any], gap: int, writable: bool) -> GlobalArray:
    """A copy of ``x``, (batch, heads, seqlen, head_dim), with ``gap`` poisoned rows after each head's last row: a read
    past a head's end hits poison, not the next head.

    The copy has the axis order in memory, the row stride, and every address modulo 16 of ``x``, and therefore needs
    the same compiled kernel.
    """
    item, extent = x.itemsize, x.shape[3] * x.itemsize
    strides = [0, 0, 0, item]
    for axis in sorted(range(3), key=lambda a: (abs(x.strides[a]) if x.shape[a] > 1 else 0, -a)):
        wanted = abs(x.strides[axis])
        stride = max(wanted, extent) if axis == 2 and x.shape[2] > 1 else extent
        stride += (wanted - stride) % 16 if x.shape[axis] > 1 else -stride % 16
        strides[axis] = stride
        extent = stride * (x.shape[axis] + (gap if axis == 2 else 0))
    lead = gap * strides[2] // 16 * 16
    buffer = np.full(lead + extent + 32, _POISON, np.uint8)
    base = lead + (x.ctypes.data - buffer.ctypes.data - lead) % 16
    copy = np.ndarray(x.shape, x.dtype, buffer.data, base, strides)
    if not writable:
        copy[...] = x
    valid = np.zeros(extent // item, np.uint8)
    np.lib.stride_tricks.as_strided(valid, x.shape, [s // item for s in strides])[...] = 1
    return GlobalArray(name, copy, writable, valid)


class TensorMap(ctypes.Structure):
    """``TensorMap`` of cuda_src/host/primitives_host.h: a CUtensorMap in the clear, axes innermost first."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("item_bytes", ctypes.c_uint32),
        ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 4),
    ]


#: Bytes of the last axis in one box: the span of the swizzle.
_BOX_BYTES = 128


def tensor_map(x: npt.NDArray[Any], box_rows: int) -> TensorMap:
    """Boxes of ``box_rows`` rows and 128 bytes of one head of ``x``, (batch, heads, seqlen, head_dim)."""
    return TensorMap(
        address=x.ctypes.data,
        item_bytes=x.itemsize,
        sizes=x.shape[::-1],
        strides=x.strides[::-1],
        box=(_BOX_BYTES // x.itemsize, box_rows, 1, 1),
    )
