"""What each resource would need of a time that was recorded without that, derived from the row's tiles."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.gpu.architectures import Device
from cufa.kernels.backward.fa3_config import Fa3BackwardConfig
from cufa.measure import backward_parts, predictions
from cufa.measure.backward_parts import Part
from cufa.measure.measured import Measured


def with_needs(m: Measurement, found: Evidence) -> Measurement:
    """As it is where they were recorded with it, or cannot be derived."""
    return dataclasses.replace(m, row=_derived(found, m.suite).get(m.id, m.row))


@functools.lru_cache(64)
def _derived(found: Evidence, suite: str) -> dict[str, Measured]:
    """Rows of one suite by the measurement: some milliseconds each."""
    device = _device(found)
    if device is None or found.limits is None:
        return {}
    rows = [m for m in found.rows if m.kernel and m.suite == suite]
    return {m.id: predictions.with_needs(m.row, device, found.limits) for m in rows}


def parts_of(m: Measurement, found: Evidence) -> tuple[Part, ...]:
    """Of Hopper's backward what each product asks of shared memory; of other kernels nothing."""
    device = _device(found)
    plan = None if device is None else predictions.plan_of(m.row, device)
    if plan is None or not isinstance(plan.config, Fa3BackwardConfig):
        return ()
    return backward_parts.parts(plan)


def _device(found: Evidence) -> Device | None:
    """None is a CPU, or a card that is not known any more."""
    try:
        return dataclasses.replace(Device.typical(found.arch), name=found.device) if found.arch else None
    except ValueError:
        return None
