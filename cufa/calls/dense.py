"""What the operations on whole sequences of queries, keys and values share: forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..build.params import softmax_scalars
from ..kernels import KernelSpec, kernels_of
from ..plan.operation import Arrays
from ..plan.planner import Plan
from ..problem.columns import Columns
from ..problem.integers import Integers
from ..problem.lengths import DENSE, Packed, Padded
from ..problem.mask import CAUSAL, FULL, Band, Mask
from ..problem.problem import MASK_KINDS, MAX_SIZE, Problem, default_scale
from ..problem.scores import check_softcap
from . import arrays, calls
from . import optional_operands as further


def scores_of(mask: Mask, softcap: Any, scale: float | None, precision: str | None) -> dict[str, Any]:
    """What a problem is made of beside its arrays, from the arguments of a call."""
    return {
        "mask": mask,
        "softcap": check_softcap(softcap),
        "scale": scale,
        "precision": precision,
    }


class DenseCall(calls.Call):
    """Of arrays with four axes."""

    def problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        """The inputs as kernels read them, and the problem that their shapes and the options state."""
        shapes = [self.inputs[name].shape for name in ("q", "k", "v")]
        problem = arrays.make_problem(shapes, dtype, layout=self.layout, **self.options)
        return further.check(self.inputs, problem)


class PackedCall(calls.Call):
    """Of sequences one behind the other, in arrays (tokens, heads, head_dim)."""

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
        options = {**self.options, "mask": FULL, "layout": "bshd"}
        problem = arrays.make_problem([(1, *shape) for shape in shapes.values()], dtype, **options)
        cu_q, cu_k = self.inputs["cu_seqlens_q"], self.inputs["cu_seqlens_k"]
        cu_q, cu_k, lengths = further.packed(cu_q, cu_k, (problem.seqlen_q, problem.seqlen_k))
        problem = dataclasses.replace(
            problem,
            mask=self.options["mask"],
            batch=len(cu_q) - 1,
            seqlen_q=max(lengths.queries, default=0) if lengths.queries is not None else lengths.total_q,
            seqlen_k=max(lengths.keys, default=0) if lengths.keys is not None else lengths.total_k,
            lengths=lengths,
        )
        arrays.check_mask(problem.mask, problem.batch, problem.kv_heads, None)
        return further.check({**self.inputs, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, problem)

    def arrays(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """With the axes of dense arrays: (1, heads, tokens, head_dim), and (1, heads, tokens) of numbers of queries."""
        given = {**self.inputs, **results}
        found = {}
        for operand in self.operation.operands:
            x = given.get(operand.name)
            found[operand.name] = None if x is None else (x.swapaxes(0, 1) if operand.stride else x)[None]
        return found | self._further(given)


def gpu_serves(operation: str, dtype: str, options: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether kernels take what NumPy arrays and these options say; else they are computed on the CPU."""
    mask = options["mask"]
    given = {name.split("seqlens")[0] for name, x in inputs.items() if "seqlens" in name and x is not None}
    lengths = "packed" if "cu_" in given else "padded" if given else "dense"
    changes = {
        change
        for name, change in (("alibi_slopes", "alibi"), ("sink", "sink"))
        if inputs.get(name) is not None
    }
    if mask.beyond_band and (given or changes or mask.beyond_band not in MASK_KINDS):
        return False
    if isinstance(mask, Columns) and mask.band.beyond_band:
        return False
    return any(
        dtype in spec.dtypes and lengths in spec.lengths and changes <= set(spec.score_changes)
        for spec in kernels_of(operation).values()
    )


def plan_shapes(
    q: Any,
    k: Any,
    v: Any,
    dtype: npt.DTypeLike | None,
    device: str | None,
    options: dict[str, Any],
    few: dict[str, Any],
    request: dict[str, Any],
    **fields: Any,
) -> Plan:
    """The plan for q, k and v, which are arrays or just shapes; k defaults to q and v to k. ``options`` are those of
    :func:`cufa.calls.arrays.make_problem`, ``few`` the operands of :mod:`cufa.calls.optional_operands`, ``request`` is
    what is asked of the planner, ``fields`` are others of the problem."""
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
    problem = dataclasses.replace(arrays.make_problem(shapes, name, **options), **fields)
    few = {name: x for name, x in few.items() if x is not None}
    problem = further.planned(few, problem)
    could_move = device is None and not arrays.is_device_array(q)
    target = calls.planning_device(
        device, gpu_serves(problem.operation, name, options, few) if could_move else name != "float64"
    )
    return calls.plan_for(problem, target, **request)


# --- Of the operations' records ---------------------------------------------------------------------------


