"""Masks that are matrices, in packed sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .bits import Bits
from .mask_family import Mask
from .where import Where


def of_sequences(
    mask: Mask, batch: int, heads: int, kv_heads: int, most: tuple[int, int], on_gpu: Any = None
) -> Mask:
    """A matrix as bits, of which each sequence reads its first rows and keys; other masks as they are. ``most``:
    queries and keys of the longest sequences, which axes of size 1 get; ``on_gpu`` as for :meth:`Where.bound`."""
    found: Any = mask
    if isinstance(mask, Where) and mask.takes_booleans:
        rows, keys = (m if n == 1 else n for n, m in zip(mask.arrays["mask"].shape[2:], most, strict=True))
        found = mask.bound(batch, heads, kv_heads, rows, keys, on_gpu)
    elif mask.matrix is not None and not isinstance(mask, Bits):  # a band, or columns
        batches, masks = mask.spread
        found = Bits.of(
            np.array([[mask.dense(*mask.matrix, b, h) for h in range(masks)] for b in range(batches)])
        )
    return dataclasses.replace(found, own_diagonal=True) if isinstance(found, Bits) else mask
