"""What the dashboard's tests share: making it importable, and made-up evidence that looks like a GPU's."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from card_support import lines_of

from cufa import masks
from cufa.cache import cache_dir
from cufa.commands.dashboard import dashboard_dir, make_importable
from cufa.gpu.architectures import Device
from cufa.kernels.params import TRACE_RECORD
from cufa.measure import traces
from cufa.measure.cases import READ, Case, Contender, Work
from cufa.measure.decode_cases import make_decode
from cufa.measure.limits import Limits
from cufa.measure.measured import digest, row_of
from cufa.measure.power import Power
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES
from cufa.measure.timing import Load, Timing
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import Problem
from cufa.problem.tile_classes import TileRanges
from cufa.schedule.schedule import Schedule

make_importable()

APP = str(dashboard_dir() / "app.py")
DEVICE = Device("Made-up GPU", Device.typical(90).arch, 132)
ENVIRONMENT = {
    "recorded": "2026-01-02T03:04:05+00:00",
    "device": DEVICE.name,
    "arch": "sm_90",
    "num_sms": 132,
}
LIMITS = Limits(
    copy_bytes=4e12,
    flops={"float16": 7e14, "bfloat16": 7e14, "tf32": 3.5e14},
    exponentials=3.9e12,
    mma_flops={"float16": 6e14, "bfloat16": 6e14, "tf32": 3e14},
)
#: Times of the kernels, as a multiple of what the ceilings allow.
SLOWNESS = {"fa2_forward": 2.0, "fa2_noskip": 3.0, "fa1_forward": 5.0, "naive": 20.0}


def own_cache(folder: Path) -> Path:
    """An empty cache, but for kernels compiled for this CPU: they are found by their content, and take seconds."""
    builds = cache_dir() / "host"
    builds.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "host").symlink_to(builds)
    return folder


def schedules() -> list[Schedule]:
    """Square and not, of whole tiles and not, under every kind of mask; rows that see no key."""
    return [
        Schedule(512, 512, 128, 64, CAUSAL),
        Schedule(500, 300, 64, 64, CAUSAL),
        Schedule(300, 500, 64, 128, CAUSAL, skip_masked_tiles=False),
        Schedule(1, 1, 64, 64, FULL),
        Schedule(1000, 10, 64, 64, CAUSAL),
        Schedule(700, 700, 64, 64, Band(100, 0)),
        Schedule(300, 900, 64, 128, Band(130, 65, "top-left")),
        Schedule(900, 300, 128, 64, Band(7, None, -200)),
        Schedule(400, 400, 64, 64, Band(20, 20, 350), skip_masked_tiles=False),
        Schedule(700, 900, 64, 128, masks.streaming(70, 100)),
        Schedule(500, 500, 64, 64, masks.documents([100, 270, 130], causal=False)),
    ]


def write_evidence(directory: Path, *suites: str, with_loads: bool = True) -> Path:
    """A card's file with rows for every kernel of some suites, and of decoding in both regimes."""
    file = directory / "made-up-gpu.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(_evidence(suites or ("forward", "versions"), with_loads))
    return file


@functools.cache
def _evidence(suites: tuple[str, ...], with_loads: bool) -> str:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys([*suites, "decode"]):
        rows = [row for case in SUITES[name].cases(DEVICE) for row in case_records(case)]
        if with_loads and name in ("forward", "decode"):
            rows += [
                row for case in SUITES[name].cases(DEVICE) for row in case_records(case, Regime.SUSTAINED)
            ]
        found[name] = rows
    lines = lines_of(found, ENVIRONMENT, dataclasses.asdict(LIMITS))
    return "".join(json.dumps(line) + "\n" for line in lines)


