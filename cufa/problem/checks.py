"""Checks of single arguments: arrays, flags, counts, windows, diagonals. Each error names the argument.
CuPy is imported only for device arrays."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .integers import INT32, Integers
from .mask import DIAGONALS
from .problem import MAX_DIAGONAL, MAX_SIZE

_INT32 = np.dtype(np.int32)
_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost


def is_device_array(x: object) -> bool:
    """True for a cupy.ndarray, without importing CuPy."""
    return isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ()))


def as_array(name: str, x: Any) -> Any:
    """``x`` as a NumPy or CuPy array over the same memory. A subclass of NumPy's array becomes a plain array, because
    its functions may behave differently.

    Raises TypeError for an object that is not an array, for one that records gradients, and for a masked array.
    """
    check_not_masked(name, x)
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if is_device_array(x):
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError(
            f"{name} requires grad, and no graph is recorded here: use cufa.torch.attention, or {name}.detach()"
        )
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        on_cpu = x.__dlpack_device__()[0] in _DLPACK_CPU
        try:
            if on_cpu and "bfloat16" in str(getattr(x, "dtype", "")):
                return _host_bfloat16(x)
            return np.from_dlpack(x) if on_cpu else import_cupy(f"{name}: {array_kind(x)}").from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name}: {array_kind(x)} could not be read through DLPack: {error}") from error
    if hasattr(x, "__cuda_array_interface__"):
        return import_cupy(f"{name}: {array_kind(x)}").asarray(x)
    raise TypeError(
        f"{name} must be an array (NumPy, CuPy, or any with DLPack or __cuda_array_interface__), "
        f"not {array_kind(x)}; use numpy.asarray or cupy.asarray"
    )


def _host_bfloat16(x: Any) -> Any:
    """A bfloat16 array of PyTorch (viewed by its bits) or JAX (converts itself): NumPy's DLPack has no bfloat16."""
    import ml_dtypes

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return np.from_dlpack(x.view(torch.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(x)


def check_not_masked(name: str, x: Any) -> None:
    """Raises TypeError for a masked array of NumPy, whose mask would be ignored."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is {array_kind(x)}, whose mask attention does not read: pass {name}.filled(0), and say which keys "
            "are seen with window= or mask="
        )


def import_cupy(what: str) -> Any:
    """CuPy. Raises TypeError if CuPy is missing; ``what`` names the GPU array that needs it."""
    try:
        import cupy
    except ImportError as error:
        raise TypeError(f"{what} lives on a GPU, which needs CuPy: {install('cuda13')}") from error
    return cupy


def install(extra: str) -> str:
    """The pip command that installs an extra from cufa's own source: this checkout, the folder or wheel that pip was
    given, or the package index."""
    import importlib.metadata
    import json

    root, origin = Path(__file__).parents[2], ""
    if (root / "pyproject.toml").is_file():
        return f"pip install '{root}[{extra}]'"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.distribution("cufa").read_text("direct_url.json")
        origin = f" @ {json.loads(text)['url']}" if text else ""
    return f"pip install 'cufa[{extra}]{origin}'"


def importable(module: str) -> bool:
    """Whether a module is installed; it is not imported."""
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def array_kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def check_window(value: Any, name: str = "window") -> tuple[int | None, int | None]:
    """``value`` as (left, right), each an integer from 0 up or None. Raises TypeError or ValueError."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name}={value!r}: it is a pair (left, right) of integers from 0 up, or None each, such as (1023, 0)"
        )
    return _check_side(name, "left", value, value[0]), _check_side(name, "right", value, value[1])


def _check_side(name: str, side: str, value: Any, size: Any) -> int | None:
    if size is None:
        return None
    try:
        size = _integer(size)
    except TypeError:
        raise TypeError(
            f"{name}={value!r}: {side} must be an integer from 0 up, or None for no bound, not {size!r}"
        ) from None
    if size > MAX_SIZE:
        raise ValueError(f"{name}={value!r}: {side} is at most {MAX_SIZE:,}; for no bound pass None")
    if size < 0:
        raise ValueError(
            f"{name}={value!r}: {side} must be at least 0 (0: up to the query's own position); "
            "for no bound pass None"
        )
    return int(size)


def check_diagonal(diagonal: Any, name: str = "diagonal") -> str | int:
    if isinstance(diagonal, str):
        if diagonal in DIAGONALS:
            return diagonal
        raise ValueError(f"{name}={diagonal!r} is not known; use 'bottom-right', 'top-left' or an integer")
    try:
        diagonal = _integer(diagonal)
    except TypeError:
        raise TypeError(f"{name}={diagonal!r} must be 'bottom-right', 'top-left' or an integer") from None
    if abs(diagonal) > MAX_DIAGONAL:
        raise ValueError(
            f"{name}={diagonal!r} must be within ±{MAX_DIAGONAL:,}: kernels count positions with 32 bits"
        )
    return int(diagonal)


def _integer(value: Any) -> int:
    """``value`` as an int. Raises TypeError for a boolean, or a value that is no integer."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


def check_number(name: str, value: Any, takes: str) -> float:
    """``value`` as a float; inf if it is too large. ``takes``: what the argument may be, for the error.

    Raises TypeError for booleans, text, arrays with axes, and other objects that are no number."""
    try:
        if (
            isinstance(value, (bool, str, bytes))
            or str(getattr(value, "dtype", "")) == "bool"
            or np.ndim(value)
        ):
            raise TypeError
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {takes}, not {shown(value)}") from None


def check_count(name: str, value: Any, least: int = 0) -> int:
    """``value`` as an integer from ``least`` up. Raises TypeError or ValueError."""
    try:
        count = _integer(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer from {least} up, not {shown(value)}") from None
    if not least <= count <= MAX_SIZE:
        raise ValueError(f"{name}={count} must be from {least} to {MAX_SIZE:,}")
    return count


def check_counts(name: str, value: Any) -> int | Integers:
    """One integer from 0 up, or an array with one per sequence. Raises TypeError or ValueError."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0:
        found = integers(name, value, axes=("(batch,)",))
        if isinstance(found, np.ndarray):
            check_from_0(name, found)
        return Integers(found)
    return check_count(name, value)


def integers(name: str, value: Any, axes: tuple[str, ...]) -> Any:
    """``value`` as an int32 array, NumPy or CuPy, with the axes that one of ``axes`` names, such as "(batch,
    seqlen_k)".

    Values on a GPU are not read. Raises TypeError or ValueError naming the argument.
    """
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ValueError(
                f"{name} is {shown(value)} of rows that differ in length: pad them with 0"
            ) from None
        value = value.astype(np.int32) if value.size == 0 else value
    x = as_array(name, value)
    if x.dtype.kind not in "iu":
        cure = f"; convert with {name}.astype('int32')" if x.dtype.kind in "fb" else ""
        raise TypeError(f"{name} is {x.dtype}: it takes integers{cure}")
    allowed = [text.count(",") + 1 - text.endswith((",)", "()")) for text in axes]
    if x.ndim not in allowed:
        raise ValueError(f"{name} has shape {x.shape}: it takes {' or '.join(axes)}")
    if is_device_array(x):
        if x.dtype != _INT32:
            raise TypeError(
                f"{name} is {x.dtype}; on a GPU it must be int32: convert with {name}.astype('int32')"
            )
        return x
    if x.size and not (INT32.min <= x.min() and x.max() <= INT32.max):
        worst = x.min() if x.min() < INT32.min else x.max()
        raise ValueError(f"{name} holds {worst}, which does not fit int32: kernels count with 32 bits")
    return x.astype(np.int32)


def check_from_0(name: str, x: Any) -> None:
    """Raises ValueError, naming the first value below 0."""
    wrong = np.argwhere(x < 0)
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(f"{name}{list(place)} is {x[place]}: it must be at least 0")


def check_flag(name: str, value: Any, cure: str = "") -> bool:
    """``value`` as bool: True, False, NumPy's booleans, 1 or 0. Raises TypeError otherwise."""
    integer = isinstance(value, (int, np.integer))
    numpy_boolean = isinstance(value, (np.bool_, np.ndarray)) and value.dtype == bool and value.ndim == 0
    if not (numpy_boolean or (integer and value in (0, 1))):
        raise TypeError(f"{name} must be True or False, not {shown(value)}{cure}")
    return bool(value)


def check_choice(name: str, value: Any, choices: Mapping[Any, str]) -> None:
    """Raises ValueError unless ``value`` is a key of ``choices``, which maps an option's values to their text in the
    error."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use {' or '.join(choices.values())}")


def shown(value: Any) -> str:
    """A scalar as text; for any other value its type, because the text may be long."""
    if value is None or np.isscalar(value):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def module_of(x: Any) -> Any:
    """numpy or cupy."""
    if is_device_array(x):
        import cupy

        return cupy
    return np


def check_sizes(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """The shape as Python integers. Raises TypeError or ValueError: the caller may pass a shape in place of an
    array."""
    for n in shape:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"{name} has shape {shape}: sizes are integers, not {type(n).__qualname__}")
        if n < 0:
            raise ValueError(f"{name} has shape {shape}: a size is at least 0")
        if n > MAX_SIZE:
            raise ValueError(f"{name} has shape {shape}: kernels count with 32 bits, up to {MAX_SIZE:,}")
    return tuple(int(n) for n in shape)
