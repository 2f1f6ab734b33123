"""What the dashboard's tests share: making it importable, and made-up evidence that looks like a GPU's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from cufa.bench import decode, records, traces
from cufa.bench.limits import Limits
from cufa.bench.suites import SUITES
from cufa.bench.timing import Timing
from cufa.commands.dashboard import dashboard_dir, make_importable
from cufa.core.architectures import Device
from cufa.core.params import TRACE_RECORD
from cufa.core.problem import Problem, default_scale
from cufa.core.schedule import Schedule
from cufa.decode.plan import DecodePlan, make_decode_plan
from cufa.decode.problem import DecodeProblem
from cufa.kernels import KERNELS
from cufa.planner import Plan, make_plan

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
    copy_bytes=4e12, flops={"float16": 7e14, "bfloat16": 7e14, "tf32": 3.5e14}, exponentials=3.9e12
)
#: Times of the kernels, as a multiple of what the ceilings allow.
SLOWNESS = {"fa2_forward": 2.0, "fa2_noskip": 3.0, "fa1_forward": 5.0, "naive": 20.0}


def schedules() -> list[Schedule]:
    """Square and not, of whole tiles and not, causal and not; rows that see no key."""
    return [
        Schedule(512, 512, 128, 64, True),
        Schedule(500, 300, 64, 64, True),
        Schedule(300, 500, 64, 128, True, skip_masked_tiles=False),
        Schedule(1, 1, 64, 64, False),
        Schedule(1000, 10, 64, 64, True),
    ]


def write_evidence(directory: Path, *suites: str) -> Path:
    """An evidence file with rows for every kernel of some suites."""
    found: dict[str, Any] = {}
    for name in suites or ("forward", "versions"):
        rows = []
        for problem, contenders in SUITES[name].cases(DEVICE):
            ours = [c for c in contenders if not c.is_peer]
            rows += [_row(problem, c.label, make_plan(problem, DEVICE, c.algorithm)) for c in ours]
        found[name] = {"title": SUITES[name].title, "rows": rows, "skipped": []}
    kernels = {name: {"digest": records.digest(spec)} for name, spec in KERNELS.items()}
    record = {"schema": records.SCHEMA, "environment": ENVIRONMENT, "limits": dataclasses.asdict(LIMITS)}
    record["decode"] = {"rows": [row for case in decode.cases() for row in decode_records(case)]}
    file = directory / "made-up-gpu.json"
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**record, "kernels": kernels, "suites": found}))
    return file


def decode_records(case: decode.DecodeCase) -> list[dict[str, Any]]:
    """As :func:`cufa.bench.decode.row_record` makes them: a plain read, ours at 0.9, others at half."""
    read = case.kv_bytes / 4e12
    slowness = {decode.READ: 1.0, **{c.label: 1.1 + 0.05 * n for n, c in enumerate(case.contenders)}}
    slowness |= dict.fromkeys(decode.PEERS if case.with_peers else (), 2.0)
    rows = []
    for label, slower in slowness.items():
        contender = next((c for c in case.contenders if c.label == label), None)
        timing = Timing((read * slower,) * 5)
        plan = None if contender is None else contender.plan(DEVICE)
        problem = case.problem if contender is None else contender.problem
        error = None if label == decode.READ else 1e-3
        row = decode.DecodeRow(case.title, label, problem, timing, case.kv_bytes, error, plan)
        rows.append(decode.row_record(row))
    return rows


def _row(problem: Problem, label: str, plan: Plan) -> dict[str, Any]:
    fastest, bound = LIMITS.floor(problem)
    seconds = fastest * SLOWNESS.get(plan.spec.name, 2.5)
    nanoseconds = round(seconds * 1e9)
    needs = {"products": 0.6 * seconds, "memory": 0.1 * seconds, "busiest block": 0.7 * seconds}
    derived = {"needs_ns": {name: round(1e9 * s) for name, s in needs.items()}, "predicted_ns": nanoseconds}
    return (derived if plan.spec.algorithm == "fa3" else {}) | {
        "label": label,
        "kernel": plan.spec.name,
        "digest": records.digest(plan.spec),
        "problem": dataclasses.asdict(problem),
        "samples_ns": [nanoseconds] * 3,
        "p10_ns": nanoseconds,
        "p50_ns": nanoseconds,
        "p90_ns": nanoseconds,
        "tflops": problem.flops / seconds / 1e12,
        "gbytes_per_s": problem.io_bytes / seconds / 1e9,
        "of_ceiling": fastest / seconds,
        "ceiling": bound,
        "max_error": 1e-3,
    }


def decode_plan(batch: int, capacity: int, schedule: str = "auto", **changes: Any) -> DecodePlan:
    problem = DecodeProblem(batch, 32, 8, 1, capacity, 128, "bfloat16", "bfloat16", default_scale(128))
    return make_decode_plan(dataclasses.replace(problem, **changes), DEVICE, schedule=schedule)


def make_records(plan: Plan, ns_per_tile: int = 900) -> np.ndarray:
    """Trace records as a kernel that follows its schedule would write them, on the predicted timeline."""
    from cufa.dashboard.model import launch

    schedule = plan.schedule
    blocks = launch.thread_blocks(plan.problem, schedule, plan.spec.algorithm, DEVICE.num_sms)
    timeline = launch.predict(blocks, DEVICE.num_sms, plan.config.blocks_per_sm)
    found = []
    for i in range(len(blocks)):
        start, end = (round(10**9 + float(t[i]) * ns_per_tile) for t in (timeline.start, timeline.end))
        whole = blocks.q_block[i] == launch.WHOLE_HEAD
        for q in range(schedule.num_q_blocks) if whole else [int(blocks.q_block[i])]:
            visits = int(schedule.visits[q])
            taker = i if blocks.thread_block is None else int(blocks.thread_block[i])
            counts = (visits, schedule.num_kv_blocks - visits, int(schedule.unmasked[q]), taker)
            found.append((start, end, timeline.sm[i], q, blocks.head[i], blocks.batch[i], *counts))
    return np.sort(np.array(found, TRACE_RECORD), order=["batch", "head", "q_block"])


def make_trace(plan: Plan, **changes: Any) -> traces.Trace:
    """A trace of a plan; ``changes`` overwrite fields."""
    trace = traces.Trace(
        plan.spec.name,
        records.digest(plan.spec),
        plan.problem,
        plan.config,
        DEVICE.num_sms,
        dict(ENVIRONMENT),
        make_records(plan),
    )
    return dataclasses.replace(trace, **changes)
