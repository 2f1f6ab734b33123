"""The fastest kernel for each class of problem, from recorded measurements; ``algorithm="auto"`` selects it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from cufa.calls import tuning
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure.cards import Card
from cufa.measure.measured import Measured, by_case
from cufa.measure.regimes import Regime
from cufa.plan.candidates import problem_class
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import make_plan


def fastest(card: Card) -> dict[str, str]:
    """Fastest kernel by :func:`cufa.plan.candidates.problem_class`: the least geometric mean of times over the cases
    that all kernels ran. Only classes in which the registry's first choice was measured alternately with others."""
    device = Device.typical(card.environment["arch"])
    logs: dict[str, list[dict[str, float]]] = {}
    rows = (row for row in card.rows if row.regime is Regime.IN_TURNS and _is_a_choice(row))
    for found in by_case(rows):
        problem = next(iter(found.values())).problem
        times = {row.json["kernel"]: math.log(row.p50_ns) for row in found.values()}
        if len(times) > 1 and make_plan(problem, device).spec.name in times:
            logs.setdefault(problem_class(problem), []).append(times)
    winners = {name: _least(cases) for name, cases in sorted(logs.items())}
    return {name: kernel for name, kernel in winners.items() if kernel}


def write(found: Iterable[Card]) -> list[Path]:
    """Write the files that the planner reads. Raises OSError if a file cannot be written."""
    files = []
    for card in found:
        files.append(tuning.recorded_path(card.environment["device"]))
        tuning.write_json(files[-1], fastest(card))
    tuning.fastest_kernels.cache_clear()
    return files


def _is_a_choice(row: Measured) -> bool:
    """Whether a row's kernel ran as the planner launches it, not as an ablation step or with other tiles. False for
    decode, whose splits select the kernel."""
    spec = KERNELS.get(row.json.get("kernel", ""))
    return (
        spec is not None
        and row.label == spec.algorithm
        and not OPERATIONS[spec.operation].split_selects_kernel
    )


def _least(cases: list[dict[str, float]]) -> str:
    common: set[str] = set.intersection(*(set(times) for times in cases))
    totals: Mapping[str, float] = {name: sum(times[name] for times in cases) for name in common}
    return min(totals, key=lambda name: totals[name], default="")
