"""What each resource would need of a time that was recorded without that, derived from the row's tiles."""

from __future__ import annotations

import dataclasses
import functools

from cufa.bench import backward_parts, bounds
from cufa.bench.backward_parts import Part
from cufa.bench.recorded import Recorded
from cufa.core.architectures import Device
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.kernels.fa3_backward import Fa3BackwardConfig
from cufa.planner import Plan, make_plan


def with_needs(m: Measurement, found: Evidence) -> Measurement:
    """As it is where they were recorded with it, or cannot be derived."""
    needs = {} if m.needs else _derived(found).get(m.id, {})
    if not needs:
        return m
    json = {**m.row.json, "needs_ns": {name: seconds * 1e9 for name, seconds in needs.items()}}
    return dataclasses.replace(m, row=Recorded(json, m.row.suite))


@functools.lru_cache(8)
def _derived(found: Evidence) -> dict[str, dict[str, float]]:
    """Seconds by resource, by the measurement."""
    plans = {m.id: plan for m in found.rows if not m.needs and (plan := plan_of(m, found)) is not None}
    assert found.limits is not None
    return {
        name: bounds.bounds_of(plan, found.limits).named()
        for name, plan in plans.items()
        if bounds.covers(plan, found.limits)
    }


def plan_of(m: Measurement, found: Evidence) -> Plan | None:
    """How the row was run; None of another library's, on a CPU, and where the kernel has no such tiles any more."""
    subject = m.subject
    if subject.kernel is None or subject.config is None or not found.arch:
        return None
    try:
        device = dataclasses.replace(Device.typical(found.arch), name=found.device)
        return make_plan(m.problem, device, config=subject.config, kernel=subject.kernel)
    except (TypeError, ValueError):
        return None


def parts_of(m: Measurement, found: Evidence) -> tuple[Part, ...]:
    """Of Hopper's backward what each product asks of shared memory; of other kernels nothing."""
    plan = plan_of(m, found)
    if plan is None or not isinstance(plan.config, Fa3BackwardConfig):
        return ()
    return backward_parts.parts(plan)
