"""Sums of gradients that several calls and ranks contribute to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from ..problem.checks import is_device_array
from .group import Group, empty
from .placement import Range


class Sum:
    """An array (batch, heads, tokens, head_dim) to which boxes of heads and tokens are added, in the caller's order.
    The first box at a place is copied there. ``like`` gives shape, place and dtype; ``wide``: sums are float32."""

    def __init__(self, group: Group, rank: int, like: Any, wide: bool) -> None:
        self._group, self._rank, self._like = group, rank, like
        self._dtype = np.dtype("float32") if wide and like.dtype.itemsize < 4 else like.dtype
        self._array: Any = None
        self._boxes: list[tuple[Range, Range]] = []

    def add(self, heads: Range, rows: Range, x: Any) -> None:
        everything = (heads, rows) == ((0, self._like.shape[1]), (0, self._like.shape[2]))
        if everything and not self._boxes and x.dtype == self._dtype and x.flags.c_contiguous:
            self._array = x
            self._boxes.append((heads, rows))
            return
        if self._array is None:
            self._array = empty(self._group, self._rank, self._like.shape, self._like, self._dtype)
        for h, r in self._cells(heads, rows):
            target = self._array[:, slice(*h), slice(*r)]
            part = x[:, h[0] - heads[0] : h[1] - heads[0], r[0] - rows[0] : r[1] - rows[0]]
            if self._has(h, r):
                _add(target, part)
            else:
                target[...] = part
        self._boxes.append((heads, rows))

    def total(self) -> Any:
        """The sum in the dtype of ``like``; 0 where nothing was added."""
        shape = self._like.shape
        if self._array is None:
            self._array = empty(self._group, self._rank, shape, self._like)
        for h, r in self._cells((0, shape[1]), (0, shape[2])):
            if not self._has(h, r):
                self._array[:, slice(*h), slice(*r)] = 0
        return self._array.astype(self._like.dtype, copy=False)

    def _cells(self, heads: Range, rows: Range) -> list[tuple[Range, Range]]:
        """The box in pieces, each of which every earlier box holds or misses."""
        boxes = self._boxes
        of_heads = {*heads, *(x for h, _ in boxes for x in h if heads[0] < x < heads[1])}
        of_rows = {*rows, *(x for _, r in boxes for x in r if rows[0] < x < rows[1])}
        return [
            (h, r) for h in itertools.pairwise(sorted(of_heads)) for r in itertools.pairwise(sorted(of_rows))
        ]

    def _has(self, heads: Range, rows: Range) -> bool:
        return any(
            h[0] <= heads[0] and heads[1] <= h[1] and r[0] <= rows[0] and rows[1] <= r[1]
            for h, r in self._boxes
        )


def _add(target: Any, x: Any) -> None:
    if is_device_array(target):
        _adder()(x, target)
    elif target.dtype.itemsize < 4:
        target[...] = target.astype(np.float32) + x.astype(np.float32)
    else:
        target += x.astype(target.dtype)


@functools.cache
def _adder() -> Any:
    import cupy

    return cupy.ElementwiseKernel("T x", "S sum", "sum = S(float(sum) + float(x))", "cufa_add")
