"""From a DecodeProblem to a DecodePlan: pure Python, no GPU. The lengths stand on the device: only the
capacity and whether the batch is ragged are known here."""

from __future__ import annotations

import dataclasses

from ..architectures import Device
from ..kernels import DECODE_KERNELS, KernelSpec, Launch, TileConfig
from ..kernels.decode import items, row_blocks
from ..planner import fitting_configs
from .problem import DecodeProblem
from .schedule import num_tiles

SCHEDULES = ("fixed", "balanced")

#: A tile in NumPy: keys enough to amortise calls, and query rows enough that a tile of keys is read once (a
#: second block of rows would convert it again).
CPU_CONFIG = TileConfig(block_q=256, block_kv=256, num_warps=0)

#: Tiles of a split that are worth a merge on the CPU.
_CPU_TILES = 8

#: Shares a resident block where lengths differ: SMs do not read at one speed, and who is done early takes
#: more.
_RAGGED_WAVES = 4

#: Fixed splits are for batches that they cut into one wave as full as this; measured on an H200.
FULL_WAVE = 0.9


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How one problem is run. Printable; made without touching a device."""

    problem: DecodeProblem
    spec: KernelSpec
    config: TileConfig
    device: Device | None
    """None: the CPU path."""
    schedule: str
    """"fixed" or "balanced"."""
    num_splits: int
    """fixed: splits of each sequence. balanced: shares of all the work."""
    launches: tuple[Launch, ...]
    workspace: int
    """Device memory for partial results, bytes."""
    reasons: tuple[str, ...]

    @property
    def backend(self) -> str:
        return "cpu" if self.device is None else "cuda"

    @property
    def constants(self) -> dict[str, int | bool]:
        """The values compiled into the kernel."""
        return self.spec.constants(self.problem, self.config)

    @property
    def items(self) -> int:
        """What is split and merged: (sequence, key/value head, block of query rows)."""
        return items(self.problem, self.config)

    @property
    def row_blocks(self) -> int:
        return row_blocks(self.problem, self.config)

    def __str__(self) -> str:
        where = "CPU (NumPy)" if self.device is None else f"{self.device.name} ({self.device.arch.name})"
        p, keys = self.problem, self.config.block_kv
        cut = (
            f"{self.num_splits} fixed splits a sequence"
            if self.schedule == "fixed"
            else f"{self.num_splits} equal shares of all tiles"
        )
        lines = [
            f"problem    {p}",
            f"kernel     {self.spec.name}: {self.spec.title} on {where}",
            f"tiles      {self.config}: {p.rows} query rows a key/value head, "
            f"{num_tiles(p.capacity, keys):,} tiles of {keys} keys in a full sequence",
            f"schedule   {self.schedule}: {cut}, {self.items:,} items",
        ]
        lines += [
            f"launch     {launch.entry} grid {launch.grid}, {launch.num_threads} threads, "
            f"{launch.shared_memory:,} B shared"
            for launch in self.launches
        ]
        if self.device is not None:
            lines.append(f"workspace  {self.workspace:,} B")
        lines += [f"because    {reason}" for reason in self.reasons]
        return "\n".join(lines)


def make_decode_plan(
    problem: DecodeProblem,
    device: Device | None,
    num_splits: int | None = None,
    schedule: str = "auto",
    config: TileConfig | None = None,
    kernel: str | None = None,
) -> DecodePlan:
    """Choose kernel, tiles, schedule and the number of splits.

    ``num_splits`` asks for that many fixed splits of each sequence (with ``schedule="balanced"``: shares);
    ``config`` overrides the tiles and ``kernel``, a name of the registry, kernel and schedule (benchmarks,
    tests).

    Raises ValueError when no kernel serves the problem, or for an unknown schedule.
    """
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule={schedule!r} is not known; use 'auto', 'fixed' or 'balanced'")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits} is not possible: it must be at least 1")
    serving = _serving(problem, device, kernel)
    reasons = [] if kernel is None else [f"kernel={kernel!r} was asked for"]
    schedule = schedule if kernel is None else serving[0].algorithm
    if config is None:
        config = CPU_CONFIG if device is None else _choose_config(problem, device, serving[0])
    if schedule != "auto":
        reasons += [f"schedule={schedule!r} was asked for"] * (kernel is None)
    elif num_splits is not None:
        schedule = "fixed"
    else:
        schedule, reason = _choose_schedule(problem, device, config)
        reasons.append(reason)
    if num_splits is None:
        num_splits, reason = _choose_splits(problem, device, config, schedule)
        reasons.append(reason)
    else:
        reasons.append(f"num_splits={num_splits} was asked for")
    spec = next(spec for spec in serving if spec.algorithm == schedule)
    if device is None:
        reasons.append("no GPU in this plan: NumPy does the same splits and merges, of larger tiles")
        return DecodePlan(problem, spec, config, None, schedule, num_splits, (), 0, tuple(reasons))
    shared_memory = spec.shared_memory(config, problem.head_dim)
    launches = spec.launches(problem, config, shared_memory, num_splits)
    workspace = spec.workspace(problem, config, num_splits)
    return DecodePlan(
        problem, spec, config, device, schedule, num_splits, launches, workspace, tuple(reasons)
    )


def _serving(problem: DecodeProblem, device: Device | None, kernel: str | None) -> list[KernelSpec]:
    """In the registry's order. NumPy serves everything: there the kernel's name only says which schedule."""
    named = [spec for spec in DECODE_KERNELS.values() if kernel in (None, spec.name)]
    if device is None:
        return [spec for spec in named if not spec.uses_copy_engine]
    serving = [s for s in named if s.takes(problem) and fitting_configs(s, problem.head_dim, device)]
    if not serving:
        served = "; ".join(spec.requirements for spec in named)
        raise ValueError(
            f"no decode kernel runs on {device.arch.name} for q of {problem.dtype} over a cache of "
            f"{problem.cache_dtype}, head_dim {problem.head_dim}; {served}"
        )
    return serving


def _choose_config(problem: DecodeProblem, device: Device, spec: KernelSpec) -> TileConfig:
    fitting = fitting_configs(spec, problem.head_dim, device)
    return spec.choose(problem, fitting, device.num_sms)  # type: ignore[arg-type]


def _choose_schedule(problem: DecodeProblem, device: Device | None, config: TileConfig) -> tuple[str, str]:
    """(schedule, reason)"""
    if problem.ragged and problem.batch > 1:
        return "balanced", "lengths differ from sequence to sequence: equal shares of all tiles"
    if device is None:
        return "fixed", "equal lengths: fixed splits"
    splits, full = _one_wave(problem, device, config)
    blocks = _resident(device, config)
    tiles = num_tiles(problem.capacity, config.block_kv)
    if -(-tiles // splits) <= 2 and full:
        return "fixed", f"a short cache: two tiles a split leave blocks of a wave of {blocks} to spare"
    if full >= FULL_WAVE:
        return "fixed", f"{splits} splits a sequence fill one wave of {blocks} blocks to {full:.0%}"
    return "balanced", (
        f"fixed splits fill no single wave of {blocks} blocks ({full:.0%} at best): equal shares of all tiles"
    )


def _resident(device: Device, config: TileConfig) -> int:
    """Blocks that the GPU runs at once."""
    return device.num_sms * config.blocks_per_sm


def _one_wave(problem: DecodeProblem, device: Device, config: TileConfig) -> tuple[int, float]:
    """Splits of each sequence with which all blocks run at once, and how much of such a wave they fill; 0%
    when there are too many items. Short caches are not split: a split has two tiles, if there are two."""
    tiles, count = num_tiles(problem.capacity, config.block_kv), items(problem, config)
    resident = _resident(device, config)
    splits = max(1, min((tiles + 1) // 2, resident // count))
    longest = -(-tiles // splits)
    return -(-tiles // longest), count * tiles / (resident * longest) if count <= resident else 0.0


def _choose_splits(
    problem: DecodeProblem, device: Device | None, config: TileConfig, schedule: str
) -> tuple[int, str]:
    """(splits or shares, reason)"""
    tiles, count = num_tiles(problem.capacity, config.block_kv), items(problem, config)
    if device is None:
        if schedule == "balanced":
            shares = max(1, min(tiles * count // _CPU_TILES, 16))
            return shares, f"{shares} shares of {_CPU_TILES} tiles or more"
        splits = max(1, min(tiles // _CPU_TILES, 16))
        return splits, f"{splits} splits of {_CPU_TILES} tiles or more"
    if schedule == "fixed":
        splits, _ = _one_wave(problem, device, config)
        return splits, f"{splits} splits a sequence: one wave, and two tiles or more each"
    waves = _RAGGED_WAVES if problem.ragged else 1
    shares = min(waves * _resident(device, config), tiles * count)
    return shares, f"{shares} shares: {waves} for each block that runs at once, and never more than tiles"
