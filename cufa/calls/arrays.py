"""Checks of where a call's arrays lie: places, addresses, strides, shared memory. No element is read."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..plan.operation import Operand
from ..problem.checks import array_kind, is_device_array

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy need not be installed to type-check


def same_place(arrays: dict[str, Array]) -> None:
    """All on the host, or all on one GPU. Raises TypeError or ValueError otherwise."""
    (first, q), *others = arrays.items()
    for name, x in others:
        if is_device_array(x) != is_device_array(q):
            raise TypeError(
                f"{name} is {array_kind(x)} but {first} is {array_kind(q)}: move one with cupy.asarray or .get()"
            )
        if is_device_array(x) and x.data.device_id != q.data.device_id:
            raise ValueError(
                f"{name} is on GPU {x.data.device_id} but {first} is on GPU {q.data.device_id}: "
                f"copy it with cupy.asarray inside `with cupy.cuda.Device({q.data.device_id})`"
            )


def check_last_axis(name: str, x: Array) -> None:
    """Raises ValueError unless the last axis is contiguous: kernels read no stride of this axis."""
    if x.shape[-1] > 1 and x.size and x.strides[-1] != x.itemsize:
        module = "cupy" if is_device_array(x) else "numpy"
        raise ValueError(
            f"{name} has strides {x.strides}: its last axis must be contiguous; "
            f"use {module}.ascontiguousarray({name})"
        )


def check_address(name: str, x: Array) -> None:
    """GPUs load whole elements, and no fewer than two bytes, from multiples of their size."""
    unit = max(2, x.itemsize) if x.ndim == 4 else x.itemsize
    if is_device_array(x) and x.size and alignment(x) < unit:
        raise ValueError(
            f"{name} lies at address {address(x):#x} with strides {x.strides}: kernels read {unit} bytes at "
            f"a time, from multiples of {unit}; use {name}.copy(), or a buffer whose rows start there"
        )


def check_result(operand: Operand, x: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises ValueError or TypeError unless ``x`` can receive the result ``operand`` of this shape and dtype."""
    name = operand.name
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape} but the result has {shape}")
    if x.dtype != dtype:
        cure = (
            f"allocate it with empty_like({operand.like})" if isinstance(operand.like, str) else "convert it"
        )
        raise TypeError(f"{name} is {x.dtype} but the result is {dtype}: {cure}")
    if operand.stride:
        check_last_axis(name, x)
    elif not x.flags.c_contiguous:
        raise ValueError(f"{name} has strides {x.strides} for shape {shape}: it must be contiguous")
    check_address(name, x)
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only: pass a writeable array, or a copy")


def check_apart(name: str, there: Mapping[str, Array]) -> None:
    """Raises ValueError if the result ``there[name]`` overlaps another array of the call, or itself."""
    x = there[name]
    if overlaps_itself(x):
        raise ValueError(f"{name} has strides {x.strides} for shape {x.shape}: elements share memory")
    for other, y in there.items():
        if other != name and shares_memory(x, y):
            raise ValueError(
                f"{name} overlaps {other} in memory: it is written to while {other} is still in use; pass a "
                "separate array"
            )


def overlaps_itself(x: Array) -> bool:
    """Whether elements may share memory. They do not if each axis strides past the extent of all finer axes. An empty
    array has no elements (NumPy gives it strides of 0)."""
    if x.size == 0:
        return False
    extent = x.itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


def shares_memory(a: Array, b: Array) -> bool:
    """Whether two arrays share memory. Exact: interleaved views of one buffer do not."""
    if isinstance(a, np.ndarray):
        return np.shares_memory(a, b)
    (a_low, a_high), (b_low, b_high) = byte_range(a), byte_range(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    # NumPy reasons from strides; cupy.shares_memory would sort the addresses of all elements, on the GPU.
    return np.shares_memory(_addresses(a), _addresses(b))


def _addresses(x: Array) -> Array:
    """A NumPy array with the address and the strides of a GPU array. Its elements are never read."""
    interface = {
        "version": 3,
        "typestr": f"|V{x.itemsize}",
        "data": (address(x), True),
        "shape": x.shape,
        "strides": x.strides,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def byte_range(x: Array) -> tuple[int, int]:
    """The array's first address, and the address past its last byte."""
    if x.size == 0:
        return address(x), address(x)
    spans = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    start = address(x)
    return start + sum(s for s in spans if s < 0), start + sum(s for s in spans if s > 0) + x.itemsize


def address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def alignment(*arrays: Array) -> int:
    """Largest power of two up to 16 that divides every address, and the stride of every outer axis longer than 1."""
    bits = 16
    for x in arrays:
        bits |= address(x)
        for stride, size in zip(x.strides[:-1], x.shape[:-1], strict=True):
            if size > 1:
                bits |= stride
    return bits & -bits


def positive_strides(*arrays: Array) -> bool:
    """No axis longer than 1 is broadcast (stride 0) or reversed."""
    return all(
        stride > 0 for x in arrays for stride, size in zip(x.strides, x.shape, strict=True) if size > 1
    )
