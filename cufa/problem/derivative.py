"""Derivatives of expressions, instruction by instruction in forward mode: a branch that ``np.where`` does not take
contributes nothing, not even NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

from .expression import FLOAT, Expression, Trace, operands


def derivative(expression: Expression, with_respect_to: int, t: Trace) -> int | None:
    """The derivative of the first result with respect to the instruction at ``with_respect_to``: its place in ``t``,
    which begins with the expression's code. None: it is zero everywhere."""
    slopes: dict[int, int | None] = {with_respect_to: t.const(1.0)}
    for place in expression.needed(expression.results[0]):
        if place not in slopes:
            slopes[place] = _rule(t, place, [slopes.get(x) for x in operands(expression.code[place])])
    return slopes.get(expression.results[0])


def _rule(t: Trace, place: int, slopes: list[int | None]) -> int | None:
    op, kind, *args = t.code[place]
    if kind != FLOAT or op == "load" or all(x is None for x in slopes):
        return None

    def times(a: int | None, b: int) -> int | None:
        return None if a is None else t.binary("mul", a, b)

    def plus(a: int | None, b: int | None, op: str = "add") -> int | None:
        if a is None or b is None:
            return a if b is None else b if op == "add" else t.unary("neg", b)
        return t.binary(op, a, b)

    def chosen(condition: int, a: int | None, b: int | None) -> int:
        zero = t.const(0.0)
        return t.where(condition, zero if a is None else a, zero if b is None else b)

    one, a = t.const(1.0), args[0]
    da, db = slopes[0], slopes[1] if len(slopes) > 1 else None
    if op in ("add", "sub"):
        return plus(da, db, op)
    if op == "mul":
        return plus(times(da, args[1]), times(db, a))
    if op == "div":
        top = plus(da, times(db, place), "sub")
        return None if top is None else t.binary("div", top, args[1])
    if op == "where":
        return chosen(a, slopes[1], slopes[2])
    if op in ("min", "max"):
        return chosen(t.binary("le" if op == "min" else "ge", a, args[1]), da, db)
    if op == "pow":
        base, exponent = a, args[1]
        base_slope = t.binary("mul", exponent, t.binary("pow", base, t.binary("sub", exponent, one)))
        exponent_slope = t.binary("mul", place, t.unary("log", base))
        return plus(times(da, base_slope), times(db, exponent_slope))
    if op == "neg":
        return None if da is None else t.unary("neg", da)
    if op == "abs":
        return chosen(t.binary("lt", a, t.const(0.0)), plus(None, da, "sub"), da)
    rule = _FUNCTIONS.get(op)
    return None if rule is None else times(da, rule(t, place, a))


_FUNCTIONS: dict[str, Callable[[Trace, int, int], int]] = {
    "tanh": lambda t, y, _: t.binary("sub", t.const(1.0), t.binary("mul", y, y)),
    "exp": lambda t, y, _: y,
    "exp2": lambda t, y, _: t.binary("mul", y, t.const(math.log(2))),
    "expm1": lambda t, y, _: t.binary("add", y, t.const(1.0)),
    "log": lambda t, _, x: t.binary("div", t.const(1.0), x),
    "log2": lambda t, _, x: t.binary("div", t.const(1 / math.log(2)), x),
    "log1p": lambda t, _, x: t.binary("div", t.const(1.0), t.binary("add", x, t.const(1.0))),
    "sqrt": lambda t, y, _: t.binary("div", t.const(0.5), y),
    "sin": lambda t, _, x: t.unary("cos", x),
    "cos": lambda t, _, x: t.unary("neg", t.unary("sin", x)),
}
"""Derivatives of ``y = f(x)``; functions without an entry (floor, ceil) have 0."""
