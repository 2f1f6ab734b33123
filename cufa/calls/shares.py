"""Gradients that are shares of sums over several calls: float32, so that only the sum is rounded to q's dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..plan.dense import BACKWARD
from ..plan.operation import Operand
from ..problem.options import Options
from ..problem.problem import Problem
from .call import BackwardCall
from .dispatch import run


@dataclasses.dataclass(frozen=True)
class ShareCall(BackwardCall):
    float32: tuple[str, ...] = ()
    """:attr:`cufa.problem.problem.Problem.float32_gradients`."""

    def problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        inputs, problem = super().problem(dtype)
        return inputs, dataclasses.replace(problem, float32_gradients=self.float32)

    def _form(self, operand: Operand, problem: Problem) -> tuple[tuple[int, ...], Any]:
        shape, dtype = super()._form(operand, problem)
        return shape, np.dtype("float32") if operand.name in self.float32 else dtype


def share_call(given: Mapping[str, Any], options: Options, float32: tuple[str, ...]) -> ShareCall:
    """``given``: the arrays of :func:`cufa.flash_attention_backward` by name. ``float32``: the gradients in float32."""
    arrays = [given.get(x.name) for x in BACKWARD.all_operands]
    call = ShareCall.read(arrays, ("dq", "dk", "dv"), options)
    return dataclasses.replace(call, float32=float32)


def gradient_shares(
    given: Mapping[str, Any], options: Options, float32: tuple[str, ...], device: str | None = None
) -> Any:
    """dq, dk and dv of :func:`cufa.flash_attention_backward`; a gradient that ``float32`` names is float32."""
    return run(share_call(given, options, float32), device, ("shares", float32, options))
