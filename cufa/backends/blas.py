"""One BLAS thread while cufa's own threads are at work.

OpenBLAS, which NumPy's wheels carry, has one pool of threads a process: products called from several
threads queue for it, and its idle threads spin on the cores that the callers need. Measured on two cores
(seq 4096, 8 heads, head_dim 64, float32): 0.20 s with one BLAS thread per head, 0.34 s with BLAS left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: What NumPy's wheels, conda and Linux distributions call the same two functions.
_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")

_lock = threading.Lock()
_users = 0
_threads_before = 1


@contextlib.contextmanager
def single_threaded_blas() -> Iterator[int]:
    """Inside, a matrix product runs on the thread that calls it. Yields the number of threads BLAS would have
    used, so that ``OPENBLAS_NUM_THREADS`` and threadpoolctl keep their say.

    The setting is the process's: calls may overlap, and the last one out restores it. With a BLAS other than
    OpenBLAS nothing is changed, and the number of usable cores is yielded.
    """
    global _users, _threads_before
    library = _openblas()
    if library is None:
        yield usable_cores()
        return
    get, set_ = library
    with _lock:
        if _users == 0:
            _threads_before = get()
            set_(1)
        _users += 1
        threads = _threads_before
    try:
        yield threads
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                set_(_threads_before)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _openblas() -> tuple[Any, Any] | None:
    """(get, set) of the number of threads of the OpenBLAS that NumPy loaded; None when there is none."""
    for path in _loaded_openblas():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _NAMES:
            get, set_ = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if get is not None and set_ is not None:
                get.restype, get.argtypes = ctypes.c_int, []
                set_.restype, set_.argtypes = None, [ctypes.c_int]
                return get, set_
    return None


def _loaded_openblas() -> list[str]:
    """Files of OpenBLAS in this process, NumPy's own first."""
    bundled = Path(np.__file__).parent.with_name("numpy.libs")
    files = [str(f) for f in bundled.glob("*openblas*")] if bundled.is_dir() else []
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        files += dict.fromkeys(re.findall(r"(/\S*openblas\S*)$", maps, re.MULTILINE))
    return files
