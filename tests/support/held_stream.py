"""A stream of a GPU that is held until a test lets it go: what is queued behind it has not begun, however busy the
machine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_HOLD = """
extern "C" __global__ void hold(const volatile int* released, long long cycles) {
  const auto start = clock64();
  while (!*released && clock64() - start < cycles);
}"""
_MOST_CYCLES = 40_000_000_000  # some 20 s: a call that waits for the stream fails its test, and does not hang


def hold(cp: Any) -> Callable[[], None]:
    """Hold CuPy's current stream; returns what lets it go."""
    import cupyx

    released = cupyx.zeros_pinned(1, np.int32)
    cp.RawKernel(_HOLD, "hold")((1,), (1,), (np.uint64(released.ctypes.data), np.int64(_MOST_CYCLES)))

    def release() -> None:
        released[0] = 1

    return release
