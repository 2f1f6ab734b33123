"""Where arrays lie: addresses, strides, and whether two share memory. No element is read."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy need not be installed to type-check


def overlaps_itself(x: Array) -> bool:
    """Elements are distinct when each axis strides past the whole extent of all finer axes, and where there are
    none (NumPy gives empty arrays strides of 0)."""
    if x.size == 0:
        return False
    extent = x.itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


def shares_memory(a: Array, b: Array) -> bool:
    """Exact: interleaved views of one buffer do not."""
    if isinstance(a, np.ndarray):
        return np.shares_memory(a, b)
    (a_low, a_high), (b_low, b_high) = byte_range(a), byte_range(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    # NumPy reasons from strides; cupy.shares_memory would sort the addresses of all elements, on the GPU.
    return np.shares_memory(_addresses(a), _addresses(b))


def _addresses(x: Array) -> Array:
    """A NumPy array with the address and the strides of one on a GPU. Never read."""
    interface = {
        "version": 3,
        "typestr": f"|V{x.itemsize}",
        "data": (address(x), True),
        "shape": x.shape,
        "strides": x.strides,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def byte_range(x: Array) -> tuple[int, int]:
    """First address of the array and the one past its last."""
    if x.size == 0:
        return address(x), address(x)
    spans = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    start = address(x)
    return start + sum(s for s in spans if s < 0), start + sum(s for s in spans if s > 0) + x.itemsize


def address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def alignment(*arrays: Array) -> int:
    """Largest power of two up to 16 that divides every address and every stride that is stepped along."""
    bits = 16
    for x in arrays:
        bits |= address(x)
        for stride, size in zip(x.strides[:-1], x.shape[:-1], strict=True):
            if size > 1:
                bits |= stride
    return bits & -bits


def positive_strides(*arrays: Array) -> bool:
    """No axis that is stepped along is broadcast (stride 0) or reversed."""
    return all(
        stride > 0 for x in arrays for stride, size in zip(x.strides, x.shape, strict=True) if size > 1
    )
