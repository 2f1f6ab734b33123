"""Inside traces for the pages: recorded ones that match, and what executing the kernel here says of the order."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from cufa.build.compiler import keeps_logs
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.devices import is_card
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.measure import inside
from cufa.measure.inside import InsideTrace
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem


def recorded() -> tuple[dict[str, InsideTrace], list[str]]:
    """Shipped inside traces by name; and what could not be read."""
    found: dict[str, InsideTrace] = {}
    damaged: list[str] = []
    for file in sorted(inside.INSIDE_DIR.glob("*.npz")):
        try:
            found[file.stem] = _load(file, file.stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return found, damaged


@functools.lru_cache(256)  # more than there are: every rerun of a page asks for all, and one takes some 10 ms
def _load(file: Path, modified: int) -> InsideTrace:
    return inside.load(file)


def matching(problem: Problem, spec: Kernel, config: TileConfig, device: Device) -> InsideTrace | None:
    """A recorded trace of this kernel with these tiles at this head dim under such a mask, which is what the inside of
    a block depends on; of this card rather than of another, of these lengths rather than of others."""
    same = [
        trace
        for trace in recorded()[0].values()
        if trace.kernel == spec.name
        and config_key(trace.config) == config_key(config)
        and (trace.problem.head_dim, trace.problem.mask_kind) == (problem.head_dim, problem.mask_kind)
    ]

    def nearness(trace: InsideTrace) -> tuple[bool, bool]:
        card = str(trace.environment["device"])
        lengths = (trace.problem.seqlen_q, trace.problem.seqlen_k) == (problem.seqlen_q, problem.seqlen_k)
        return is_card(card, device.name) or is_card(device.name, card), lengths

    return max(same, key=nearness, default=None)


def has_stamps(spec: Kernel) -> bool:
    return keeps_logs(spec.source)


@functools.lru_cache(8)
def executed(problem: Problem, device: Device, algorithm: str, config: TileConfig) -> InsideTrace | str:
    """One head of the problem, executed on this CPU; or why that failed, in words."""
    from cufa.run.emulate.build import CompilerError
    from cufa.run.emulate.calls import EmulationError

    one = dataclasses.replace(problem, batch=1, heads=1, kv_heads=1)
    try:
        return inside.execute(make_plan(one, device, algorithm, config))
    except (CompilerError, EmulationError, ValueError) as error:
        return str(error)
