"""Sums of gradients that several calls and ranks contribute to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from ..problem.checks import is_device_array
from .group import Group, empty
from .placement import Range

_WAITING = 4
"""Most contributions that wait. More are added up in float32: memory does not grow with the number of ranks."""


class Sum:
    """An array (batch, heads, tokens, head_dim) that is the sum of boxes of heads and tokens, in the caller's order.

    The first box at a place may be written there directly (:meth:`place`). Other boxes wait, and one pass adds them in
    float32. ``like`` gives shape and device; ``dtype`` is that of the boxes."""

    def __init__(self, group: Group, rank: int, like: Any, dtype: Any) -> None:
        self._group, self._rank, self._like, self.dtype = group, rank, like, np.dtype(dtype)
        self._array: Any = None
        self._there: list[tuple[Range, Range]] = []
        """Boxes that the array holds."""
        self._waiting: list[tuple[Range, Range, Any]] = []
        self._coming = 0

    def place(self, heads: Range, rows: Range, coming: bool = False) -> Any:
        """Where to write the first box at a place; None if boxes there were added before. ``coming``: the box is in
        transit, until :meth:`arrived`."""
        if any(_meet(heads, h) and _meet(rows, r) for h, r, *_ in (*self._there, *self._waiting)):
            return None
        if self._array is None:
            self._array = empty(self._group, self._rank, self._like.shape, self._like, self.dtype)
        if self._array.dtype != self.dtype:
            return None
        self._there.append((heads, rows))
        self._coming += coming
        return self._array[:, slice(*heads), slice(*rows)]

    def arrived(self) -> None:
        self._coming -= 1

    def add(self, heads: Range, rows: Range, x: Any) -> None:
        """Add a box, whose array must not change from now on."""
        self._waiting.append((heads, rows, x))
        if len(self._waiting) > _WAITING and not self._coming:
            self._add_up(np.dtype("float32") if self.dtype.itemsize < 4 else self.dtype)

    def total(self, dtype: Any) -> Any:
        """The sum in ``dtype``, 0 where nothing was added."""
        if self._array is None and len(self._waiting) == 1:
            ((_, _, x),) = self._waiting
            if x.shape == self._like.shape and x.dtype == dtype and x.flags.c_contiguous:
                return x
        self._add_up(dtype, 0)
        return self._array

    def _add_up(self, dtype: Any, nothing: float | None = None) -> None:
        """Add all waiting boxes to an array of ``dtype``. ``nothing``: the value for places without a box."""
        shape, before = self._like.shape, self._array
        if before is None or before.dtype != dtype:
            self._array = empty(self._group, self._rank, shape, self._like, dtype)
        for h, r in self._cells((0, shape[1]), (0, shape[2])):
            target = self._array[:, slice(*h), slice(*r)]
            held = any(_within(h, a) and _within(r, b) for a, b in self._there)
            parts = [before[:, slice(*h), slice(*r)]] if held else []
            for a, b, x in self._waiting:
                if _within(h, a) and _within(r, b):
                    parts.append(x[:, h[0] - a[0] : h[1] - a[0], r[0] - b[0] : r[1] - b[0]])
            if len(parts) > 1 or (parts and not (held and before is self._array)):
                add_up(parts, target)
            elif not parts and nothing is not None:
                target[...] = nothing
        self._there += [(h, r) for h, r, _ in self._waiting]
        self._waiting = []

    def _cells(self, heads: Range, rows: Range) -> list[tuple[Range, Range]]:
        """The whole array in cells: a box contains all of a cell or nothing of it."""
        boxes = [*self._there, *((h, r) for h, r, _ in self._waiting)]
        head_cuts, row_cuts = (
            {*heads, *(x for h, _ in boxes for x in h)},
            {*rows, *(x for _, r in boxes for x in r)},
        )
        return [
            (h, r)
            for h in itertools.pairwise(sorted(head_cuts))
            for r in itertools.pairwise(sorted(row_cuts))
        ]


def _meet(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _within(a: Range, b: Range) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]


def add_up(parts: list[Any], target: Any) -> None:
    """The sum of arrays into ``target``, which may be the first of them; from left to right, in float32 at least."""
    if 0 in target.shape:
        return
    if is_device_array(target):
        units = _units(*parts, target)
        dtypes = tuple(str(x.dtype) for x in (parts[0], target)) if units else ()
        _adder(len(parts), dtypes)(*(units or (*parts, target)))
        return
    dtype = np.result_type(target.dtype, np.float32)
    target[...] = functools.reduce(np.add, (x.astype(dtype) for x in parts))


def _units(*arrays: Any) -> list[Any]:
    """Views of the arrays in units of equally many elements, which take 16 bytes in the widest dtype. [] if a dtype, a
    shape or an alignment does not allow this; all arrays but the last must have one dtype."""
    sizes = {x.dtype.itemsize for x in arrays}
    count, found = 16 // max(sizes), []
    for x in arrays:
        unit = count * x.dtype.itemsize
        fits = x.strides[-1] == x.dtype.itemsize and x.shape[-1] % count == 0
        if not fits or any(n % unit for n in (x.data.ptr, *x.strides[:-1])) or not sizes <= {2, 4}:
            return []
        found.append(x.view(np.complex128 if unit == 16 else np.complex64))
    return found if len({x.dtype for x in arrays[:-1]}) == 1 else []


_SUM_OF_UNITS = """
alignas(16) R found[sizeof(U) / sizeof(R)];
for (int j = 0; j < sizeof(U) / sizeof(R); j++) found[j] = R({terms});
sum = *reinterpret_cast<const U*>(found);
"""


@functools.cache
def _adder(count: int, dtypes: tuple[str, ...]) -> Any:
    """A kernel that adds ``count`` arrays. ``dtypes``: of the arrays and of the sum, if they are given in units; empty:
    the arrays have plain elements."""
    import cupy

    if not dtypes:
        inputs = ", ".join(f"{letter} x{i}" for i, letter in enumerate("ABCDEFGH"[:count]))
        terms = " + ".join(f"float(x{i})" for i in range(count))
        return cupy.ElementwiseKernel(inputs, "S sum", f"sum = S({terms})", f"cufa_add_{count}")
    inputs = ", ".join(f"T x{i}" for i in range(count))
    terms = " + ".join(f"float(reinterpret_cast<const E*>(&x{i})[j])" for i in range(count))
    of, to = ("float" if x == "float32" else x for x in dtypes)
    preamble = (
        f"#include <cupy/float16.cuh>\n#include <cupy/bfloat16.cuh>\ntypedef {of} E;\ntypedef {to} R;\n"
    )
    code, name = _SUM_OF_UNITS.format(terms=terms), f"cufa_add_{count}_{of}_{to}"
    return cupy.ElementwiseKernel(inputs, "U sum", code, name, preamble=preamble)
