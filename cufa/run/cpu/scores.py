"""Score functions and dropout in the CPU path, for one tile of a stack of heads."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np

from ...plan.operation import SCORE_ARRAYS, SCORE_GRADIENTS, Arrays
from ...plan.planner import Plan
from ...problem import score_change
from ...problem.dropout import Dropout, dropout_of
from ...problem.lengths import Part
from ...problem.score_change import ScoreChange

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(kw_only=True)
class _HeadPlaces:
    """Where the heads of a part, or of a stack of its heads, stand in the whole call."""

    b: Array
    """Sequence of each head, shaped to broadcast as (batch, kv_heads, group)."""
    h: Array
    """Query head of each head, of the same shape."""

    def at(self, heads: tuple[slice, ...]) -> Self:
        """The same for some heads: slices of (batch, kv_heads, group) or of the first two."""
        return dataclasses.replace(self, b=self.b[heads[0]], h=self.h[(slice(None), *heads[1:])])


def _head_places(part: Part) -> dict[str, Array]:
    problem = part.problem
    b = np.arange(problem.batch).reshape(-1, 1, 1) + part.sequence
    h = np.arange(problem.heads).reshape(1, problem.kv_heads, problem.group_size)
    return {"b": b, "h": h + (part.heads.start or 0)}


def positions(x: slice) -> Array:
    return np.arange(x.start, x.stop)


@dataclasses.dataclass
class ScoreFunction(_HeadPlaces):
    """The score function, for scores (batch, kv_heads, group, rows, columns)."""

    change: ScoreChange
    arrays: list[Any]
    totals: dict[str, Any]
    """The requested gradients of arrays; every tile adds to them."""
    delta: int

    @classmethod
    def of(cls, part: Part, given: Arrays) -> ScoreFunction | None:
        problem = part.problem
        if problem.score is None:
            return None
        forms = problem.score.expression.arrays
        arrays = [given[x.name] for x in SCORE_ARRAYS[: len(forms)]]
        results = [given.get(x.name) for x in SCORE_GRADIENTS[: len(forms)]]
        totals = {form.name: x for form, x in zip(forms, results, strict=True) if x is not None}
        delta = problem.mask.shift(problem.seqlen_q, problem.seqlen_k)
        return cls(problem.score, arrays, totals, delta, **_head_places(part))

    def inputs(self, S: Array, rows: slice, columns: slice) -> dict[str, Any]:
        b, h = self.b[..., None, None], self.h[..., None, None]
        return {
            "s": S,
            "b": b,
            "h": h,
            "i": positions(rows)[:, None],
            "j": positions(columns),
            "delta": self.delta,
        }

    def change_in_place(self, S: Array, rows: slice, columns: slice) -> None:
        inputs = self.inputs(S, rows, columns)
        (S[...],) = score_change.changed(self.change, inputs, self.arrays, S.dtype.type)

    def derivatives(self, S: Array, rows: slice, columns: slice) -> list[Any]:
        """The derivatives with respect to s and to loads; S becomes the new scores."""
        inputs = self.inputs(S.copy(), rows, columns)  # a derivative may be s itself
        new, *slopes = score_change.changed(self.change, inputs, self.arrays, S.dtype.type, derivatives=True)
        S[...] = new
        return slopes

    def go_back(self, dS: Array, slopes: list[Any], rows: slice, columns: slice) -> None:
        """dS of the new scores becomes dS of the old scores; gradients of arrays are added."""
        inputs = self.inputs(dS, rows, columns)  # indexes do not depend on scores' values
        score_change.add_gradients(self.change, inputs, self.arrays, dS, slopes[1:], self.totals)
        dS[...] = score_change.product(dS, slopes[0])


@dataclasses.dataclass
class DroppedWeights(_HeadPlaces):
    """Dropout of weights."""

    dropout: Dropout

    @classmethod
    def of(cls, plan: Plan, part: Part, given: Arrays) -> DroppedWeights | None:
        """``plan``: of the whole call, not of the part."""
        found = dropout_of(plan.problem.dropped, given.get("seed"), plan.problem.heads)
        return None if found is None else cls(found, **_head_places(part))

    def drop(self, x: Array, rows: slice, columns: slice) -> None:
        """Multiplies the kept elements of x, (batch, kv_heads, group, rows, columns), and sets the others to 0."""
        kept = self.dropout.kept(
            self.b, self.h, range(rows.start, rows.stop), range(columns.start, columns.stop)
        )
        x *= x.dtype.type(self.dropout.factor)
        np.copyto(x, 0, where=~kept)
