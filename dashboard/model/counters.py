"""Recorded traces and inside traces, and the same counters and order from executing a kernel on this CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cufa import flash_attention
from cufa.build.compiler import keeps_logs
from cufa.build.phases import WAITS
from cufa.cache import cache_dir
from cufa.dashboard.model.asked import unlike
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.model.trace import Records
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.measure import inside, traces
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Intervals, lanes
from cufa.measure.kernel_runs import SUFFIX
from cufa.plan.planner import make_plan
from cufa.problem.element import ELEMENTS
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule

Read = TypeVar("Read")
#: Emulated multiply-adds per second and core: 1024 × 1024 scores at head dim 64 take about 0.15 s.
_RATE = 1024 * 1024 * 64 / 0.15
_LONGEST = 12.0
"""Seconds that a visitor may wait."""


def local_traces_dir() -> Path:
    """Folder of the traces taken on this machine."""
    return cache_dir() / "traces"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A trace and its origin."""

    trace: traces.Trace
    origin: str
    """"run" (taken by this dashboard) or "recorded" (shipped with the package)."""

    @property
    def card(self) -> str:
        return str(self.trace.environment["device"])

    @property
    def has_every_block(self) -> bool:
        """Whether each thread block has a record: if blocks share a work item, only the first block has one."""
        return self.trace.config.blocks_of_item == 1

    def is_of(self, device: Device) -> bool:
        """Whether the trace was taken on this model of card, not only on its architecture."""
        same = self.trace.num_sms == device.num_sms and self.trace.environment.get("arch") == device.arch.name
        return same and is_same_card(self.card, device.name)


def all_traces() -> tuple[dict[str, Kept], list[str]]:
    """Shipped traces and traces of this machine by name, and the error of each unreadable file."""
    shipped, damaged = read_folder(traces.TRACES_DIR, traces.load)
    taken, damaged_here = read_folder(local_traces_dir(), traces.load)
    by_name = {name: Kept(trace, "recorded") for name, trace in shipped.items()}
    return by_name | {name: Kept(trace, "run") for name, trace in taken.items()}, damaged + damaged_here


