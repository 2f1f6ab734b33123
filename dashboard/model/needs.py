"""The time that each resource needs, from the kernel's counters, for rows that were recorded without it."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.gpu.architectures import Device
from cufa.measure import costs, predictions
from cufa.measure.costs import Cost
from cufa.measure.measured import Measured


def with_needs(m: Measurement, found: Evidence) -> Measurement:
    """The row with its needs; unchanged where needs were recorded with the row, or the kernel is not covered."""
    return dataclasses.replace(m, row=_derived(found, m.suite).get(m.id, m.row))


@functools.lru_cache(64)
def _derived(found: Evidence, suite: str) -> dict[str, Measured]:
    """Rows of one suite by measurement: some milliseconds each."""
    device = _device(found)
    if device is None or found.limits is None:
        return {}
    rows = [m for m in found.rows if m.kernel and m.suite == suite]
    return {m.id: predictions.with_needs(m.row, device, found.limits) for m in rows}


def cost_of(m: Measurement, found: Evidence) -> Cost | None:
    """What the row's plan asks of each resource; None where the kernel's counters are not recorded."""
    device = _device(found)
    plan = None if device is None else predictions.plan_of(m.row, device)
    return None if plan is None or costs.why_not(plan) else costs.cost_of(plan)


def _device(found: Evidence) -> Device | None:
    """The card; None for a CPU, or a card of an unknown architecture."""
    try:
        return dataclasses.replace(Device.typical(found.arch), name=found.device) if found.arch else None
    except ValueError:
        return None
