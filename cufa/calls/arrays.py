"""Checks of a call's arrays: dtypes, shapes, places, memory; and the Problem that they state.

No function here launches or allocates anything on a GPU; everything that is wrong with a call is
found here, before any work is done.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels.params import MAX_SCALE
from ..plan.operation import Operand
from ..problem.as_array import array_kind as _kind
from ..problem.as_array import as_array as as_array
from ..problem.as_array import check_not_masked as check_not_masked
from ..problem.as_array import is_device_array as is_device_array
from ..problem.checks import check_sizes as check_sizes
from ..problem.mask import Mask
from ..problem.options import Options
from ..problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, Problem, default_scale
from .array_memory import Array, address, alignment, overlaps_itself, shares_memory

LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
AXES = {"bhsd": "(batch, heads, seqlen, head_dim)", "bshd": "(batch, seqlen, heads, head_dim)"}

#: Elements that flash_attention takes; the last on a CPU only.
FORWARD_DTYPES = ("float16", "bfloat16", "float32", "float64")


def same_place(arrays: dict[str, Array]) -> None:
    """All on the host, or all on one GPU. Raises TypeError or ValueError otherwise."""
    (first, q), *others = arrays.items()
    for name, x in others:
        if is_device_array(x) != is_device_array(q):
            raise TypeError(
                f"{name} is {_kind(x)} but {first} is {_kind(q)}: move one with cupy.asarray or .get()"
            )
        if is_device_array(x) and x.data.device_id != q.data.device_id:
            raise ValueError(
                f"{name} is on GPU {x.data.device_id} but {first} is on GPU {q.data.device_id}: "
                f"copy it with cupy.asarray inside `with cupy.cuda.Device({q.data.device_id})`"
            )


def dtype_name(arrays: dict[str, Array], on_gpu: bool) -> str:
    """The dtype that q, k and v share. Raises TypeError when they differ or it is not served."""
    (first, q), *others = arrays.items()
    name = str(q.dtype)
    supported = [d for d in FORWARD_DTYPES if not (on_gpu and d == "float64")]
    if name not in supported:
        module = "cupy" if is_device_array(q) else "numpy"
        cure = f".astype({module}.float32)"
        if name == "float64":
            cure += ", or .astype(ml_dtypes.bfloat16) for the tensor cores' full speed"
        raise TypeError(
            f"{first} is {name}; attention on the {'GPU' if on_gpu else 'CPU'} takes {', '.join(supported)}: "
            f"convert with {first}{cure}"
        )
    for other, x in others:
        if x.dtype != q.dtype:
            raise TypeError(
                f"{other} is {x.dtype} but {first} is {name}: convert with {other}.astype({first}.dtype)"
            )
    return name


def asked_dtype(dtype: Any) -> str:
    """The name of a dtype: a name, a NumPy dtype or a scalar type (ml_dtypes.bfloat16); else the value's text."""
    if isinstance(dtype, str):
        return dtype
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def resolve_precision(dtype: str, precision: str | None) -> str:
    """Problem.precision for a dtype. CuPy's CUPY_TF32=1 is honoured when nothing is asked for."""
    if dtype != "float32":
        if precision is not None:
            raise ValueError(
                f"precision={precision!r} is a choice for float32 inputs only; {dtype} takes precision=None"
            )
        return "native"
    if precision is None:
        return "tf32" if os.environ.get("CUPY_TF32") == "1" else "float32"
    if not isinstance(precision, str) or precision not in ("float32", "tf32"):
        raise ValueError(f"precision={precision!r} is not known; use None, 'float32' or 'tf32'")
    return precision


def make_problem(
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    options: Options,
) -> Problem:
    """Check the shapes of q, k and v and the options, and state the problem.

    Raises ValueError naming the argument.
    """
    q_shape, k_shape, v_shape = shapes
    layout = options.layout
    check_layout(layout)
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {shape}; layout {layout!r} takes four axes {AXES[layout]}")
    q_shape, k_shape, v_shape = (
        check_sizes(name, shape) for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape))
    )
    batch, heads, seqlen_q, head_dim = (q_shape[i] for i in LAYOUTS[layout])
    k_batch, kv_heads, seqlen_k, k_head_dim = (k_shape[i] for i in LAYOUTS[layout])
    if v_shape != k_shape:
        raise ValueError(f"v has shape {v_shape} but k has {k_shape}: they must be equal")
    if k_batch != batch:
        raise ValueError(f"k has batch {k_batch} but q has {batch}: they must be equal (layout {layout!r})")
    if k_head_dim != head_dim:
        raise ValueError(f"k has head_dim {k_head_dim} but q has {head_dim}: they must be equal")
    check_head_dim(head_dim)
    check_heads(heads, "k", kv_heads, f"layout {layout!r} reads the shapes as {AXES[layout]}")
    check_mask(options.mask, batch, kv_heads, seqlen_k)
    return Problem(
        batch,
        heads,
        kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        dtype,
        mask=options.mask,
        scale=check_scale(options.scale, head_dim),
        softcap=options.softcap,
        precision=resolve_precision(dtype, options.precision),
        deterministic=options.deterministic,
    )


