"""Device memory that decode kernels need beyond inputs and outputs: partial results, and counters of the
parts that are there, which a kernel leaves at zero for the next.

Calls on one stream follow one another, so each stream has one workspace. What is captured has its own, one
for each capture and stream, which lives as long as the process: a graph may be replayed at any time, on any
stream.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import cupy

_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, another stream in every thread
_CAPTURE_ACTIVE = 1  # CUstreamCaptureStatus


class Workspace:
    """Of one stream. Hold ``lock`` from looking at it to the last launch of a call: kernels of two calls,
    from two host threads, must not take turns on it."""

    def __init__(self, captured: bool) -> None:
        self.lock = threading.Lock()
        self.num_counters = self.partial_bytes = 0
        self.counters = self.partial = 0
        """Addresses: of 32-bit words that are zero whenever no kernel runs, and of ``partial_bytes``."""
        self._captured = captured
        self._memory: list[Any] = []

    def grow(self, stream: Any, device_id: int, num_counters: int, partial_bytes: int) -> None:
        """To at least these sizes. ``stream`` is the current one."""
        sizes = max(num_counters, self.num_counters), max(partial_bytes, self.partial_bytes)
        if self._captured:
            memory = _allocate_outside_the_graph(device_id, *sizes)
        else:
            memory = _allocate(stream, *sizes)
            self._memory.clear()  # back to CuPy's pool, which gives it to the same stream only
        self._memory += memory  # what was captured before goes on to use what it has
        self.counters, self.partial = (x.ptr for x in memory)
        self.num_counters, self.partial_bytes = sizes


def _allocate(stream: Any, num_counters: int, partial_bytes: int) -> tuple[Any, Any]:
    """From the pool of the current stream, which is ``stream``."""
    counters, partial = cupy.cuda.alloc(num_counters * 4), cupy.cuda.alloc(partial_bytes)
    counters.memset_async(0, num_counters * 4, stream)
    return counters, partial


def _allocate_outside_the_graph(device_id: int, num_counters: int, partial_bytes: int) -> tuple[Any, Any]:
    """Zeroed here and now, neither captured nor from the pool of a stream that has work queued: kernels from
    before the capture may still write to memory that was given back to that pool."""
    if device_id not in _zeroing:
        _zeroing[device_id] = cupy.cuda.Stream(non_blocking=True)
    zeroing = _zeroing[device_id]
    with zeroing:
        memory = _allocate(zeroing, num_counters, partial_bytes)
    zeroing.synchronize()
    return memory


_zeroing: dict[int, Any] = {}
_of_streams: dict[tuple[int, int, int], Workspace] = {}
_of_captures: dict[tuple[int, int, int, int], Workspace] = {}
_of_captured_calls: list[Workspace] = []


def workspace_of(stream: Any, device_id: int) -> Workspace:
    """The current stream's, or that of its capture."""
    pointer = stream.ptr
    key = device_id, pointer, threading.get_ident() if pointer == _PER_THREAD_STREAM else 0
    if not stream.is_capturing():
        return _of_streams.get(key) or _of_streams.setdefault(key, Workspace(captured=False))
    capture = capture_id(pointer)
    if capture is None:  # nothing says which calls follow one another: each has its own
        _of_captured_calls.append(Workspace(captured=True))
        return _of_captured_calls[-1]
    return _of_captures.setdefault((*key, capture), Workspace(captured=True))


def capture_id(stream: int) -> int | None:
    """Unique in the process, the same for all streams of one capture; None if the driver does not say."""
    try:
        get_info = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (AttributeError, OSError):
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = get_info(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed or status.value != _CAPTURE_ACTIVE else number.value