def cpu_spec(named: list[KernelSpec]) -> KernelSpec:
    """Of all kernels FA2's schedule is the one that NumPy follows unless another is asked for."""
    return next((spec for spec in named if spec.algorithm == "fa2"), named[0])


def scalars(plan: Plan, given: Arrays) -> dict[str, int | float]:
    """Numbers that every parameter structure holds."""
    p = plan.problem
    return {
        "batch": p.batch,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        **_band(p),
        **softmax_scalars(p.scale, p.softcap),
        "total_q": p.lengths.total_q if isinstance(p.lengths, Packed) else 0,
        "total_k": p.lengths.total_k if isinstance(p.lengths, Packed) else 0,
        "alibi_stride": further.stride_of_sequences(given.get("alibi_slopes")),
    }


def _band(p: Problem) -> dict[str, int]:
    """Where the edges are, and the diagonal: of dense arrays, or from which those of each sequence follow."""
    first, last = p.mask.edges(p.seqlen_q, p.seqlen_k) if p.mask.beyond_band else p.edges
    if not p.lengths.ragged:
        # A bound beyond the matrix hides as much as one at its edge, and sums stay within 32 bits.
        return {
            "band_first": -p.seqlen_q if first is None else min(max(first, -p.seqlen_q), p.seqlen_k),
            "band_last": p.seqlen_k if last is None else min(max(last, -p.seqlen_q), p.seqlen_k),
            "shift": p.mask.shift(p.seqlen_q, p.seqlen_k),
        }
    shift = p.mask.shift(0, 0)
    # A bound that hides nothing of the longest hides nothing of any sequence: it is not compiled in, or far away.
    from_diagonal = p.mask.edges(0, 0)
    left = -MAX_SIZE if first is None or from_diagonal[0] is None else from_diagonal[0] - shift
    right = MAX_SIZE if last is None or from_diagonal[1] is None else from_diagonal[1] - shift
    return {
        "band_first": max(left, -MAX_SIZE),
        "band_last": min(right, MAX_SIZE),
        "shift": shift,
        "shift_by_length": p.mask.shift(0, 1) - shift,
    }


def describe(p: Problem) -> str:
    dtype = f"{p.dtype} (tf32)" if p.precision == "tf32" else p.dtype
    lengths = "" if p.lengths == DENSE else f" ({p.lengths})"
    return (
        f"batch {p.batch}, heads {p.heads_text}, seqlen {p.seqlen_q}×{p.seqlen_k}{lengths}, "
        f"head_dim {p.head_dim}, {dtype}, {p.scores_text}"
    )


def plan_lines(plan: Plan) -> list[str]:
    packed = plan.config.block_q // plan.config.head_rows
    counts = [
        (schedule.visited * heads, schedule.total * heads)
        for part in plan.problem.parts
        if not part.problem.empty
        for heads in [part.problem.batch * part.problem.heads // packed]
        for schedule in [plan.schedule_of(part.problem)]
    ]
    visited, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    known = "" if plan.problem.known else " at most: the rest is known on the GPU alone"
    tiles = f"tiles      {plan.config}; {visited:,} of {total:,} visited, {total - visited:,} skipped{known}"
    if plan.split is None:
        return [tiles]
    return [tiles, f"splits     {plan.split.kind}: {plan.split.count} of the keys of each query block"]


_FEW: tuple[dict[str, Any], ...] = (
    {},
    {"lengths": Padded((1024,), (1024,)), "sink": True},
    {"lengths": Packed(1024, 1024, (1024,), (1024,)), "alibi": True},
    {"lengths": Packed(1024, 1024, (1024,), (1024,))},
    {"alibi": True, "sink": True},
)
"""What few calls have; every kind is with each other kind somewhere."""

#: One of each kind.
_MASKS = (
    FULL,
    CAUSAL,
    Band(255, 0),
    Band(right=0, prefix=100),
    *(Columns(CAUSAL, Integers(np.full((2 * runs, 1, 1, 1024), 512))) for runs in (1, 2)),
)


def compiled(spec: KernelSpec, head_dim: int) -> Iterator[Problem]:
    """Every element with every kind of mask, with and without a cap, lengths, ALiBi and sink."""
    for dtype, precision, mask, softcap in itertools.product(
        spec.dtypes, spec.precisions, _MASKS, (None, 30.0)
    ):
        if (dtype == "float32") != (precision == "native"):  # a precision is a choice for float32 only
            problem = Problem(1, 1, 1, 1024, 1024, head_dim, dtype, mask, default_scale(head_dim), softcap)
            for few in _FEW:
                yield dataclasses.replace(problem, precision=precision, operation=spec.operation, **few)
