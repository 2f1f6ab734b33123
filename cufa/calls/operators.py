"""Score functions as arguments of operators of PyTorch and JAX, which know the function by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..problem.kept_masks import keep, kept
from ..problem.score_function import Score, operator_score


def score_of(score: Any, arrays: Mapping[str, Any] | None, bias: Any) -> tuple[Any, dict[str, Any]]:
    """The function of ``score=``, or None, and the arrays by name that the operator is given. Raises TypeError or
    ValueError, naming the argument."""
    if score is None:
        if arrays is not None:
            raise ValueError(
                "arrays= is given, but score is None: a score function reads the arrays; pass score="
            )
        return None, {} if bias is None else {"bias": bias}
    if bias is not None:
        raise ValueError("score= and bias= both change scores: add the bias in the score function")
    if isinstance(score, Score) or not callable(score):
        raise TypeError(
            f"score is {type(score).__qualname__}: pass the function itself, score=function, and what it reads as "
            "arrays={'table': table}, so that arrays can have gradients"
        )
    return score, dict(arrays or {})


def name_of(function: Any, pinned: bool) -> str | None:
    return None if function is None else keep(function, pinned, "score")


def arguments(name: str | None, arrays: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``score=`` or ``bias=`` of a call."""
    found = dict(arrays)
    return found if name is None else {"score": operator_score(kept(name), found)}
