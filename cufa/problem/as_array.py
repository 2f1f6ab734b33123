"""Anything that is an array, as a NumPy or CuPy array over the same memory. CuPy is imported only for device arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost


def is_device_array(x: object) -> bool:
    """True for a cupy.ndarray, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def as_array(name: str, x: Any) -> Any:
    """``x`` as a NumPy or CuPy array over the same memory.

    Raises TypeError when it is no array, or one whose mask would be ignored.
    """
    check_not_masked(name, x)
    if isinstance(x, np.ndarray) or is_device_array(x):
        return x
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        on_cpu = x.__dlpack_device__()[0] in _DLPACK_CPU
        try:
            return np.from_dlpack(x) if on_cpu else _import_cupy(name, x).from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            hint = "; NumPy has no bfloat16 of its own: view the bits as ml_dtypes.bfloat16" if on_cpu else ""
            raise TypeError(
                f"{name}: {array_kind(x)} could not be read through DLPack: {error}{hint}"
            ) from error
    if hasattr(x, "__cuda_array_interface__"):
        return _import_cupy(name, x).asarray(x)
    raise TypeError(
        f"{name} must be an array (NumPy, CuPy, or any with DLPack or __cuda_array_interface__), "
        f"not {array_kind(x)}; use numpy.asarray or cupy.asarray"
    )


def check_not_masked(name: str, x: Any) -> None:
    """Raises TypeError for an array of NumPy's that has a mask, which would be ignored."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is {array_kind(x)}, whose mask attention does not read: pass {name}.filled(0), and say which keys "
            "are seen with window= or mask="
        )


def _import_cupy(name: str, x: Any) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name}: {array_kind(x)} lives on a GPU, which needs CuPy: pip install 'cufa[cuda13]'"
        ) from error
    return cupy


def array_kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
