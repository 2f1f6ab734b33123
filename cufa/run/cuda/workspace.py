"""Device memory that kernels need beyond inputs and outputs: partial results, and counters of finished parts, which
every kernel leaves at zero.

Calls on one stream are ordered, so each stream has one workspace. Captured calls have one workspace for each capture
and stream, which lives as long as the graph and its executables: a graph may be replayed at any time, on any stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from ...gpu.driver import driver as _driver

_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, another stream in every thread
_CAPTURE_ACTIVE = 1  # CUstreamCaptureStatus
_CAPTURE_MODE_RELAXED = 2  # CUstreamCaptureMode
_NO_DESTRUCTOR_SYNC = 1  # CUuserObject_flags
_MOVE_REFERENCE = 1  # CUuserObjectRetain_flags
_SEMAPHORE_BYTES = 32  # sizeof(sem_t) of 64-bit Linux


class Workspace:
    """The workspace of one stream. Hold ``lock`` from the first read to a call's last launch: kernels of two calls
    from two host threads must not interleave. ``graph`` is the graph under capture, whose destruction :attr:`ended`
    reports; 0 if the driver does not name it."""

    def __init__(self, captured: bool, graph: int = 0) -> None:
        self.lock = threading.Lock()
        self.num_counters = self.partial_bytes = 0
        self.counters = self.partial = 0
        """Addresses: of 32-bit words that are zero while no kernel runs, and of ``partial_bytes`` bytes."""
        self._captured = captured
        self._end = _end_of(graph) if graph else None
        self._memory: list[Any] = []

    @property
    def ended(self) -> bool:
        """No graph will use the workspace any more."""
        return self._end is not None and _libc().sem_trywait(self._end) == 0

    def grow(self, stream: Any, device_id: int, num_counters: int, partial_bytes: int) -> None:
        """Grow to at least these sizes. ``stream`` is the current stream."""
        sizes = max(num_counters, self.num_counters), max(partial_bytes, self.partial_bytes)
        if self._captured:
            memory = _allocate_outside_the_graph(device_id, *sizes)
        else:
            memory = _allocate(stream, *sizes)
            self.num_counters = self.partial_bytes = 0  # after a Ctrl-C below the next call grows again
            self._memory.clear()  # back to CuPy's pool, which gives it to the same stream only
        self._memory += memory  # graphs captured before still use the old memory
        self.counters, self.partial = (x.ptr for x in memory)
        self.num_counters, self.partial_bytes = sizes

    def keep(self, arrays: Iterable[Any]) -> None:
        """Keep mask arrays of captured launches alive as long as the graph can be replayed."""
        if self._captured:
            self._memory += [x for x in arrays if all(x is not kept for kept in self._memory)]


def _allocate(stream: Any, num_counters: int, partial_bytes: int) -> tuple[Any, Any]:
    """From the pool of the current stream, which is ``stream``."""
    counters, partial = cupy.cuda.alloc(max(num_counters, 1) * 4), cupy.cuda.alloc(max(partial_bytes, 1))
    counters.memset_async(0, max(num_counters, 1) * 4, stream)
    return counters, partial


def _allocate_outside_the_graph(device_id: int, num_counters: int, partial_bytes: int) -> tuple[Any, Any]:
    """Memory that is zeroed before return, outside of the capture and of the pool of a stream with queued work: kernels
    from before the capture may still write to memory that was returned to that pool."""
    with _allocations_allowed():
        if device_id not in _zeroing:
            _zeroing[device_id] = cupy.cuda.Stream(non_blocking=True)
        zeroing = _zeroing[device_id]
        with zeroing:
            memory = _allocate(zeroing, num_counters, partial_bytes)
        zeroing.synchronize()
    return memory


@contextlib.contextmanager
def _allocations_allowed() -> Iterator[None]:
    """During a capture in the mode "global", PyTorch's default, a thread may call cudaMalloc only in this mode."""
    try:
        exchange = _driver().cuThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        yield
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange(ctypes.byref(mode))  # leaves the thread's mode in `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_zeroing: dict[int, Any] = {}
_stream_workspaces: dict[tuple[int, int, int], Workspace] = {}
_capture_workspaces: dict[tuple[int, int, int, int], Workspace] = {}
_call_workspaces: list[Workspace] = []


def workspace_of(stream: Any, device_id: int) -> Workspace:
    """The workspace of the current stream, or of its capture."""
    pointer = stream.ptr
    key = device_id, pointer, threading.get_ident() if pointer == _PER_THREAD_STREAM else 0
    if not stream.is_capturing():
        return _stream_workspaces.get(key) or _stream_workspaces.setdefault(key, Workspace(captured=False))
    capture = capture_of(pointer)
    if capture is None:  # the order of calls is unknown: each keeps its own workspace
        _call_workspaces.append(Workspace(captured=True))
        return _call_workspaces[-1]
    number, graph = capture
    found = _capture_workspaces.get((*key, number))
    if found is None:
        for other, workspace in list(_capture_workspaces.items()):
            if workspace.ended:
                del _capture_workspaces[other]  # and its memory is back in CuPy's pool
        found = _capture_workspaces[*key, number] = Workspace(captured=True, graph=graph)
    return found


def capture_of(stream: int) -> tuple[int, int] | None:
    """The id of the capture, unique in the process and equal for all its streams, and the graph under capture; None if
    the driver does not provide them."""
    try:
        get_info = _driver().cuStreamGetCaptureInfo_v2
    except (AttributeError, OSError):
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    failed = get_info(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    )
    return None if failed or status.value != _CAPTURE_ACTIVE else (number.value, graph.value or 0)


def _end_of(graph: int) -> int | None:
    """The address of a semaphore that the driver posts once the graph, its copies and their executables are
    gone and no longer run; None if the driver cannot.

    The driver calls libc's own function, from a thread of its own: Python may be waiting for the driver just then,
    or be gone. For the same reason the semaphore is memory of libc, and never freed: 32 bytes per capture.
    """
    semaphore = _libc().calloc(1, _SEMAPHORE_BYTES)
    _libc().sem_init(semaphore, 0, 0)
    post, holder = ctypes.cast(_libc().sem_post, ctypes.c_void_p), ctypes.c_void_p()
    try:
        create, retain = _driver().cuUserObjectCreate, _driver().cuGraphRetainUserObject
    except (AttributeError, OSError):
        return None
    if create(ctypes.byref(holder), ctypes.c_void_p(semaphore), post, 1, _NO_DESTRUCTOR_SYNC):
        return None
    # Moved: only the graph holds a reference.
    return None if retain(ctypes.c_void_p(graph), holder, 1, _MOVE_REFERENCE) else semaphore


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.calloc.restype, libc.calloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    libc.sem_trywait.argtypes = [ctypes.c_void_p]
    return libc
