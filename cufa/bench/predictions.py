"""How far predicted times (:mod:`cufa.bench.bounds`) are from those that were recorded, kernel by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ..core.architectures import Device
from ..kernels import KERNELS
from ..planner import make_plan
from . import bounds
from .limits import Limits
from .recorded import Recorded
from .regimes import Regime


@dataclasses.dataclass(frozen=True)
class Error:
    """Of predicted over recorded times, less 1, without their signs."""

    median: float
    worst: float
    count: int


def predicted(row: Recorded, device: Device, limits: Limits) -> float | None:
    """Seconds that the row's tiles would take by today's derivation; None where there is none, or where its kernel
    has no such tiles any more."""
    spec = KERNELS.get(row.json.get("kernel", ""))
    if spec is None or row.json.get("split") or not row.json["config"]["num_warps"]:  # 0 on a CPU
        return None
    try:
        config = spec.read_config(row.json["config"])
        whole = 1 if spec.split_configs else None
        plan = make_plan(row.problem, device, config=config, kernel=spec.name, num_splits=whole)
    except (TypeError, ValueError):
        return None
    return bounds.predict(plan, limits) if bounds.covers(plan, limits) else None


def errors(rows: Iterable[Recorded], device: Device, limits: Limits) -> dict[str, Error]:
    """By kernel, over every time that was taken in turns."""
    off: dict[str, list[float]] = {}
    for row in rows:
        seconds = predicted(row, device, limits) if row.is_ours and row.regime is Regime.IN_TURNS else None
        if seconds is not None:
            off.setdefault(row.json["kernel"], []).append(abs(seconds / (row.p50_ns * 1e-9) - 1))
    return {
        kernel: Error(float(np.median(found)), float(max(found)), len(found)) for kernel, found in off.items()
    }


def in_words(found: Mapping[str, Error]) -> str:
    """One sentence; "" where nothing is predicted."""
    each = (
        f"{kernel} {error.median:.0%} in the middle and {error.worst:.0%} at most (of {error.count})"
        for kernel, error in found.items()
    )
    return f"Times predicted from the ceilings alone are off by: {'; '.join(each)}." if found else ""
