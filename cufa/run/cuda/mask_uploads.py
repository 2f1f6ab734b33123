"""Arrays of masks on the device: a GPU array itself, or a copy of a host array, one per device, that lives as long as
the host array."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any

import cupy

from ...problem.integers import Integers

_copies: weakref.WeakKeyDictionary[Integers, dict[int, Any]] = weakref.WeakKeyDictionary()
_streams: dict[int, Any] = {}
_lock = threading.Lock()
in_flight: collections.deque[list[Any]] = collections.deque(maxlen=1024)
"""Mask arrays of the latest launches, whose masks may be deleted already. The driver queues at most 1,024 launches:
then the host waits."""


def device_array(numbers: Integers, device_id: int) -> Any:
    """The CuPy array. Raises ValueError for an array on another GPU."""
    if numbers.on_gpu:
        found = numbers.array
        if found.data.device_id != device_id:
            raise ValueError(
                f"mask has its numbers on GPU {found.data.device_id}, but q is on GPU {device_id}: make it of "
                "numbers on that GPU"
            )
        if not found.flags.c_contiguous:
            raise ValueError("mask has numbers that are not contiguous: make it with cufa.masks")
        return found
    with _lock:
        copies_by_device = _copies.setdefault(numbers, {})
        if device_id not in copies_by_device:
            copies_by_device[device_id] = _copy(numbers, device_id)
        return copies_by_device[device_id]


def _copy(numbers: Integers, device_id: int) -> Any:
    """A copy that is complete on return, so that every stream may read it. It is made on a separate stream, which is
    not captured and does not wait for the caller's stream."""
    with cupy.cuda.Device(device_id):
        if device_id not in _streams:
            _streams[device_id] = cupy.cuda.Stream(non_blocking=True)
        with _streams[device_id] as stream:
            copy = cupy.asarray(numbers.values)
        stream.synchronize()
    return copy