def check_mask(mask: Mask, batch: int, kv_heads: int, seqlen_k: int | None) -> None:
    """``seqlen_k`` None: sequences have different lengths."""
    misfit = mask.misfit(batch, kv_heads, seqlen_k)
    if misfit is not None:
        raise ValueError(f"mask, {mask}, {misfit}")


def check_layout(layout: str) -> None:
    check_choice("layout", layout, {name: f"{name!r} {axes}" for name, axes in AXES.items()})


def check_choice(name: str, value: Any, choices: Mapping[Any, str]) -> None:
    """``choices`` maps what an option may be to how the error writes it."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use {' or '.join(choices.values())}")


def check_head_dim(head_dim: int) -> None:
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        cure = ""
        if 0 < head_dim < MAX_HEAD_DIM:
            cure = f": pad q, k and v with zeros and pass scale={head_dim}**-0.5"
        raise ValueError(
            f"head_dim is {head_dim} (last axis of q); it must be a multiple of {HEAD_DIM_STEP} from "
            f"{HEAD_DIM_STEP} to {MAX_HEAD_DIM}{cure}"
        )


def check_heads(heads: int, name: str, kv_heads: int, reading: str) -> None:
    if (heads > 0 and kv_heads == 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads and {name} has {kv_heads}: query heads must be a multiple of key/value "
            f"heads ({reading})"
        )


def check_rows(name: str, shape: tuple[int, ...], expected: tuple[int, ...], layout: str) -> None:
    """``shape`` is one number per query, as the forward returns them."""
    if shape == expected:
        return
    hint, words = "", "(heads, total_q)" if len(expected) == 2 else "(batch, heads, seqlen_q)"
    if len(expected) == 3 and shape == (expected[0], expected[2], expected[1]):
        hint = f"; it is so for layout={layout!r} too: use {name}.swapaxes(1, 2) and make that contiguous"
    raise ValueError(f"{name} has shape {shape}; it takes one number per query, {words} = {expected}{hint}")


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return default_scale(head_dim)
    try:
        # float() would take these.
        if isinstance(scale, (bool, str, bytes)) or str(getattr(scale, "dtype", "")) == "bool":
            raise TypeError(scale)
        value = float(scale)
    except (TypeError, ValueError) as error:
        raise TypeError(f"scale must be a number or None, not {_kind(scale)}") from error
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"scale={value} must be finite and at least 0; to negate the scores, negate q")
    if value > MAX_SCALE:
        raise ValueError(
            f"scale={value} is too large: kernels multiply by it in float32, in units of log2, so it is at most "
            f"{MAX_SCALE:.4g}; scale q instead"
        )
    return value


def check_last_axis(name: str, x: Array) -> None:
    if x.size and x.strides[-1] != x.itemsize:
        module = "cupy" if is_device_array(x) else "numpy"
        raise ValueError(
            f"{name} has strides {x.strides}: its last axis (head_dim) must be contiguous; "
            f"use {module}.ascontiguousarray({name})"
        )


def check_contiguous(name: str, x: Array) -> None:
    """For arrays that kernels read by their address alone: lengths, scales, rows of a table."""
    if x.shape[-1] > 1 and x.size and x.strides[-1] != x.itemsize:
        module = "cupy" if is_device_array(x) else "numpy"
        raise ValueError(
            f"{name} has strides {x.strides}: its last axis must be contiguous; "
            f"use {module}.ascontiguousarray({name})"
        )


def check_address(name: str, x: Array) -> None:
    """GPUs load whole elements, and no fewer than two bytes, from multiples of their size."""
    unit = max(2, x.itemsize) if x.ndim == 4 else x.itemsize
    if is_device_array(x) and x.size and alignment(x) < unit:
        raise ValueError(
            f"{name} lies at address {address(x):#x} with strides {x.strides}: kernels read {unit} bytes at "
            f"a time, from multiples of {unit}; use {name}.copy(), or a buffer whose rows start there"
        )


def check_result(operand: Operand, x: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """``x`` can take the result ``operand``, of that shape and dtype."""
    name = operand.name
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape} but the result has {shape}")
    if x.dtype != dtype:
        cure = (
            f"allocate it with empty_like({operand.like})" if isinstance(operand.like, str) else "convert it"
        )
        raise TypeError(f"{name} is {x.dtype} but the result is {dtype}: {cure}")
    if operand.stride:
        check_last_axis(name, x)
    elif not x.flags.c_contiguous:
        raise ValueError(f"{name} has strides {x.strides} for shape {shape}: it must be contiguous")
    check_address(name, x)
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only: pass a writeable array, or a copy")


def check_apart(name: str, there: Mapping[str, Array]) -> None:
    """The result ``there[name]`` shares no memory with another array of the call, nor with itself."""
    x = there[name]
    if overlaps_itself(x):
        raise ValueError(f"{name} has strides {x.strides} for shape {x.shape}: elements share memory")
    for other, y in there.items():
        if other != name and shares_memory(x, y):
            raise ValueError(
                f"{name} overlaps {other} in memory: it is written to while {other} is still in use; pass a "
                "separate array"
            )
