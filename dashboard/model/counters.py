"""The tile counters that kernels keep: from recorded traces, and from executing a kernel on this CPU."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from cufa import flash_attention
from cufa.cache import cache_dir
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.devices import is_card
from cufa.dashboard.model.trace import Records, disagreements
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.measure import traces
from cufa.problem.element import ELEMENTS
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule

__all__ = [
    "EmulationKey",
    "all_traces",
    "disagreements",
    "emulate_counts",
    "matching_trace",
    "why_not_emulated",
]

#: Emulated multiply-adds a second and core, roughly: 1024 × 1024 scores at head dim 64 take 0.15 s.
_RATE = 1024 * 1024 * 64 / 0.15
_LONGEST = 12.0
"""Seconds that a page may keep someone waiting."""


def local_traces_dir() -> Path:
    """Where traces of this machine are kept."""
    return cache_dir() / "traces"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A trace, and where it comes from."""

    trace: traces.Trace
    origin: str
    """"run" (taken by this dashboard) or "recorded" (shipped with the package)."""

    @property
    def card(self) -> str:
        return str(self.trace.environment["device"])

    @property
    def has_every_block(self) -> bool:
        """Of blocks that share an item the first alone keeps a record."""
        return self.trace.config.blocks_of_item == 1

    def is_of(self, device: Device) -> bool:
        """Whether it was taken on such a card, not merely one of its architecture."""
        same = self.trace.num_sms == device.num_sms and self.trace.environment.get("arch") == device.arch.name
        return same and (is_card(self.card, device.name) or is_card(device.name, self.card))


def all_traces() -> tuple[dict[str, Kept], list[str]]:
    """Shipped traces and those of this machine, by name; and what could not be read."""
    found: dict[str, Kept] = {}
    damaged: list[str] = []
    for origin, directory in (("recorded", traces.TRACES_DIR), ("run", local_traces_dir())):
        for file in sorted(directory.glob("*.npz")):
            try:
                found[file.stem] = Kept(_load(file, file.stat().st_mtime_ns), origin)
            except (OSError, ValueError) as error:
                damaged.append(str(error))
    return found, damaged


@functools.lru_cache(64)
def _load(file: Path, modified: int) -> traces.Trace:
    return traces.load(file)


def matching_trace(problem: Problem, kernel: str, config: TileConfig, device: Device) -> Kept | None:
    """A trace of this very launch, if there is one of such a card (:meth:`Kept.is_of`); else of another one."""
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
    """Of two problems of one shape. Bands may be written in several ways."""
    if one.mask.beyond_band or other.mask.beyond_band:
        return one.mask == other.mask
    return one.edges == other.edges


@dataclasses.dataclass(frozen=True)
class EmulationKey:
    """Everything that the counters of one head depend on."""

    schedule: Schedule
    algorithm: str
    config: TileConfig
    head_dim: int
    softcap: float | None = None
    dtype: str = "float16"
    precision: str = "native"


def why_not_emulated(schedule: Schedule, head_dim: int, is_registered: bool) -> str | None:
    """None when the kernel can count here within a few seconds."""
    if not is_registered:
        return "No kernel is built with these tiles, so there is none to count."
    if not schedule.visited:
        return None
    products = schedule.visited * schedule.block_q * schedule.block_kv * head_dim
    if schedule.by_keys:  # five products per tile instead of two
        products = products * 5 // 2
    if products / _RATE > _LONGEST:
        return (
            f"One head of this length would take about {products / _RATE:.0f} s on a CPU core: choose a "
            "shorter one to have the kernel's source executed here."
        )
    return None


@functools.lru_cache(32)
def emulate_counts(key: EmulationKey) -> Records | str:
    """Trace records of one head, by executing the kernel's source; or why that failed, in words."""
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
