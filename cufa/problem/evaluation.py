"""Expressions evaluated by NumPy, and bounds of their integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .expression import FLOAT, INT, Expression, operands

_NUMPY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "min": np.fmin, "max": np.fmax, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "neg": np.negative, "abs": np.absolute, "not": np.logical_not,
    "bitnot": np.invert, "shl": np.left_shift, "shr": np.right_shift, "where": np.where,
}  # fmt: skip


def clamped(indexes: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Indexes clamped to their axes, as in kernels: below 0 becomes 0, past the end becomes the last index."""
    return tuple(np.clip(x, 0, size - 1) for x, size in zip(indexes, shape, strict=True))


class Clamping:
    """An array for a score function that NumPy calls untraced: indexes are :func:`clamped`, as in kernels."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.ndim, self.dtype = array, array.shape, array.ndim, array.dtype

    def __getitem__(self, index: Any) -> Any:
        return self.array[clamped(index if isinstance(index, tuple) else (index,), self.shape)]


def evaluate(
    expression: Expression, inputs: Mapping[str, Any], arrays: Sequence[Any], dtype: Any,
    results: Sequence[int] | None = None,
) -> list[Any]:  # fmt: skip
    """The values at ``results`` (default: the expression's). Floats are computed in ``dtype``; inputs and arrays
    broadcast."""
    results = expression.results if results is None else results
    found: dict[int, Any] = {}
    for place in expression.needed(*results):
        op, kind, *args = expression.code[place]
        if op == "const":
            found[place] = dtype(args[0]) if kind == FLOAT else args[0]
        elif op == "input":
            found[place] = inputs[args[0]]
        elif op == "load":
            x = arrays[args[0]]
            value = x[clamped([found[i] for i in args[1:]], x.shape)]
            found[place] = value.astype(dtype if kind == FLOAT else np.int64 if kind == INT else bool)
        else:
            found[place] = _apply(op, [found[i] for i in args], dtype)
    return [found[place] for place in results]


def _apply(op: str, x: list[Any], dtype: Any) -> Any:
    if op == "float":
        return _cast(x[0], dtype)
    if op == "int":
        return _cast(np.trunc(x[0]), np.int64)
    return (_NUMPY[op] if op in _NUMPY else getattr(np, op))(*x)


def _cast(x: Any, dtype: Any) -> Any:
    """A number or an array in ``dtype``; a CuPy array stays on its GPU."""
    return x.astype(dtype) if hasattr(x, "astype") else np.asarray(x, dtype)


# --- Bounds -----------------------------------------------------------------------------------------------

Bounds = tuple[float, float]
_ANY: Bounds = (-math.inf, math.inf)


def bounds(expression: Expression, inputs: Mapping[str, Bounds]) -> dict[int, Bounds]:
    """Least and greatest value of each integer, by place in the code, from the bounds of the inputs."""
    found: dict[int, Bounds] = {}
    for place, instruction in enumerate(expression.code):
        op, kind, *args = instruction
        if op == "input":
            found[place] = inputs.get(args[0], _ANY)
        elif kind != INT:
            found[place] = (float(args[0]),) * 2 if op == "const" else (0, 1) if kind == "bool" else _ANY
        elif op == "const":
            found[place] = args[0], args[0]
        else:
            found[place] = _bound(op, [found[i] for i in operands(instruction)])
    return found


def _bound(op: str, x: list[Bounds]) -> Bounds:
    (a, b), *rest = x or [_ANY]
    if op == "where":
        return min(y[0] for y in rest), max(y[1] for y in rest)
    if op in ("neg", "abs"):
        return (-b, -a) if op == "neg" else (max(a, -b, 0), max(-a, b))
    if not rest or op == "load":
        return x[0] if op == "int" else _ANY
    c, d = rest[0]
    if op in ("add", "sub"):
        return (a + c, b + d) if op == "add" else (a - d, b - c)
    if op in ("min", "max"):
        return (min(a, c), min(b, d)) if op == "min" else (max(a, c), max(b, d))
    if op == "mul":
        products = [p * q if p and q else 0 for p in (a, b) for q in (c, d)]
        return min(products), max(products)
    if op == "mod" and c > 0:
        return 0, d - 1
    if op == "floordiv" and c == d and c > 0:
        return (a // c if math.isfinite(a) else a), (b // c if math.isfinite(b) else b)
    if op == "and" and min(a, c) >= 0:
        return 0, min(b, d)
    return _ANY
