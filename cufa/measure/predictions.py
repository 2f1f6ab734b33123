"""Errors of predicted times (:mod:`cufa.measure.bounds`) against measurements, kernel by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ..gpu.architectures import Device
from ..kernels import KERNELS
from ..plan.planner import Plan, make_plan
from . import additions, bounds, costs
from .cases import as_launched
from .limits import Limits
from .measured import Measured
from .regimes import Regime

ALL = "all kernels"


@dataclasses.dataclass(frozen=True)
class Error:
    """Summary of the errors |predicted ÷ measured − 1| of ``count`` rows."""

    median: float
    worst: float
    count: int


def plan_of(row: Measured, device: Device) -> Plan | None:
    """The plan that the row measured; None for split keys, for a CPU, and for tiles that the kernel no longer has."""
    spec = KERNELS.get(row.json.get("kernel", ""))
    if spec is None or row.json.get("split") or not row.json["config"]["num_warps"]:  # 0 on a CPU
        return None
    try:
        config = spec.read_config(row.json["config"])
        plan = make_plan(row.problem, device, config=config, kernel=spec.name, num_splits=1)
    except (TypeError, ValueError):
        return None
    return as_launched(plan, row.json["grid"])


def with_needs(row: Measured, device: Device, limits: Limits) -> Measured:
    """The row with its predicted time and the bound of each resource; unchanged if the plan cannot be predicted."""
    plan = row.plan or plan_of(row, device)
    if plan is None or bounds.why_not(plan, limits):
        return row
    needs = {name: round(seconds * 1e9) for name, seconds in bounds.bounds_of(plan, limits).named().items()}
    derived = {"predicted_ns": round(bounds.predict(plan, limits) * 1e9), "needs_ns": needs}
    return dataclasses.replace(row, json={**row.json, **derived})


def errors(rows: Iterable[Measured], device: Device, limits: Limits) -> dict[str, Error]:
    """Errors by kernel, and over :data:`ALL`, of the rows that were measured in turns and have a prediction."""
    by_kernel: dict[str, list[float]] = {}
    for row in rows:
        if not row.is_ours or row.regime is not Regime.IN_TURNS:
            continue
        seconds = with_needs(row, device, limits).predicted
        if seconds is not None:
            by_kernel.setdefault(row.json["kernel"], []).append(abs(seconds / row.seconds - 1))
    if by_kernel:
        by_kernel[ALL] = [error for found in by_kernel.values() for error in found]
    return {name: Error(float(np.median(x)), float(max(x)), len(x)) for name, x in by_kernel.items()}


def left_out(plan: Plan) -> str:
    """A sentence on the resource that a prediction leaves out because its rate was not measured; "": none."""
    assert plan.device is not None
    if costs.why_not(plan) or not costs.cost_of(plan).added or additions.of_card(plan.device.name):
        return ""
    return (
        f"How fast {plan.device.name} adds in its L2 cache is not measured: additions to dQ are left out, so wide "
        "heads take longer than predicted."
    )


def in_words(found: Mapping[str, Error]) -> str:
    """The errors as a line of text; "" if nothing is predicted."""
    each = (
        f"{name}: median error {error.median:.0%}, maximum {error.worst:.0%}, {error.count} rows"
        for name, error in found.items()
    )
    return f"Predicted against measured times. {'; '.join(each)}." if found else ""
