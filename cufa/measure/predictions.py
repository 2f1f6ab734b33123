"""How far predicted times (:mod:`cufa.measure.bounds`) are from those that were recorded, kernel by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ..gpu.architectures import Device
from ..kernels import KERNELS
from ..plan.planner import Plan, make_plan
from . import additions, bounds, costs
from .limits import Limits
from .measured import Measured
from .regimes import Regime


@dataclasses.dataclass(frozen=True)
class Error:
    """Of predicted over recorded times, less 1, without their signs."""

    median: float
    worst: float
    count: int


def plan_of(row: Measured, device: Device) -> Plan | None:
    """How the row was run; None of split keys, on a CPU, and where its kernel has no such tiles any more."""
    spec = KERNELS.get(row.json.get("kernel", ""))
    if spec is None or row.json.get("split") or not row.json["config"]["num_warps"]:  # 0 on a CPU
        return None
    try:
        config = spec.read_config(row.json["config"])
        whole = 1 if spec.split_configs else None
        return make_plan(row.problem, device, config=config, kernel=spec.name, num_splits=whole)
    except (TypeError, ValueError):
        return None


def predicted(row: Measured, device: Device, limits: Limits) -> float | None:
    """Seconds that the row's tiles would take by today's derivation; None where there is none."""
    plan = plan_of(row, device)
    return bounds.predict(plan, limits) if plan is not None and bounds.covers(plan, limits) else None


def with_needs(row: Measured, device: Device, limits: Limits) -> Measured:
    """The row with what each resource needs, by today's derivation, where that was not recorded with it."""
    plan = None if "needs_ns" in row.json else plan_of(row, device)
    if plan is None or not bounds.covers(plan, limits):
        return row
    needs = {name: seconds * 1e9 for name, seconds in bounds.bounds_of(plan, limits).named().items()}
    derived = {"needs_ns": needs, "predicted_ns": bounds.predict(plan, limits) * 1e9}
    return dataclasses.replace(row, json={**row.json, **derived})


def errors(rows: Iterable[Measured], device: Device, limits: Limits) -> dict[str, Error]:
    """By kernel, over every time that was taken in turns."""
    off: dict[str, list[float]] = {}
    for row in rows:
        seconds = predicted(row, device, limits) if row.is_ours and row.regime is Regime.IN_TURNS else None
        if seconds is not None:
            off.setdefault(row.json["kernel"], []).append(abs(seconds / (row.p50_ns * 1e-9) - 1))
    return {
        kernel: Error(float(np.median(found)), float(max(found)), len(found)) for kernel, found in off.items()
    }


def left_out(plan: Plan) -> str:
    """What a prediction of the plan does not know of its card, as a sentence; "" where it knows all that is derived."""
    assert plan.device is not None
    if not costs.cost_of(plan).added or additions.of_card(plan.device.name):
        return ""
    return (
        f"How fast {plan.device.name} adds in its L2 cache is not measured: what is added to dQ is left out, so wide "
        "heads take longer than predicted."
    )


def in_words(found: Mapping[str, Error]) -> str:
    """One sentence; "" where nothing is predicted."""
    each = (
        f"{kernel} {error.median:.0%} in the middle and {error.worst:.0%} at most (of {error.count})"
        for kernel, error in found.items()
    )
    return f"Times predicted from the ceilings alone are off by: {'; '.join(each)}." if found else ""
