"""What the operations on whole sequences of queries, keys and values share: forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ..core.mask import CAUSAL, FULL, Band, Mask
from ..core.params import softmax_scalars
from ..core.problem import Problem, default_scale
from ..core.scores import check_softcap
from ..kernels import KernelSpec
from ..planner import Plan
from . import arrays, calls


def scores_of(mask: Mask, softcap: Any, scale: float | None, precision: str | None) -> dict[str, Any]:
    """What a problem is made of beside its arrays, from the arguments of a call."""
    return {
        "mask": mask,
        "softcap": check_softcap(softcap),
        "scale": scale,
        "precision": precision,
    }


def gpu_serves(dtype: str, options: dict[str, Any]) -> bool:
    """Whether kernels take what NumPy arrays and these options say; else they are computed on the CPU."""
    return dtype != "float64" and not options["mask"].beyond_band


def plan_shapes(
    q: Any,
    k: Any,
    v: Any,
    dtype: str | None,
    device: str | None,
    options: dict[str, Any],
    *,
    algorithm: str,
    **further: Any,
) -> Plan:
    """The plan for q, k and v, which are arrays or just shapes; k defaults to q and v to k. ``options`` are those of
    :func:`cufa.ops.arrays.make_problem`, ``further`` are other fields of the problem."""
    k = q if k is None else k
    v = k if v is None else v
    shapes = [
        x if isinstance(x, tuple) else arrays.as_array(name, x).shape
        for name, x in (("q", q), ("k", k), ("v", v))
    ]
    name = dtype or ("float16" if isinstance(q, tuple) else str(arrays.as_array("q", q).dtype))
    if name not in arrays.FORWARD_DTYPES:
        served = ", ".join(arrays.FORWARD_DTYPES)
        raise ValueError(f"dtype={name!r} is not served; use one of {served}")
    if device is None and arrays.is_device_array(q):  # the call could not move to the CPU
        arrays.dtype_name({"q": q}, on_gpu=True)
    problem = dataclasses.replace(arrays.make_problem(shapes, name, **options), **further)
    could_move = device is None and not arrays.is_device_array(q)
    target = calls.planning_device(device, gpu_serves(name, options) if could_move else name != "float64")
    return calls.plan_for(problem, target, algorithm=algorithm)


# --- Of the operations' records ---------------------------------------------------------------------------


def cpu_spec(named: list[KernelSpec]) -> KernelSpec:
    """Of all kernels FA2's schedule is the one that NumPy follows unless another is asked for."""
    return next((spec for spec in named if spec.algorithm == "fa2"), named[0])


def scalars(plan: Plan) -> dict[str, int | float]:
    """Numbers that every parameter structure holds."""
    p = plan.problem
    first, last = p.edges
    return {
        "batch": p.batch,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        # A bound beyond the matrix hides as much as one at its edge, and sums stay within 32 bits.
        "band_first": -p.seqlen_q if first is None else min(max(first, -p.seqlen_q), p.seqlen_k),
        "band_last": p.seqlen_k if last is None else min(max(last, -p.seqlen_q), p.seqlen_k),
        **softmax_scalars(p.scale, p.softcap),
    }


def describe(p: Problem) -> str:
    dtype = f"{p.dtype} (tf32)" if p.precision == "tf32" else p.dtype
    return (
        f"batch {p.batch}, heads {p.heads_text}, seqlen {p.seqlen_q}×{p.seqlen_k}, "
        f"head_dim {p.head_dim}, {dtype}, {p.scores_text}"
    )


def plan_lines(plan: Plan) -> list[str]:
    counts = [
        (schedule.visited * heads, schedule.total * heads)
        for part in plan.problem.parts
        if not part.problem.empty
        for heads in [part.problem.batch * part.problem.heads]
        for schedule in [plan.schedule_of(part.problem)]
    ]
    visited, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    known = "" if plan.problem.known else " at most: the rest is known on the GPU alone"
    return [f"tiles      {plan.config}; {visited:,} of {total:,} visited, {total - visited:,} skipped{known}"]


def compiled(spec: KernelSpec, head_dim: int) -> Iterator[Problem]:
    """Every element with every kind of mask, with and without a cap."""
    for dtype, precision, mask, softcap in itertools.product(
        spec.dtypes, spec.precisions, (FULL, CAUSAL, Band(255, 0)), (None, 30.0)
    ):
        if (dtype == "float32") != (precision == "native"):  # a precision is a choice for float32 only
            problem = Problem(1, 1, 1, 1024, 1024, head_dim, dtype, mask, default_scale(head_dim), softcap)
            yield dataclasses.replace(problem, precision=precision, operation=spec.operation)
