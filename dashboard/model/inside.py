"""Inside traces: recorded ones that match a launch, and the order found by executing the kernel on this CPU."""

from __future__ import annotations

import dataclasses
import functools

from cufa.build.compiler import keeps_logs
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.counters import read_folder
from cufa.dashboard.model.devices import is_same_card
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.measure import inside
from cufa.measure.inside import InsideTrace
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem


def recorded() -> tuple[dict[str, InsideTrace], list[str]]:
    """Shipped inside traces by name, and the error of each unreadable file."""
    return read_folder(inside.INSIDE_DIR, inside.load)


def matching(problem: Problem, spec: Kernel, config: TileConfig, device: Device) -> InsideTrace | None:
    """A recorded trace of this kernel with these tiles, head dim and kind of mask. Traces of this card come first, then
    traces of these lengths."""
    same = [
        trace
        for trace in recorded()[0].values()
        if trace.kernel == spec.name
        and config_key(trace.config) == config_key(config)
        and (trace.problem.head_dim, trace.problem.mask_kind) == (problem.head_dim, problem.mask_kind)
    ]

    def nearness(trace: InsideTrace) -> tuple[bool, bool]:
        lengths = (trace.problem.seqlen_q, trace.problem.seqlen_k) == (problem.seqlen_q, problem.seqlen_k)
        return is_same_card(str(trace.environment["device"]), device.name), lengths

    return max(same, key=nearness, default=None)


def has_stamps(spec: Kernel) -> bool:
    return keeps_logs(spec.source)


@functools.lru_cache(8)
def executed(problem: Problem, device: Device, algorithm: str, config: TileConfig) -> InsideTrace | str:
    """One head of the problem, executed on this CPU; on failure, the reason."""
    from cufa.run.emulate.build import CompilerError
    from cufa.run.emulate.calls import EmulationError

    one = dataclasses.replace(problem, batch=1, heads=1, kv_heads=1)
    try:
        return inside.execute(make_plan(one, device, algorithm, config))
    except (CompilerError, EmulationError, ValueError) as error:
        return str(error)
