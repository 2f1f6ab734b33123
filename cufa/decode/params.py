"""The bytes of ``cuda_src/decode_params.cuh``: the one argument of every decode kernel.

Used by the CUDA backend and by the CPU executor of kernels; a test compiles the header and compares every
offset.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from ..core.params import SMALLEST_SCALE, Strides
from ..core.problem import ITEMSIZE
from .operands import DecodeOperands
from .plan import DecodePlan
from .problem import CACHE_ITEMSIZE
from .schedule import num_tiles, used_splits

#: Pointers of :class:`DecodeParams` that name an array of :class:`~cufa.decode.operands.DecodeOperands`.
ARRAYS = {
    "q": "q", "k_cache": "k_cache", "v_cache": "v_cache", "k_new": "k_new", "v_new": "v_new", "o": "out",
    "lse": "lse", "cache_seqlens": "cache_seqlens", "block_table": "block_table", "k_scale": "k_scale",
    "v_scale": "v_scale",
}  # fmt: skip

_STRIDED = ("q", "k_cache", "v_cache", "k_new", "v_new", "out")
_COUNTS = ("batch", "heads", "kv_heads", "tokens", "capacity", "page_size", "num_pages", "new_tokens")


#: Tensor maps of the caches come first, 64-byte aligned.
MAPS = {"k_map": "k_cache", "v_map": "v_cache"}
_ALIGNMENT = 64


class DecodeParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_ubyte * 128) for name in MAPS),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_void_p) for name in ("partial", "counters", "trace")),
        *((f"{name.replace('_cache', '').replace('out', 'o')}_stride", Strides) for name in _STRIDED),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (*_COUNTS, "group_size", "row_blocks", "num_splits")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("split_tiles", "used_splits")),
    ]


def pack(plan: DecodePlan, operands: DecodeOperands) -> DecodeParams:
    """Everything but the pointers, from the operands' strides."""
    problem = plan.problem
    storage = (ctypes.c_ubyte * (ctypes.sizeof(DecodeParams) + _ALIGNMENT))()
    params = DecodeParams.from_buffer(storage, -ctypes.addressof(storage) % _ALIGNMENT)
    sizes = {"q": ITEMSIZE[problem.dtype], "out": ITEMSIZE[problem.dtype]}
    for name, field in zip(_STRIDED, [f for f, t, *_ in DecodeParams._fields_ if t is Strides], strict=True):
        array = getattr(operands, name)
        if array is not None:
            setattr(
                params, field, _strides(array.strides, sizes.get(name, CACHE_ITEMSIZE[problem.cache_dtype]))
            )
    if operands.block_table is not None:
        params.table_stride = operands.block_table.strides[0] // 4
    for name in _COUNTS:
        setattr(params, name, getattr(problem, name))
    params.page_size = max(problem.page_size, 1)
    params.group_size, params.row_blocks = problem.group_size, plan.row_blocks
    params.num_splits = plan.num_splits
    tiles = num_tiles(problem.capacity, plan.config.block_kv)
    params.split_tiles = -(-tiles // plan.num_splits)
    params.used_splits = used_splits(problem.capacity, plan.num_splits, plan.config.block_kv)
    # A scale of 0 would turn the mask's -inf into NaN; the smallest normal float gives the same weights.
    params.scale_log2 = max(problem.scale * math.log2(math.e), SMALLEST_SCALE)
    return params


def _strides(byte_strides: Sequence[int], itemsize: int) -> Strides:
    return Strides(*(s // itemsize for s in byte_strides[:3]))


def pointers(operands: DecodeOperands) -> dict[str, Any]:
    """The arrays that are there, by the parameter that points to them."""
    found = {field: getattr(operands, name) for field, name in ARRAYS.items()}
    return {field: array for field, array in found.items() if array is not None}
