"""The bytes of ``cuda_src/params.cuh``: the one argument of every attention kernel.

Used by the CUDA backend and by the CPU executor of kernels; a test compiles the header and compares
every offset.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from .problem import Problem


class Strides(ctypes.Structure):
    """Elements between neighbours along batch, head and sequence."""

    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("seq", ctypes.c_int64)]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("q_stride", Strides),
        ("k_stride", Strides),
        ("v_stride", Strides),
        ("o_stride", Strides),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
        ("heads_per_group", ctypes.c_int32),
    ]


#: One record a work item (query block × head), written by trace builds.
TRACE_RECORD = np.dtype(
    [
        ("start_ns", np.uint64),
        ("end_ns", np.uint64),
        ("sm", np.uint32),
        ("q_block", np.uint32),
        ("head", np.uint32),
        ("batch", np.uint32),
        ("tiles_visited", np.uint32),
        ("tiles_skipped", np.uint32),
        ("tiles_unmasked", np.uint32),
        ("thread_block", np.uint32),
    ]
)

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def pack(problem: Problem, strides: Sequence[Sequence[int]], heads_per_group: int = 1) -> AttentionParams:
    """Everything but the pointers. ``strides`` are those of q, k, v and o in bytes, axes in the order
    (batch, head, seqlen, head_dim); the stride of an axis of length 1 does not matter."""
    p = AttentionParams()
    for name, byte_strides in zip(("q_stride", "k_stride", "v_stride", "o_stride"), strides, strict=True):
        setattr(p, name, Strides(*(s // problem.itemsize for s in byte_strides[:3])))
    p.batch, p.heads, p.kv_heads = problem.batch, problem.heads, problem.kv_heads
    p.seqlen_q, p.seqlen_k = problem.seqlen_q, problem.seqlen_k
    p.heads_per_group = heads_per_group
    # A scale of 0 would turn the mask's -inf into NaN; the smallest normal float gives the same weights.
    p.scale_log2 = max(problem.scale * math.log2(math.e), SMALLEST_SCALE)
    return p
