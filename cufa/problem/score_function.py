"""Score functions: :func:`score` makes one of a function in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .checks import as_array
from .expression import FLOAT, INT, ArrayForm, Expression
from .score_change import ScoreChange
from .tracing import takes_delta, trace

#: Arrays of a score function: the most that a parameter structure holds (shared/score_params.cuh).
MAX_ARRAYS, MAX_AXES = 4, 4

RESERVED = ("s", "b", "h", "i", "j", "delta", "bias")
_INPUTS = {"s": FLOAT, "b": INT, "h": INT, "i": INT, "j": INT}
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A score function with its arrays, made by :func:`score`."""

    function: Callable[..., Any]
    arrays: Mapping[str, Any]
    expression: Expression
    sequence: int = 0
    """Index b of the first sequence, when the reference computes packed sequences one by one."""

    @property
    def takes_delta(self) -> bool:
        return takes_delta(self.function)

    def change(self, gradients: tuple[str, ...] = ()) -> ScoreChange:
        return ScoreChange(self.expression, tuple(tuple(x.shape) for x in self.arrays.values()), gradients)

    def __str__(self) -> str:
        return str(self.change())

    def __repr__(self) -> str:
        arrays = "".join(f", {name}: {x.dtype}{list(x.shape)}" for name, x in self.arrays.items())
        return f"<score {self}{arrays}>"


def score(function: Callable[..., Any], **arrays: Any) -> Score:
    """A change of scores, written in NumPy, that kernels apply in place: for ``score=`` of attention.

    >>> def t5(s, b, h, i, j, table):
    ...     return s + table[h, np.clip(j - i, -128, 127) + 128]
    >>> relative = cufa.score(t5, table=np.zeros((8, 256), np.float32))

    Parameters
    ----------
    function : callable
        ``function(s, b, h, i, j, **arrays)``: the new score of query i and key j in query head h of sequence b, from
        the scaled score s. i, j count from 0 in their own sequence, b counts sequences (packed too). An argument named
        ``delta`` is given the mask's diagonal: key i + delta is query i's own, by default seqlen_k - seqlen_q. The
        function is called once, with symbols: operators, comparisons, ``np.where``, ``np.clip`` and elementary
        functions of NumPy are recorded; ``if`` and ``and`` cannot be.
    arrays : array
        At most 4 arrays that the function reads, by name: 1 to 4 axes, any real dtype and strides, NumPy or CuPy.
        Kernels read them in place: other values, or another array of the same dtype and axes, need no compilation. An
        index below 0 reads the first element, an index past the end reads the last: an axis of size 1 broadcasts. Names
        other than s, b, h, i, j, delta and bias.

    Returns
    -------
    Score
        Order of changes: scale, score function, soft cap, ALiBi, mask, sink. Floats have 32 bits (float64 where q is),
        integers 32.

    Raises
    ------
    TypeError, ValueError
        For a function that branches on a score or an index, or calls a function that has no CUDA form. For an array
        that is not indexed by one integer per axis, and for a result that is no float.
    """
    if not callable(function):
        raise TypeError(f"function must be callable as function(s, b, h, i, j, **arrays), not {function!r}")
    return _made(function, named_arrays(arrays), _traced)


def bias_score(bias: Any) -> Score:
    """The score function that adds ``bias`` to scores, (batch | 1, heads | 1, seqlen_q | 1, seqlen_k | 1)."""
    found = as_array("bias", bias)
    if found.ndim != 4 or np.dtype(found.dtype).kind not in "fV":
        raise ValueError(
            f"bias is {found.dtype} of shape {found.shape}: it takes floats of shape (batch or 1, heads or 1, "
            "seqlen_q or 1, seqlen_k or 1)"
        )
    return _made(_add_bias, {"bias": found}, _traced_once)


def _add_bias(s: Any, b: Any, h: Any, i: Any, j: Any, bias: Any) -> Any:
    return s + bias[b, h, i, j]


def named_arrays(arrays: Mapping[str, Any], what: str = "a score function") -> dict[str, Any]:
    """``arrays`` as NumPy or CuPy arrays. Raises TypeError or ValueError for an array that no kernel reads."""
    for name in arrays:
        if name in RESERVED:
            raise ValueError(
                f"{name}= cannot be an array of {what}: {', '.join(RESERVED)} are reserved names"
            )
    found = {name: as_array(name, x) for name, x in arrays.items()}
    if len(found) > MAX_ARRAYS:
        raise ValueError(f"{len(found)} arrays ({', '.join(found)}): {what} takes at most {MAX_ARRAYS}")
    for name, x in found.items():
        if str(x.dtype) not in _DTYPES:
            raise TypeError(f"{name} is {x.dtype}; {what} reads {', '.join(_DTYPES)}")
        if not 1 <= x.ndim <= MAX_AXES or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: it takes 1 to {MAX_AXES} axes, none of size 0")
    return found


def forms_of(arrays: Mapping[str, Any]) -> tuple[ArrayForm, ...]:
    return tuple(ArrayForm(name, str(x.dtype), x.ndim) for name, x in arrays.items())


def operator_score(function: Callable[..., Any], arrays: Mapping[str, Any]) -> Score:
    """As :func:`score`, for calls of an operator, which all name the function: it is traced once for each form of its
    arrays."""
    return _made(function, named_arrays(arrays), _traced_once)


def _made(function: Callable[..., Any], found: Mapping[str, Any], traced: Callable[..., Expression]) -> Score:
    return Score(function, found, traced(function, forms_of(found)))


def _traced(function: Callable[..., Any], forms: tuple[ArrayForm, ...]) -> Expression:
    return trace(function, "the score function", _INPUTS, forms, FLOAT)


_traced_once = functools.lru_cache(256)(_traced)


def check_gradients(score: Score | None, requested: Any) -> tuple[str, ...]:
    """The names of the arrays whose gradients are requested. Raises TypeError or ValueError."""
    if not isinstance(requested, (tuple, list, dict)):
        raise TypeError(f"gradients={requested!r}: it takes a tuple of names of arrays, such as ('table',)")
    gradients: tuple[str, ...] = tuple(requested)
    arrays = {} if score is None else score.arrays
    for name in gradients:
        if name not in arrays:
            has = (
                f"the score function has {', '.join(arrays)}"
                if arrays
                else "there is no array: pass score= or bias="
            )
            raise ValueError(f"gradients={gradients} names {name!r}, but {has}")
        if np.dtype(arrays[name].dtype).kind not in "fV":
            raise TypeError(f"gradients={gradients}: {name} is {arrays[name].dtype}, which has no gradient")
    if len({*gradients}) < len(gradients):
        raise ValueError(f"gradients={gradients} names an array twice")
    if score is not None and gradients:
        change = score.change(gradients)
        found = change.differentiated
        moving = {
            change.expression.code[place][2]
            for place, slope in zip(change.loads, found.results[2:], strict=True)
            if found.code[slope] != ("const", FLOAT, 0.0)
        }
        for name in gradients:
            if change.place_of(name) not in moving:
                raise ValueError(
                    f"gradients={gradients}: the score has no derivative with respect to {name}, which is read "
                    "only in conditions, indexes and roundings"
                )
    return gradients


def resolve_score(score: Any, bias: Any) -> Score | None:
    """One score function of ``score=`` and ``bias=``. Raises TypeError or ValueError."""
    if bias is not None:
        if score is not None:
            raise ValueError("score= and bias= both change scores: add the bias in the score function")
        return bias_score(bias)
    if score is not None and not isinstance(score, Score):
        raise TypeError(
            f"score must be made by cufa.score(function, **arrays), not {type(score).__qualname__}"
        )
    return score
