"""The arrays of a score function, and the seed of dropout, as operands of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.operation import SCORE_ARRAYS, SCORE_GRADIENTS, SEED, Operation
from ..problem.checks import shown
from ..problem.float8 import is_float8
from ..problem.score_function import Score

NO_SCORE = (None,) * len(SCORE_ARRAYS)


def with_score(
    operation: Operation, given: Sequence[Any], score: Score | None, gradients: Any = ()
) -> tuple[Any, ...]:
    """The operands ``given``, in the operation's order, followed by the score function's arrays, and by the arrays that
    receive their gradients if ``gradients`` is a dict."""
    if score is None:
        return tuple(given)
    given = operation.placed(given, SCORE_ARRAYS[0].name, [*score.arrays.values()])
    if not isinstance(gradients, dict):
        return given
    for name, x in gradients.items():
        if getattr(x, "shape", None) != score.arrays[name].shape:
            raise ValueError(
                f"gradients[{name!r}] must be an array of {name}'s shape {score.arrays[name].shape}, not {shown(x)}"
            )
    return operation.placed(given, SCORE_GRADIENTS[0].name, [gradients.get(name) for name in score.arrays])


def with_seed(operation: Operation, given: Sequence[Any], seed: Any) -> tuple[Any, ...]:
    """The operands ``given``, followed by the seed if there is one."""
    return tuple(given) if seed is None else operation.placed(given, SEED.name, [seed])


def refuse_score(score: Score | None, q: Any, dropped: int) -> None:
    """Raises ValueError for a score function or dropout with inputs of e4m3."""
    if score is not None or dropped:
        kind = "e4m3" if is_float8(q) else str(getattr(q, "dtype", type(q).__qualname__))
        raise ValueError(
            f"{'dropout= takes' if dropped else 'score= and bias= take'} q of 16, 32 or 64 bits without scales, not "
            f"{kind} with scales"
        )


def results_of_backward(sink: Any, score: Score | None, gradients: Sequence[str]) -> tuple[str, ...]:
    """Operand names of the results of a backward call."""
    sink_result = () if sink is None else ("dsink",)
    array_results = () if score is None else (f"dscore{[*score.arrays].index(name)}" for name in gradients)
    return "dq", "dk", "dv", *sink_result, *array_results
