"""A score function in the form that a problem holds (:mod:`cufa.problem.score_function`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .derivative import derivative
from .evaluation import bounds, clamped, evaluate
from .expression import FLOAT, ArrayForm, Expression, Trace


@dataclasses.dataclass(frozen=True)
class ScoreChange:
    """A score function in a problem: its expression, the shapes of its arrays, and the arrays whose gradients are
    requested, in that order."""

    expression: Expression
    shapes: tuple[tuple[int, ...], ...]
    gradients: tuple[str, ...] = ()

    @functools.cached_property
    def differentiated(self) -> Expression:
        """The expression with more results: the derivative with respect to s, and with respect to each of
        :attr:`loads`."""
        e = self.expression
        t = Trace("the score function", e.arrays, e.code)
        s = next((place for place, x in enumerate(e.code) if x[0] == "input" and x[2] == "s"), None)
        zero = t.const(0.0)
        slopes = [None if s is None else derivative(e, s, t), *(derivative(e, x, t) for x in self.loads)]
        results = (e.results[0], *(zero if x is None else x for x in slopes))
        return Expression(tuple(t.code), e.arrays, results)

    @property
    def has_slope(self) -> bool:
        """The derivative with respect to s is not 1 everywhere."""
        found = self.differentiated
        return found.code[found.results[1]] != ("const", FLOAT, 1.0)

    @property
    def weights_read_scores(self) -> bool:
        """Derivatives with respect to arrays depend on s."""
        found = self.differentiated
        return any(found.code[x][::2] == ("input", "s") for x in found.needed(*found.results[2:]))

    @property
    def loads(self) -> list[int]:
        """Places of the loads that read an array whose gradient is requested."""
        wanted = [self.place_of(name) for name in self.gradients]
        return [place for place, x in enumerate(self.expression.code) if x[0] == "load" and x[2] in wanted]

    def place_of(self, name: str) -> int:
        """Number of an array, by its name."""
        return next(n for n, form in enumerate(self.expression.arrays) if form.name == name)

    def bounds(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, of: Expression | None = None
    ) -> dict[int, Any]:
        """Least and greatest value of each integer of the expression, for sequences up to these lengths."""
        sizes = {"b": batch, "h": heads, "i": seqlen_q, "j": seqlen_k}
        inputs: dict[str, Any] = {name: (0, max(size - 1, 0)) for name, size in sizes.items()}
        inputs["delta"] = -seqlen_q, seqlen_k
        return bounds(of or self.expression, inputs)

    def check_indexes(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raises ValueError if an index lies outside its axis for every score of the call."""
        e, found = self.expression, self.bounds(batch, heads, seqlen_q, seqlen_k)
        sizes = batch, heads, seqlen_q, seqlen_k
        is_bias = bool(e.arrays) and e.arrays[0].name == "bias"
        if is_bias and any(size not in (1, n) for size, n in zip(self.shapes[0], sizes, strict=True)):
            raise ValueError(
                f"bias has shape {self.shapes[0]}: each axis has size 1, or the size in (batch, heads, seqlen_q, "
                f"seqlen_k), here {sizes}"
            )
        for op, _, *args in e.code:
            if op != "load":
                continue
            form, shape = e.arrays[args[0]], self.shapes[args[0]]
            for axis, index in enumerate(args[1:]):
                low, high = found[index]
                if high < 0 or low > shape[axis] - 1:
                    raise ValueError(
                        f"the score function reads {form.name}[{', '.join(map(e.text, args[1:]))}]: index {axis} is "
                        f"{low:g} to {high:g} in this call, outside axis {axis} of shape {shape} (negative indexes do "
                        "not count from the end)"
                    )

    def as_json(self) -> dict[str, Any]:
        forms = [dataclasses.astuple(x) for x in self.expression.arrays]
        return {
            **dataclasses.asdict(self),
            "expression": [self.expression.code, forms, self.expression.results],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ScoreChange:
        code, forms, results = record["expression"]
        expression = Expression(_tuples(code), tuple(ArrayForm(*x) for x in forms), tuple(results))
        return cls(expression, _tuples(record["shapes"]), tuple(record["gradients"]))

    def __str__(self) -> str:
        text = str(self.expression)
        return text if len(text) <= 100 else f"{text[:97]}…"


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, (list, tuple)) else x


def changed(
    change: ScoreChange, inputs: Mapping[str, Any], arrays: Sequence[Any], dtype: Any, derivatives: bool = False
) -> list[Any]:  # fmt: skip
    """The new scores; with ``derivatives`` also their derivatives with respect to the old scores and to each load."""
    expression = change.differentiated if derivatives else change.expression
    return evaluate(expression, inputs, arrays, dtype)


def add_gradients(
    change: ScoreChange, inputs: Mapping[str, Any], arrays: Sequence[Any], dS: Any, slopes: Sequence[Any],
    totals: Mapping[str, Any],
) -> None:  # fmt: skip
    """Adds gradients of the change's arrays to ``totals``, by array name. ``dS``: gradient of the new scores;
    ``slopes``: their derivative by each load. dS · slope is added to the element that the load reads."""
    e = change.expression
    for place, slope in zip(change.loads, slopes, strict=True):
        array, *indexes = e.code[place][2:]
        at = clamped(evaluate(e, inputs, arrays, dS.dtype.type, indexes), change.shapes[array])
        np.add.at(
            totals[e.arrays[array].name], tuple(np.broadcast_to(x, dS.shape) for x in at), product(dS, slope)
        )


def product(dS: Any, slope: Any) -> Any:
    """dS times a derivative; 0 where dS is 0, since the derivative at a hidden score may be NaN."""
    return np.where(dS == 0, dS.dtype.type(0), dS * slope)
