"""A call on the CPU, part by part: each sequence, or head, with a length or mask of its own is a dense call over slices
of the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ...plan.operation import SCORE_ARRAYS, SCORE_GRADIENTS, SEED, Arrays
from ...plan.planner import Plan
from ...problem.lengths import Part

_OF_QUERIES = {"q", "out", "lse", "dout", "dlse", "dq"}
_OF_KEYS = {"k", "v", "dk", "dv"}
_OF_HEADS = {"alibi_slopes", "sink", "dsink"}
_WHOLE = {x.name for x in (*SCORE_ARRAYS, *SCORE_GRADIENTS, SEED)}


def each(plan: Plan, given: Arrays) -> Iterator[tuple[Plan, dict[str, Any], Part]]:
    """For each part, even without a score: its plan, its arrays (views of ``given``), and the part. If some places of
    the results may have no score, the results are first filled with the value for such places."""
    problem = plan.problem
    if problem.empty or problem.lengths.places() is not None:
        for operand in plan.operation.all_operands:
            if operand.result and given.get(operand.name) is not None:
                given[operand.name][...] = operand.nothing
    for part in problem.parts:
        yield dataclasses.replace(plan, problem=part.problem), _arrays(part, given), part


def _arrays(part: Part, given: Arrays) -> dict[str, Any]:
    arrays: dict[str, Any] = dict.fromkeys(given)
    for name, x in given.items():
        if x is None:
            continue
        if name in _OF_QUERIES:
            arrays[name] = part.queries(x)
        elif name in _OF_KEYS:
            arrays[name] = part.of_keys(x)
        elif name in _OF_HEADS:
            arrays[name] = x[..., part.heads]
        elif name in _WHOLE:
            arrays[name] = x
    slopes = arrays.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        arrays["alibi_slopes"] = slopes[part.sequence : part.sequence + part.problem.batch]
    return arrays
