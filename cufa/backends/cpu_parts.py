"""A call on the CPU, part by part: each sequence, or head, whose length or mask is its own is a dense call over its
slices of the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..core.operation import Arrays
from ..core.parts import Part
from ..planner import Plan

_OF_QUERIES = {"q", "out", "lse", "dout", "dlse", "dq"}
_OF_KEYS = {"k", "v", "dk", "dv"}


def each(plan: Plan, given: Arrays) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Plans of the parts and their arrays, views of ``given``. Parts without a score are left out: what results hold
    there is written first."""
    if plan.problem.lengths.sequences(*plan.problem.sizes) is not None:
        for operand in plan.operation.results:
            if given[operand.name] is not None:
                given[operand.name][...] = operand.nothing
    for part in plan.problem.parts:
        if not part.problem.empty:
            yield dataclasses.replace(plan, problem=part.problem), _arrays(part, given)


def _arrays(part: Part, given: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, x in given.items():
        if x is None:
            found[name] = None
        elif name in _OF_QUERIES:
            found[name] = part.queries(x)
        elif name in _OF_KEYS:
            found[name] = part.of_keys(x)
    return found
