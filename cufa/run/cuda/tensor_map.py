"""CUtensorMap: the description of a tensor that Hopper's copy engine (TMA) reads, encoded by the driver.

Through ctypes, because a map holds the tensor's address, and a call on new arrays has four of them to make:
1 µs each here against 9 µs through cuda.bindings; and only the address is new.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import cupy

from ...gpu.driver import driver
from ...kernels import Box
from ...problem.element import Element

_INVALID_CONTEXT = 201
_BYTES = 128
_ALIGNMENT = 64
_SWIZZLE_128B = 3
_PROMOTIONS = (0, 64, 128, 256)  # CU_TENSOR_MAP_L2_PROMOTION_*
_BOX_BYTES = 128
"""Bytes of the last axis in one box: the span of the swizzle."""


@functools.cache
def _driver() -> ctypes.CDLL:
    library = driver(keep_gil=True)
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


class TensorMap:
    """A map of one (batch, heads, seqlen, head_dim) operand, of which a copy moves one ``box``. ``address`` is the
    map's own, for kernel arguments to point to: memory of this object, or 128 bytes of the caller's memory, 64-byte
    aligned.
    """

    def __init__(
        self, element: Element, shape: Sequence[int], byte_strides: Sequence[int], box: Box,
        address: int | None = None,
    ) -> None:  # fmt: skip
        self._storage = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._storage)
        self.address = -(-start // _ALIGNMENT) * _ALIGNMENT if address is None else address
        batch, heads, seqlen, head_dim = shape
        assert element.tensor_map_type is not None
        # Innermost first. The stride of an axis that is never stepped along must still be a multiple of 16.
        steps = [
            stride if size > 1 else 16
            for size, stride in (
                (seqlen, byte_strides[2]),
                (heads, byte_strides[1]),
                (batch, byte_strides[0]),
            )
        ]
        columns = _BOX_BYTES // element.itemsize
        rank = 4
        self._arguments = (
            ctypes.c_void_p(self.address),
            ctypes.c_int(element.tensor_map_type),
            ctypes.c_uint32(rank),
        )
        self._geometry = (
            (ctypes.c_uint64 * rank)(head_dim, seqlen, heads, batch),
            (ctypes.c_uint64 * (rank - 1))(*steps),
            (ctypes.c_uint32 * rank)(columns, box.rows, 1, 1),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int(_SWIZZLE_128B),
            ctypes.c_int(_PROMOTIONS.index(box.promotion)),
            ctypes.c_int(0),  # elements out of bounds arrive as zeros
        )
        self._replace = _driver().cuTensorMapReplaceAddress
        self._pointer = 0

    def point_to(self, pointer: int) -> None:
        """Encode the map for a tensor at this device address, unless it is encoded already."""
        if pointer == self._pointer:
            return
        # A map that was encoded needs its new address only, which costs less than encoding it again.
        known, self._pointer = self._pointer, 0  # after a Ctrl-C or an error below the map is encoded again
        if not known or self._replace(self.address, pointer):
            self._encode(pointer)
        self._pointer = pointer

    def _encode(self, pointer: int) -> None:
        encode = _driver().cuTensorMapEncodeTiled
        status = encode(*self._arguments, ctypes.c_void_p(pointer), *self._geometry)
        if status == _INVALID_CONTEXT:  # a thread's first CUDA call: make the context current
            cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
            status = encode(*self._arguments, ctypes.c_void_p(pointer), *self._geometry)
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {status} at {pointer:#x}")
