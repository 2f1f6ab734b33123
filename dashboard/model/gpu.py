"""Whether a GPU is here, asked of the driver without loading CuPy or making a context."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def gpu_count() -> int:
    """GPUs that the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
