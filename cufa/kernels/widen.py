"""The kernel that converts e4m3 to 16-bit elements (cuda_src/shared/widen.cu). It belongs to no plan."""

from __future__ import annotations

from typing import Any

from .config import Launch, ceil_div

SOURCE, ENTRY, PARAMETER, THREADS, NUM_MEMBERS = "shared/widen.cu", "widen_e4m3", "WidenParams", 256, 11


def constants(head_dim: int, dtype: str, aligned: bool) -> dict[str, int | bool]:
    """``aligned``: rows begin at multiples of 16 bytes."""
    return {"HEAD_DIM": head_dim, "BFLOAT16": dtype == "bfloat16", "ALIGNED": aligned}


def launch(shape: tuple[int, ...]) -> Launch:
    """The launch for rows (batch, heads, seqlen, head_dim)."""
    batch, heads, seqlen, head_dim = shape
    return Launch(ENTRY, (ceil_div(seqlen * (head_dim // 16), THREADS), batch * heads, 1), THREADS, 0)


def numbers(
    x: Any, pointers: tuple[int, int, int], scale_shape: tuple[int, ...], mode: str, block: int
) -> list[int]:
    """The members of ``WidenParams``. ``pointers``: of x, out and scale. ``mode``: of
    :data:`cufa.problem.float8.MODES`."""
    _, heads, seqlen, _ = x.shape
    scales = scale_shape[2] if mode in ("block", "token") else 1
    head_stride, batch_stride = (0, 0) if mode == "tensor" else (scales, heads * scales)
    share = {"token": 1, "block": block}.get(mode, max(seqlen, 1))
    return [*pointers, heads, seqlen, *x.strides[:3], batch_stride, head_stride, share]
