"""Checks and plans that forward and backward share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from ..plan.candidates import any_serves
from ..plan.planner import Plan
from ..problem.mask import FULL
from ..problem.options import Options
from ..problem.problem import Problem
from . import arrays, calls, optional_operands


class DenseCall(calls.Call):
    """A call with arrays of four axes."""

    def problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        """The inputs as kernels read them, and the problem that their shapes and the options state."""
        shapes = [self.inputs[name].shape for name in ("q", "k", "v")]
        problem = arrays.make_problem(shapes, dtype, self.options)
        return optional_operands.check(self.inputs, problem)


class PackedCall(calls.Call):
    """A call with packed sequences: arrays (tokens, heads, head_dim)."""

    def problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        shapes = {name: self.inputs[name].shape for name in ("q", "k", "v")}
        for name, shape in shapes.items():
            if len(shape) != 3:
                raise ValueError(
                    f"{name} has shape {shape}; packed arrays have three axes (tokens, heads, head_dim)"
                )
        if shapes["v"] != shapes["k"]:
            raise ValueError(f"v has shape {shapes['v']} but k has {shapes['k']}: they must be equal")
        # As one sequence, but for the mask.
        options = dataclasses.replace(self.options, mask=FULL, layout="bshd")
        problem = arrays.make_problem([(1, *shape) for shape in shapes.values()], dtype, options)
        cu_q, cu_k = self.inputs["cu_seqlens_q"], self.inputs["cu_seqlens_k"]
        cu_q, cu_k, lengths = optional_operands.packed(cu_q, cu_k, (problem.seqlen_q, problem.seqlen_k))
        problem = dataclasses.replace(
            problem,
            mask=self.options.mask,
            batch=len(cu_q) - 1,
            seqlen_q=max(lengths.queries, default=0) if lengths.queries is not None else lengths.total_q,
            seqlen_k=max(lengths.keys, default=0) if lengths.keys is not None else lengths.total_k,
            lengths=lengths,
        )
        arrays.check_mask(problem.mask, problem.batch, problem.kv_heads, None)
        return optional_operands.check({**self.inputs, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, problem)

    def arrays(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """With the axes of dense arrays: (1, heads, tokens, head_dim), and (1, heads, tokens) of numbers of queries."""
        given = {**self.inputs, **results}
        found = {}
        for operand in self.operation.operands:
            x = given.get(operand.name)
            found[operand.name] = None if x is None else (x.swapaxes(0, 1) if operand.stride else x)[None]
        return found | self._optional(given)


def plan_shapes(
    q: Any,
    k: Any,
    v: Any,
    dtype: npt.DTypeLike | None,
    device: str | None,
    options: Options,
    optional: dict[str, Any],
    operation: str = "forward",
) -> Plan:
    """The plan for q, k and v, which are arrays or just shapes; k defaults to q and v to k. ``optional`` are the
    operands of :mod:`cufa.calls.optional_operands`."""
    k = q if k is None else k
    v = k if v is None else v
    shapes = [
        x if isinstance(x, tuple) else arrays.as_array(name, x).shape
        for name, x in (("q", q), ("k", k), ("v", v))
    ]
    if dtype is None:
        dtype = "float16" if isinstance(q, tuple) else arrays.as_array("q", q).dtype
    name = arrays.asked_dtype(dtype)
    if name not in arrays.FORWARD_DTYPES:
        served = ", ".join(arrays.FORWARD_DTYPES)
        raise ValueError(f"dtype={name!r} is not served; use one of {served}")
    if device is None and arrays.is_device_array(q):  # the call could not move to the CPU
        arrays.dtype_name({"q": q}, on_gpu=True)
    problem = dataclasses.replace(arrays.make_problem(shapes, name, options), operation=operation)
    problem = optional_operands.planned({name: x for name, x in optional.items() if x is not None}, problem)
    could_move = device is None and not arrays.is_device_array(q)
    target = calls.planning_device(device, any_serves(problem) if could_move else name != "float64")
    return calls.plan_for(problem, target, options)
