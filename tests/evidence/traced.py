"""Which traces ship with the package, and how they are taken anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from cufa.gpu.architectures import Device
from cufa.measure import inside, traces
from cufa.measure.cases import of_forward
from cufa.measure.decode_cases import make_decode
from cufa.measure.suites import make
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import CAUSAL, FULL


def block_plans(device: Device) -> Iterator[Plan]:
    """Each algorithm where the GPU is full, and where it is nearly empty."""
    for batch, heads, seqlen, head_dim in ((4, 16, 4096, 128), (2, 4, 2048, 64)):
        problem = make(batch, heads, seqlen, head_dim, "bfloat16", CAUSAL)
        for algorithm in ("fa1", "fa2_noskip", "fa2", "fa3"):
            with contextlib.suppress(ValueError):  # not every GPU runs every kernel
                yield make_plan(problem, device, algorithm)
        yield make_plan(of_forward(problem), device)


def inside_plans(device: Device) -> Iterator[Plan]:
    """Each kernel with logs at head dims 64 and 128, full and causal, and decoding."""
    for head_dim in (64, 128):
        for mask in (FULL, CAUSAL):
            problem = make(2, 32, 2048, head_dim, "bfloat16", mask)
            for algorithm in ("fa2", "fa3"):
                for p in (problem, of_forward(problem)):
                    with contextlib.suppress(ValueError):
                        yield make_plan(p, device, algorithm)
    yield make_plan(make_decode(1, 32, 8, 32768), device)


def renew(device: Device, with_inside: bool) -> Iterator[str]:
    """Takes the traces that this card lacks and deletes its stale ones; yields the files written."""
    yield from _renew(traces, traces.TRACES_DIR, list(block_plans(device)), device)
    if with_inside:
        yield from _renew(inside, inside.INSIDE_DIR, list(inside_plans(device)), device)


def _renew(module: ModuleType, folder, plans: list[Plan], device: Device) -> Iterator[str]:
    wanted = {(plan.spec.name, plan.problem, plan.config): plan for plan in plans}
    for file in sorted(folder.glob("*.npz")):
        trace = module.load(file)
        if trace.environment["device"] != device.name:
            continue
        if trace.is_current and (trace.kernel, trace.problem, trace.config) in wanted:
            del wanted[trace.kernel, trace.problem, trace.config]
        else:
            file.unlink()
    for plan in wanted.values():
        yield str(module.save(module.record(plan), folder))