def case_records(case: Case, regime: Regime = Regime.IN_TURNS) -> list[dict[str, Any]]:
    """As :func:`cufa.measure.measured.row_of` makes them, of contenders that run on the made-up GPU."""
    rows = []
    for place, contender in enumerate(case.contenders):
        problem = case.problem_of(contender)
        plan = None
        if contender.is_ours:
            try:
                plan = contender.plan(case.problem, DEVICE)
            except ValueError:  # no kernel serves it here
                continue
        elif not (contender.algorithm == READ or OPERATIONS[problem.operation].memory_bound):
            continue
        work = Work.of(problem, case.lengths)
        floor = LIMITS.floor(problem, work)
        seconds = (
            floor[0] * _slowness(contender, problem, plan, place) * (1.1 if regime is Regime.SUSTAINED else 1)
        )
        error = None if contender.algorithm == READ else 1e-3
        load = None
        if regime is Regime.SUSTAINED:
            load = Load(1000, 4, 3.0, 0.0, Power(joules=600 * seconds, watts=600.0, clock_mhz=1500.0))
        timing = Timing((seconds,) * 3, regime, load=load)
        row = row_of(
            case.name, contender.label, problem, timing, work, floor, error=error, plan=plan, lengths=case.lengths
        ).json  # fmt: skip
        if plan is not None and plan.spec.algorithm == "fa3":
            needs = {"products": 0.6 * seconds, "memory": 0.1 * seconds, "busiest block": 0.7 * seconds}
            row["needs_ns"] = {name: round(1e9 * x) for name, x in needs.items()}
            row["predicted_ns"] = round(1e9 * seconds)
        rows.append(row)
    return rows


def _slowness(contender: Contender, problem: Problem, plan: Plan | None, place: int) -> float:
    """As a multiple of what the ceilings allow. Decoding: a plain read at all of it, ours at 0.9, others at half."""
    if OPERATIONS[problem.operation].memory_bound:
        return 1.0 if contender.algorithm == READ else 1.1 + 0.05 * place if contender.is_ours else 2.0
    return SLOWNESS.get(plan.spec.name if plan else "", 2.5)


def decode_plan(batch: int, capacity: int, schedule: str = "auto", **changes: Any) -> Plan:
    problem = make_decode(batch, 32, 8, capacity)
    return make_plan(dataclasses.replace(problem, **changes), DEVICE, schedule)


def make_records(plan: Plan, ns_per_tile: int = 900) -> np.ndarray:
    """Trace records as a kernel that follows its schedule would write them, on the predicted timeline."""
    from cufa.dashboard.model import launch

    schedule = plan.schedule
    blocks = launch.thread_blocks(plan.problem, schedule, plan.spec, DEVICE)
    timeline = launch.predict(blocks, DEVICE.num_sms, plan.config.blocks_per_sm)
    found = []
    for i in range(len(blocks)):
        start, end = (round(10**9 + float(t[i]) * ns_per_tile) for t in (timeline.start, timeline.end))
        whole = blocks.q_block[i] == launch.WHOLE_HEAD
        for q in range(schedule.num_q_blocks) if whole else [int(blocks.q_block[i])]:
            taker = i if blocks.thread_block is None else int(blocks.thread_block[i])
            ranges = schedule.ranges
            first, first_clear = (
                (ranges.first[q], ranges.clear_first[q]) if isinstance(ranges, TileRanges) else (0, 0)
            )
            values = {
                "start_ns": start, "end_ns": end, "sm": timeline.sm[i], "q_block": q, "head": blocks.head[i],
                "batch": blocks.batch[i], "first_tile": first, "tiles_visited": ranges.count[q],
                "tiles_skipped": schedule.tiles_of_block - ranges.count[q], "first_clear": first_clear,
                "tiles_clear": ranges.clear[q], "thread_block": taker,
            }  # fmt: skip
            found.append(tuple(values.get(name, 0) for name in TRACE_RECORD.names or ()))
    return np.sort(np.array(found, TRACE_RECORD), order=["batch", "head", "q_block"])


def make_trace(plan: Plan, **changes: Any) -> traces.Trace:
    """A trace of a plan; ``changes`` overwrite fields."""
    trace = traces.Trace(
        plan.spec.name, digest(plan.spec), plan.problem, plan.config, dict(ENVIRONMENT), DEVICE.num_sms,
        make_records(plan),
    )  # fmt: skip
    return dataclasses.replace(trace, **changes)
