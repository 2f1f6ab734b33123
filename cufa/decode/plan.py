"""From a DecodeProblem to a DecodePlan: pure Python, no GPU. The lengths stand on the device: only the capacity and
whether the batch is ragged are known here."""

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

#: Fixed splits are for batches that they cut into waves as full as this.
FULL_WAVE = 0.97


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
            f"tiles      {self.config}: {p.rows} query rows a key/value head, {num_tiles(p.capacity, keys):,} tiles "
            f"of {keys} keys in a full sequence",
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
) -> DecodePlan:
    """Choose kernel, tiles, schedule and the number of splits.

    ``num_splits`` asks for that many fixed splits of each sequence (with ``schedule="balanced"``: shares);
    ``config`` overrides the tiles (benchmarks, tests).

    Raises ValueError when no kernel serves the problem, or for an unknown schedule.
    """
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule={schedule!r} is not known; use 'auto', 'fixed' or 'balanced'")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits} is not possible: it must be at least 1")
    reasons: list[str] = []
    chosen = config or (CPU_CONFIG if device is None else _choose_config(problem, device))
    if schedule != "auto":
        reasons.append(f"schedule={schedule!r} was asked for")
    elif num_splits is not None:
        schedule = "fixed"
    else:
        schedule, num_splits, reason = _choose_schedule(problem, device, chosen)
        reasons.append(reason)
    if num_splits is not None:
        reasons += [f"num_splits={num_splits} was asked for"] * (not reasons)
    else:
        num_splits, reason = _choose_splits(problem, device, chosen, schedule)
        reasons.append(reason)
    spec = _spec(problem, device, schedule)
    if device is None:
        reasons.append(
            "no GPU in this plan: NumPy executes the same splits and the same merge on larger tiles"
        )
        return DecodePlan(problem, spec, chosen, None, schedule, num_splits, (), 0, tuple(reasons))
    shared_memory = spec.shared_memory(chosen, problem.head_dim)
    launches = spec.launches(problem, chosen, shared_memory, num_splits)
    workspace = spec.workspace(problem, chosen, num_splits)
    return DecodePlan(
        problem, spec, chosen, device, schedule, num_splits, launches, workspace, tuple(reasons)
    )


def _serving(problem: DecodeProblem, device: Device) -> list[KernelSpec]:
    return [
        spec
        for spec in DECODE_KERNELS.values()
        if spec.takes(problem) and fitting_configs(spec, problem.head_dim, device)
    ]


def _spec(problem: DecodeProblem, device: Device | None, schedule: str) -> KernelSpec:
    named = [spec for spec in DECODE_KERNELS.values() if spec.algorithm == schedule]
    if device is None:  # NumPy runs every dtype: the kernel's name only says which schedule
        return next((spec for spec in named if spec.takes(problem)), named[0])
    return next(spec for spec in _serving(problem, device) if spec in named)


def _choose_config(problem: DecodeProblem, device: Device) -> TileConfig:
    serving = _serving(problem, device)
    if not serving:
        served = "; ".join(spec.requirements for spec in DECODE_KERNELS.values())
        raise ValueError(
            f"no decode kernel runs on {device.arch.name} for q of {problem.dtype} over a cache of "
            f"{problem.cache_dtype}, head_dim {problem.head_dim}; {served}"
        )
    spec = serving[0]
    return spec.choose(problem, fitting_configs(spec, problem.head_dim, device), device.num_sms)  # type: ignore[arg-type]


def _choose_schedule(
    problem: DecodeProblem, device: Device | None, config: TileConfig
) -> tuple[str, int | None, str]:
    if problem.ragged and problem.batch > 1:
        return "balanced", None, "lengths differ from sequence to sequence: equal shares of all tiles"
    if device is None:
        return "fixed", None, "equal lengths: fixed splits"
    splits, full = _fullest_waves(problem, device, config)
    if full >= FULL_WAVE:
        return (
            "fixed",
            splits,
            (f"{splits} splits a sequence fill waves of {_resident(device, config)} blocks to {full:.0%}"),
        )
    return (
        "balanced",
        None,
        (
            f"no number of splits fills waves of {_resident(device, config)} blocks ({splits} come to {full:.0%}): "
            "equal shares of all tiles"
        ),
    )


def _resident(device: Device, config: TileConfig) -> int:
    """Blocks that the GPU runs at once."""
    return device.num_sms * config.blocks_per_sm


def _fullest_waves(problem: DecodeProblem, device: Device, config: TileConfig) -> tuple[int, float]:
    """Splits with the fullest waves, the fewest within a hundredth of the best, and how full: the share of the time
    in which blocks work when all are resident at once. Short caches are not split: a split has a tile at least."""
    tiles, count, resident = (
        num_tiles(problem.capacity, config.block_kv),
        items(problem, config),
        _resident(device, config),
    )
    best: list[tuple[int, float]] = []
    for splits in range(1, min(tiles, max(1, 4 * resident // count)) + 1):
        each = -(-tiles // splits)
        waves = -(-count * -(-tiles // each) // resident)
        best.append((splits, count * tiles / (waves * resident * each)))
    most = max(full for _, full in best)
    return next((splits, full) for splits, full in best if full >= most - 0.01)


def _choose_splits(
    problem: DecodeProblem, device: Device | None, config: TileConfig, schedule: str
) -> tuple[int, str]:
    tiles, count = num_tiles(problem.capacity, config.block_kv), items(problem, config)
    if device is None:
        if schedule == "balanced":
            shares = max(1, min(tiles * count // _CPU_TILES, 16))
            return shares, f"{shares} shares of {_CPU_TILES} tiles or more"
        splits = max(1, min(tiles // _CPU_TILES, 16))
        return splits, f"{splits} splits of {_CPU_TILES} tiles or more"
    if schedule == "fixed":
        splits, full = _fullest_waves(problem, device, config)
        return (
            splits,
            f"{splits} splits a sequence fill waves of {_resident(device, config)} blocks to {full:.0%}",
        )
    shares = min(_resident(device, config), tiles * count)
    return shares, f"{shares} shares: a block each, all at once, and never more than tiles"
