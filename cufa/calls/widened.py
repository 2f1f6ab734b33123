"""16-bit queries over keys and values of e4m3: a first launch converts keys and values to 16 bits, then a kernel for
16-bit inputs runs. The conversion reads and writes 3 bytes per element: a few percent of the time from 4,096 queries
on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import float8
from ..problem.checks import as_array, is_device_array
from ..problem.element import ELEMENTS
from ..problem.lengths import DENSE
from .arrays import check_last_axis
from .dispatch import cuda_module
from .float8 import checked_numbers
from .quantize import QuantizedValues
from .shapes import AXES, LAYOUTS, check_layout

REASON = "keys and values of e4m3: a launch before attention (widen_e4m3) writes them as {dtype}, {bytes:,} B"


def keys_and_values(
    q: Any, k: Any, v: Any, scales: tuple[Any, Any], layout: str, refused: dict[str, Any]
) -> list[Any]:
    """k and v in q's dtype. ``refused``: arguments that only calls with q of e4m3 take. Raises TypeError or
    ValueError, naming the argument."""
    for name, x in refused.items():
        if x is not None:
            raise ValueError(
                f"{name}={x!r} with q of {as_array('q', q).dtype}: it is for q of e4m3; leave it out"
            )
    dtype = str(as_array("q", q).dtype)
    served = ("float16", "bfloat16") if is_device_array(q) else ("float16", "bfloat16", "float32")
    if dtype not in served:
        raise TypeError(f"q is {dtype} over keys of e4m3: it takes {', '.join(served)}")
    return [
        widened(name, x, scale, dtype, layout) for name, x, scale in zip("kv", (k, v), scales, strict=True)
    ]


def widened(name: str, x: Any, scale: Any, dtype: str, layout: str, role: str = "k") -> Any:
    """``scale · x`` in ``dtype``, in x's layout and where x is."""
    check_layout(layout)
    if isinstance(x, QuantizedValues):
        if is_device_array(x.data):
            raise TypeError(
                f"{name} is transposed (quantize with role='v'), which only q of e4m3 takes: for q of 16 bits quantise "
                f"{name} with role='k'"
            )
        scale, x = x.scale if scale is None else scale, x.rows()
    x = as_array(name, x)
    if not float8.is_float8(x) or x.ndim != 4:
        raise TypeError(
            f"{name} is {x.dtype} of {x.ndim} axes; with a scale it is e4m3 (uint8), {AXES[layout]}"
        )
    if scale is None:
        raise ValueError(f"{name}_scale is missing: {name} is {name}_scale times its e4m3 elements")
    check_last_axis(name, x)
    rows = x.view(np.uint8).transpose(LAYOUTS[layout])
    batch, heads, seqlen, head_dim = rows.shape
    if head_dim % float8.HEAD_DIM_STEP:
        raise ValueError(
            f"head_dim is {head_dim} (last axis of {name}); e4m3 takes multiples of {float8.HEAD_DIM_STEP}"
        )
    scale = (
        np.asarray(scale) if isinstance(scale, (int, float, np.number)) else as_array(f"{name}_scale", scale)
    )
    block = float8.block_of(role, head_dim)
    mode = float8.mode_of(f"{name}_scale", scale.shape, block, heads, batch, seqlen, DENSE)
    scale = checked_numbers(f"{name}_scale", scale)
    if not is_device_array(x):
        from ..run.cpu.quantize import widened as on_host

        return on_host(rows, scale, mode, block, ELEMENTS[dtype].dtype).transpose(LAYOUTS[layout])
    return _widened_on_gpu(rows, scale, mode, block, dtype, name).transpose(LAYOUTS[layout])


def _widened_on_gpu(rows: Any, scale: Any, mode: str, block: int, dtype: str, name: str) -> Any:
    """Widen on the GPU, in memory of CuPy's pool. Refuses captures: a graph would not keep this memory."""
    cuda_module()  # refuses forks of a process that has used a GPU
    import cupy

    from ..run.cuda.widen import widen

    if cupy.cuda.get_current_stream().is_capturing():
        raise ValueError(
            f"{name} of e4m3 is widened in memory that a graph does not keep: widen it outside of the capture, "
            f"{name}16 = cufa.dequantize({name}, {name}_scale, role='k', dtype={dtype!r})"
        )
    with cupy.cuda.Device(rows.data.device_id):
        out = cupy.empty(rows.shape, ELEMENTS[dtype].dtype)
        widen(rows, out, cupy.asarray(scale), mode, block, dtype)
    return out