def read_folder(folder: Path, load: Callable[[Path], Read]) -> tuple[dict[str, Read], list[str]]:
    """The ``.trace`` files of a folder by name, and the error of each unreadable one. Unchanged files are read once."""
    by_name: dict[str, Read] = {}
    damaged: list[str] = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            by_name[file.stem] = _load(load, file, file.stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return by_name, damaged


@functools.lru_cache(
    512
)  # more than the shipped files: each rerun of a page asks for all, at some 10 ms each
def _load(load: Callable[[Path], Read], file: Path, modified: int) -> Read:
    return load(file)


def matching_trace(problem: Problem, kernel: str, config: TileConfig, device: Device) -> Kept | None:
    """A trace of exactly this launch, preferably on this model of card (:meth:`Kept.is_of`)."""
    same = [
        kept
        for kept in all_traces()[0].values()
        for t in [kept.trace]
        if t.kernel == kernel
        and config_key(t.config) == config_key(config)
        and dataclasses.replace(t.problem, dtype=problem.dtype, mask=problem.mask) == problem
        and _same_scores(t.problem, problem)
    ]
    return max(same, key=lambda kept: kept.is_of(device), default=None)


def _same_scores(one: Problem, other: Problem) -> bool:
    """Whether two problems of one shape have the same visible scores: one band may be written in several ways."""
    if one.mask.irregular_kind or other.mask.irregular_kind:
        return one.mask == other.mask
    return one.edges == other.edges


@dataclasses.dataclass(frozen=True)
class EmulationKey:
    """All inputs of the counters of one head."""

    schedule: Schedule
    algorithm: str
    config: TileConfig
    head_dim: int
    softcap: float | None = None
    dtype: str = "float16"
    precision: str = "native"


def why_not_emulated(schedule: Schedule, head_dim: int, is_registered: bool) -> str | None:
    """Why the kernel cannot count tiles here within a few seconds; None if it can."""
    if not is_registered:
        return "No kernel is built with these tiles."
    if not schedule.visited:
        return None
    products = schedule.visited * schedule.block_q * schedule.block_kv * head_dim
    if schedule.by_keys:  # five products per tile instead of two
        products = products * 5 // 2
    if products / _RATE > _LONGEST:
        return (
            f"Executing one head of this length would take about {products / _RATE:.0f} s on a CPU core: choose a "
            "shorter sequence."
        )
    return None


@functools.lru_cache(32)
def emulate_counts(key: EmulationKey) -> Records | str:
    """Trace records of one head, by executing the kernel's source; on failure, the reason."""
    from cufa.run.emulate.build import CompilerError
    from cufa.run.emulate.calls import EmulationError, emulate, emulate_backward

    s = key.schedule
    rng = np.random.default_rng(0)
    dtype = ELEMENTS[key.dtype].dtype
    q = rng.standard_normal((1, 1, s.seqlen_q, key.head_dim), np.float32).astype(dtype)
    k = rng.standard_normal((1, 1, s.seqlen_k, key.head_dim), np.float32).astype(dtype)
    scores: dict[str, Any] = {"mask": s.mask, "softcap": key.softcap}
    precision = None if key.precision == "native" else key.precision
    how = {**scores, "algorithm": key.algorithm, "config": key.config, "precision": precision}
    try:
        if s.by_keys:
            out, lse = flash_attention(q, k, k, **scores, return_lse=True, device="cpu")
            return emulate_backward(q, q, k, k, out, lse, **how).records
        return emulate(q, k, k, **how).records
    except (EmulationError, CompilerError, ValueError) as error:
        return f"The kernel could not be executed here: {error}"


def inside_traces() -> tuple[dict[str, InsideTrace], list[str]]:
    """Shipped inside traces by name, and the error of each unreadable file."""
    return read_folder(inside.INSIDE_DIR, inside.load)


def matching_inside(problem: Problem, spec: Kernel, config: TileConfig, device: Device) -> InsideTrace | None:
    """A recorded trace of this kernel with these tiles, head dim and kind of mask. Traces of this card come first, then
    traces of these lengths."""
    same = [
        trace
        for trace in inside_traces()[0].values()
        if trace.kernel == spec.name
        and config_key(trace.config) == config_key(config)
        and (trace.problem.head_dim, trace.problem.mask_kind) == (problem.head_dim, problem.mask_kind)
    ]

    def nearness(trace: InsideTrace) -> tuple[bool, bool]:
        lengths = (trace.problem.seqlen_q, trace.problem.seqlen_k) == (problem.seqlen_q, problem.seqlen_k)
        return is_same_card(str(trace.environment["device"]), device.name), lengths

    return max(same, key=nearness, default=None)


def differences(trace: InsideTrace, problem: Problem, card: str) -> str:
    """:func:`unlike` of a recorded trace; "" of an executed one."""
    env = trace.environment
    return unlike(card, str(env["device"]), env["recorded"], problem, trace.problem) if trace.is_time else ""


def waits_of(
    trace: InsideTrace, spans: Intervals, sm: int, producer: bool = False, phases: Sequence[str] = WAITS
) -> float | None:
    """Share of their time that one SM's producer warps, or its other warps, wait; None: no such warps."""
    mine = [
        lane.log for lane in lanes(trace, spans) if lane.sm == sm and (lane.role == "producer") == producer
    ]
    states = spans[np.isin(spans["log"], mine) & ~spans["flight"]]
    times = states["end"] - states["begin"]
    waiting = times[np.isin(states["phase"], [trace.phases.index(x) for x in phases if x in trace.phases])]
    return float(waiting.sum() / times.sum()) if len(times) else None


def waits_for_data(trace: InsideTrace, times: Intervals, sm: int) -> float:
    """Share of their time that one SM's consumer warps (without a producer: all warps) wait for data."""
    return waits_of(trace, times, sm, phases=("WAIT_DATA",)) or 0.0


def has_stamps(spec: Kernel) -> bool:
    return keeps_logs(spec.source)


@functools.lru_cache(8)
def execute_inside(problem: Problem, device: Device, algorithm: str, config: TileConfig) -> InsideTrace | str:
    """One head of the problem, executed on this CPU; on failure, the reason."""
    from cufa.run.emulate.build import CompilerError
    from cufa.run.emulate.calls import EmulationError

    one = dataclasses.replace(problem, batch=1, heads=1, kv_heads=1)
    try:
        return inside.execute(make_plan(one, device, algorithm, config))
    except (CompilerError, EmulationError, ValueError) as error:
        return str(error)
