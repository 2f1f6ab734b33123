"""Arrays of e4m3 and of 16 bits on a GPU, by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.calls.quantize import QuantizedValues

ROLES = ("q", "k", "v")


def device_array(cp: Any, x: np.ndarray) -> Any:
    """CuPy's copy, by bits, as bfloat16 may have no arithmetic."""
    return cp.asarray(x.view(f"i{x.itemsize}")).view(x.dtype)


def bits(x: Any) -> np.ndarray:
    x = x.data if isinstance(x, QuantizedValues) else x
    return np.asarray(x if isinstance(x, np.ndarray) else x.get()).view(np.uint8)
