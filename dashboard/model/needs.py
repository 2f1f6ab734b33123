"""Time that each resource needs, from the kernel's counters and the machine's ceilings."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.measure import bounds, costs, memory_rates, predictions
from cufa.measure.costs import Cost
from cufa.measure.limits import Limits
from cufa.measure.measured import Measured
from cufa.measure.regimes import Regime
from cufa.problem.problem import Problem


def with_needs(m: Measurement, machine: Evidence) -> Measurement:
    """The measurement with its needs at the machine's ceilings (unchanged if the kernel is not covered). Under lasting
    load, power is a need: products at the recorded clock."""
    row = _derived(machine, m.suite).get(m.id, m.row)
    needs = dict(row.json.get("needs_ns", {}))
    if "power" in needs and m.regime is not Regime.SUSTAINED:
        del needs["power"]
    elif "power" in needs and m.clock_flops and machine.limits is not None:
        needs["power"] = needs["products"] * machine.limits.flops[m.problem.dtype] / m.clock_flops
    if "shared memory" in needs and machine.limits is not None:
        needs["shared memory"] *= _clock_rate(machine.limits) / shared_rate(machine)
    return dataclasses.replace(m, row=dataclasses.replace(row, json={**row.json, "needs_ns": needs}))


@functools.lru_cache(64)
def _derived(machine: Evidence, suite: str) -> dict[str, Measured]:
    """Rows of one suite by measurement id; each takes some milliseconds."""
    device = device_of(machine)
    if device is None or machine.limits is None:
        return {}
    rows = (m for m in machine.rows if m.kernel and m.suite == suite)
    return {m.id: predictions.with_needs(m.row, device, machine.limits) for m in rows}


def _clock_rate(limits: Limits) -> float:
    return bounds.SHARED_BYTES_PER_EXPONENTIAL * limits.exponentials


def shared_rate(machine: Evidence) -> float:
    """Ceiling of shared memory, bytes per second: the recorded rate, else 128 bytes per clock and SM."""
    assert machine.limits is not None
    try:
        rates = memory_rates.load(machine.device)
    except ValueError:  # damaged: the figure of the levels says so
        rates = None
    return rates.shared_bytes if rates and rates.shared_bytes else _clock_rate(machine.limits)


def cost_of(m: Measurement, machine: Evidence) -> Cost | None:
    """Counters of the row's plan; None if the kernel's counters are not recorded."""
    device = device_of(machine)
    plan = None if device is None else predictions.plan_of(m.row, device)
    return None if plan is None or costs.why_not(plan) else costs.cost_of(plan)


def shared_per_product(problem: Problem, kernel: Kernel, config: TileConfig) -> float | None:
    """Bytes of shared memory per multiply-add; None if the kernel's counters are not recorded."""
    cost = costs.cost_on(problem, kernel, config)
    return None if cost is None else cost.shared / cost.products


def device_of(card: Evidence) -> Device | None:
    """The card; None for a CPU or an unknown architecture."""
    try:
        return dataclasses.replace(Device.typical(card.arch), name=card.device) if card.arch else None
    except ValueError:
        return None
