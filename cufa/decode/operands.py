"""The arrays of one call, in canonical axis order: views, never copies."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class DecodeOperands:
    """NumPy arrays for the CPU path, CuPy arrays of one device for the CUDA backend."""

    q: Any
    """(batch, heads, tokens, head_dim)"""
    k_cache: Any
    """(batch, kv_heads, capacity, head_dim), or (num_pages, kv_heads, page_size, head_dim) if paged"""
    v_cache: Any
    out: Any
    """As q."""
    cache_seqlens: Any = None
    """int32 (batch,), contiguous: keys valid before the call. None: all of the capacity."""
    block_table: Any = None
    """int32 (batch, max_pages), last axis contiguous."""
    k_new: Any = None
    """(batch, kv_heads, new_tokens, head_dim), of the cache's dtype."""
    v_new: Any = None
    k_scale: Any = None
    """float32 (kv_heads,), contiguous: k = scale * e4m3."""
    v_scale: Any = None
    lse: Any = None
    """float32 (batch, heads, tokens), contiguous, natural log; None when not wanted."""
