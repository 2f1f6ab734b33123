"""One BLAS thread while cufa's own threads run.

OpenBLAS, which NumPy's wheels carry, has one pool of threads per process: products called from several
threads queue for it, and its idle threads spin on the cores that the callers need. Measured on two cores
(seq 4096, 8 heads, head_dim 64, float32): 0.20 s with one BLAS thread per head, 0.34 s with BLAS left alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def single_threaded_blas() -> Iterator[int]:
    """Inside, a matrix product runs on the calling thread. Yields the number of threads that BLAS would have used:
    ``OPENBLAS_NUM_THREADS`` and threadpoolctl stay effective.

    The setting belongs to the process: calls may overlap, and the last call to end restores it. If threadpoolctl does
    not know the BLAS, nothing is changed, and the number of usable cores is yielded.
    """
    setting, call = _setting, _Call()
    try:
        yield setting.enter(call)
    finally:
        setting.leave(call)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _libraries() -> Sequence[Any]:
    """threadpoolctl's controllers of every BLAS of this process, including NumPy's."""
    import numpy  # noqa: F401  # loads it
    from threadpoolctl import ThreadpoolController

    libraries: Sequence[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return libraries


class _Call:
    """A call that needs one thread."""


class _Setting:
    """The number of BLAS threads. Ctrl-C may end a call at any line, here too: calls are held weakly, and the next call
    restores numbers that were not restored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._before: list[int] = []

    def enter(self, call: _Call) -> int:
        with self._lock:
            self._before = self._before or [library.get_num_threads() for library in _libraries()]
            self._calls.add(call)  # before the setting changes: a process forked after this line restores it
            for library in _libraries() if len(self._calls) == 1 else ():
                library.set_num_threads(1)
            return max(self._before, default=usable_cores())

    def leave(self, call: _Call) -> None:
        with self._lock:
            if len(self._calls) == (call in self._calls):  # no other call
                self.restore()
                self._before = []
            self._calls.discard(call)

    def restore(self) -> None:
        """Also after a fork: the child lacks the threads that were inside a call and would have restored it."""
        for library, threads in zip(_libraries(), self._before, strict=False):
            library.set_num_threads(threads)


_setting = _Setting()


def _after_fork() -> None:
    global _setting
    parents, _setting = _setting, _Setting()  # the lock may be held by a thread that the child lacks
    parents.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
