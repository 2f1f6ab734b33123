"""NVIDIA's driver library, called through ctypes: without CuPy, or where CuPy's own call costs more."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def driver(keep_gil: bool = False) -> ctypes.CDLL:
    """The library. ``keep_gil`` is for functions that neither wait nor call back: releasing the GIL only costs time.

    Raises OSError where there is no driver.
    """
    return (ctypes.PyDLL if keep_gil else ctypes.CDLL)("libcuda.so.1")
