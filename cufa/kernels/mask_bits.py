"""Bits of masks (cuda_src/shared/mask_bits.cu): the argument of its kernels. They belong to no plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..problem.bits import WORD
from .config import ceil_div

SOURCE, PARAMETER, WARPS, NUM_MEMBERS = "shared/mask_bits.cu", "BitsParams", 8, 38


def blocks(sizes: Sequence[int]) -> int:
    """Thread blocks of WARPS warps for (batch, heads, rows, keys): a warp makes 32 × 32 bits."""
    squares = math.prod(sizes[:2]) * ceil_div(sizes[2], WORD) * ceil_div(sizes[3], WORD)
    return ceil_div(squares, WARPS)


def numbers(
    arrays: Sequence[Any], pointers: Sequence[int], by_row: int, words: int, sizes: Sequence[int],
    edges: Sequence[int] = (), sequences: int = 0,
) -> list[int]:  # fmt: skip
    """The members of ``BitsParams``, of 8 bytes each, from arrays and their addresses. ``edges``: addresses of
    cu_seqlens of queries and keys of packed sequences."""
    missing = 4 - len(arrays)
    forms = [n for x in arrays for n in _form(x)] + [0] * 6 * missing
    packed = [*(edges or (0, 0)), sequences]
    return [*pointers, *[0] * missing, *forms, by_row, words, *sizes, sizes[3] - sizes[2], *packed]


def _form(x: Any) -> list[int]:
    """``ScoreArray``: strides in elements, then sizes in pairs."""
    missing = [0] * (4 - x.ndim)
    a, b, c, d = list(x.shape) + missing
    return [*(n // x.itemsize for n in x.strides), *missing, a | b << 32, c | d << 32]
