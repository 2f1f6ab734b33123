"""The traces that ship with the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cufa.gpu.architectures import Device
from cufa.measure import inside, traces
from cufa.measure.cases import of_forward
from cufa.measure.decode_cases import make_decode
from cufa.measure.kernel_runs import SUFFIX
from cufa.measure.suites import make
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import CAUSAL, FULL

#: Module, folder, and the constants of a traced build.
TRACES: tuple[tuple[Any, Path, dict[str, bool]], ...] = (
    (traces, traces.TRACES_DIR, {"trace": True}),
    (inside, inside.INSIDE_DIR, {"inside": True}),
)


def block_plans(device: Device) -> Iterator[Plan]:
    """Plans of each algorithm: with thread blocks that fill the GPU, and with few thread blocks."""
    for batch, heads, seqlen, head_dim in ((4, 16, 4096, 128), (2, 4, 2048, 64)):
        problem = make(batch, heads, seqlen, head_dim, "bfloat16", CAUSAL)
        for algorithm in ("fa1", "fa2_noskip", "fa2", "fa3"):
            with contextlib.suppress(ValueError):  # not every GPU runs every kernel
                yield make_plan(problem, device, algorithm)
        yield make_plan(of_forward(problem), device)


def inside_plans(device: Device) -> Iterator[Plan]:
    """Plans of each kernel that keeps logs: few, for their files are half of the recorded data."""
    for head_dim, mask, algorithms in (
        (128, CAUSAL, ("fa2", "fa3")),
        (128, FULL, ("fa3",)),
        (64, CAUSAL, ("fa3",)),
    ):
        problem = make(2, 32, 2048, head_dim, "bfloat16", mask)
        for algorithm in algorithms:
            for p in (problem, of_forward(problem)):
                with contextlib.suppress(ValueError):
                    yield make_plan(p, device, algorithm)
    yield make_plan(make_decode(1, 32, 8, 32768), device)


def renew(device: Device, with_inside: bool) -> Iterator[str]:
    """Record the traces that this card lacks, and delete its stale traces. Yields the files written."""
    for module, folder, _ in TRACES if with_inside else TRACES[:1]:
        plans = block_plans(device) if module is traces else inside_plans(device)
        wanted = {(plan.spec.name, plan.problem, plan.config): plan for plan in plans}
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            trace = module.load(file)
            key = trace.kernel, trace.problem, trace.config
            if trace.environment["device"] == device.name and not (
                trace.is_current and wanted.pop(key, None)
            ):
                file.unlink()
        for plan in wanted.values():
            yield str(module.save(module.record(plan), folder))
