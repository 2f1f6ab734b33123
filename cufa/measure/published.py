"""A sweep that others published and many people know: tiles of FlashAttention-1 in float32 at head dim 64, on an A10.
Only the order was published."""

from __future__ import annotations

#: Queries and keys of a block, and warps: the fastest tiling, then the slower ones.
BLOCK_WINNER = (64, 64, 4)
BLOCK_LOSERS = ((128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8))
