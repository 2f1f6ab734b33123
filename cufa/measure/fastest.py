"""Which kernel recorded benchmarks found fastest for each class of problem: what ``algorithm="auto"`` takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..gpu.architectures import Device
from ..kernels import KERNELS
from ..plan import tuning
from ..plan.operation import OPERATIONS
from ..plan.planner import make_plan
from ..plan.problem_classes import problem_class
from .recorded import Recorded, by_case, rows_of
from .records import Json
from .regimes import Regime


def fastest(record: Json) -> dict[str, str]:
    """Kernel by :func:`cufa.plan.problem_classes.problem_class`, for every class in which the registry's first
    choice took
    turns with others: the one with the least time, on the geometric mean over the cases that all of them ran."""
    device = Device.typical(record["environment"]["arch"])
    logs: dict[str, list[dict[str, float]]] = {}
    rows = (row for row in rows_of(record) if row.regime is Regime.IN_TURNS and _is_a_choice(row))
    for found in by_case(rows):
        problem = next(iter(found.values())).problem
        times = {row.json["kernel"]: math.log(row.p50_ns) for row in found.values()}
        if len(times) > 1 and make_plan(problem, device).spec.name in times:
            logs.setdefault(problem_class(problem), []).append(times)
    winners = {name: _least(cases) for name, cases in sorted(logs.items())}
    return {name: kernel for name, kernel in winners.items() if kernel}


def write(evidence: Iterable[Json]) -> list[Path]:
    """The files that the planner reads. Raises OSError when one cannot be written."""
    files = []
    for record in evidence:
        files.append(tuning.recorded_path(record["environment"]["device"]))
        tuning.write_json(files[-1], fastest(record))
    tuning.fastest_kernels.cache_clear()
    return files


def _is_a_choice(row: Recorded) -> bool:
    """A kernel as the planner would launch it, not a step of an ablation or one of many tilings; of an operation
    whose planner has no rule of its own."""
    spec = KERNELS.get(row.json.get("kernel", ""))
    return spec is not None and row.label == spec.algorithm and not OPERATIONS[spec.operation].splits


def _least(cases: list[dict[str, float]]) -> str:
    common: set[str] = set.intersection(*(set(times) for times in cases))
    totals: Mapping[str, float] = {name: sum(times[name] for times in cases) for name in common}
    return min(totals, key=lambda name: totals[name], default="")
