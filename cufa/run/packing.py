"""The bytes that a kernel is given, from a plan and the arrays of one call."""

from __future__ import annotations

from typing import Any

from ..kernels.params import strides_of
from ..plan.operation import Arrays, Operand
from ..plan.planner import Plan, mask_bytes
from ..problem.element import Element
from ..problem.integers import Integers
from ..problem.problem import Problem

_ELEMENTS = {"q": "q_element", "k": "k_element", "v": "v_element", "o": "out_element", "d": "q_element"}


def element_of(problem: Problem, operand: Operand) -> Element:
    """Of a strided operand: k_cache and k_new hold what k does, gradients what q does."""
    element: Element = getattr(problem, _ELEMENTS[operand.stride[0]])
    return element


def mask_arrays(problem: Problem) -> dict[str, Integers]:
    """The arrays of a mask by the pointers of ``MaskParams`` that kernels read them through."""
    params = problem.kernel_mask.params(problem.seqlen_q, problem.seqlen_k)
    return {name: x for name, x in params.items() if isinstance(x, Integers)}


def pack(plan: Plan, given: Arrays) -> Any:
    """The parameter structure of a :class:`~cufa.plan.planner.Plan`, all but the pointers."""
    operation, problem = plan.operation, plan.problem
    params = operation.params.new()
    for operand in operation.operands:
        x = given[operand.name]
        if operand.stride and x is not None:
            setattr(params, operand.stride, strides_of(x.strides, element_of(problem, operand).itemsize))
    for name, value in operation.scalars(plan, given).items():
        setattr(params, name, value)
    if "mask" in operation.params.names:
        for name, x in problem.kernel_mask.params(problem.seqlen_q, problem.seqlen_k).items():
            if not isinstance(x, Integers):
                setattr(params.mask, name, x)
        params.mask.workspace = plan.workspace - mask_bytes(problem, plan.config)
    return params
