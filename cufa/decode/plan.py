"""From a DecodeProblem to a DecodePlan: pure Python, no GPU. The lengths stand on the device: only the
capacity and whether the batch is ragged are known here."""

from __future__ import annotations

import dataclasses

from ..core.architectures import Device
from ..kernels import DECODE_KERNELS, KernelSpec, Launch, TileConfig
from ..kernels.decode import MAX_CLUSTER, items, merged_in_cluster, merges_in_cluster, row_blocks
from ..kernels.spec import launch_lines
from ..planner import fitting_configs
from .problem import DecodeProblem
from .schedule import WAVES, num_tiles
from .splits import Cut, choose_cut

SCHEDULES = ("fixed", "balanced")

#: A tile in NumPy: keys enough to amortise calls, and query rows enough that a tile of keys is read once (a
#: second block of rows would convert it again).
CPU_CONFIG = TileConfig(block_q=256, block_kv=256, num_warps=0)

#: Tiles of a split that are worth a merge on the CPU.
_CPU_TILES = 8

_MAX_GRID_YZ = 65535
_MAX_TILES = 2**31 - 1


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
    def counters(self) -> int:
        """32-bit words that are zero between launches: which part of an item is the last."""
        return self.items * self.config.num_warps if self.workspace else 0

    @property
    def ragged_shares(self) -> bool:
        """Balanced shares of two sizes, more than run at once (:class:`~cufa.decode.schedule.Shares`): SMs do
        not read at one speed. Threads of a CPU do."""
        return self.problem.ragged and self.device is not None

    @property
    def row_blocks(self) -> int:
        return row_blocks(self.problem, self.config)

    def __str__(self) -> str:
        where = "CPU (NumPy)" if self.device is None else f"{self.device.name} ({self.device.arch.name})"
        p, keys = self.problem, self.config.block_kv
        cut = (
            f"{self.num_splits} fixed splits a sequence"
            if self.schedule == "fixed"
            else f"{self.num_splits} shares of all tiles"
        )
        lines = [
            f"problem    {p}",
            f"kernel     {self.spec.name}: {self.spec.title} on {where}",
            f"tiles      {self.config}: {p.rows} query rows a key/value head, "
            f"{num_tiles(p.capacity, keys):,} tiles of {keys} keys in a full sequence",
            f"schedule   {self.schedule}: {cut}, {self.items:,} items",
        ]
        lines += launch_lines(self.launches, None if self.device is None else self.workspace, self.reasons)
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

    ``num_splits`` asks for that many fixed splits of each sequence (with ``schedule="balanced"``: for at
    most so many shares, see :class:`~cufa.decode.schedule.Shares`);
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
    if problem.empty:
        spec = next(spec for spec in serving if schedule in ("auto", spec.algorithm))
        reasons.append("no query, or no room for a key: zeros are written without a launch")
        config = config or (CPU_CONFIG if device is None else spec.configs[0])
        return DecodePlan(problem, spec, config, device, spec.algorithm, 1, (), 0, tuple(reasons))
    if schedule != "auto" and kernel is None:
        reasons.append(f"schedule={schedule!r} was asked for")
    if num_splits is not None:
        reasons.append(f"num_splits={num_splits} was asked for")
    if device is None:
        config, cut = config or CPU_CONFIG, _cut_for_cpu(problem, schedule, num_splits)
    else:
        config, cut = _cut_for_gpu(problem, device, serving, config, schedule, num_splits)
    reasons += cut.reasons
    schedule, num_splits = cut.schedule, cut.num_splits
    most = num_tiles(problem.capacity, config.block_kv)
    if schedule == "balanced":
        most *= items(problem, config) * (WAVES if problem.ragged and device is not None else 1)
    if num_splits > most:
        num_splits = most
        reasons.append(f"{most} are as many as there are tiles: no more would have work")
    spec = next(spec for spec in serving if spec.algorithm == schedule)
    if device is None:
        reasons.append("no GPU in this plan: NumPy does the same splits and merges, of larger tiles")
        return DecodePlan(problem, spec, config, None, schedule, num_splits, (), 0, tuple(reasons))
    shared_memory = spec.shared_memory(config, problem.head_dim)
    launches = spec.launches(problem, config, shared_memory, num_splits)
    _check_launches(problem, config, launches)
    workspace = spec.workspace(problem, config, num_splits)
    return DecodePlan(
        problem, spec, config, device, schedule, num_splits, launches, workspace, tuple(reasons)
    )


def _check_launches(problem: DecodeProblem, config: TileConfig, launches: tuple[Launch, ...]) -> None:
    """Limits of CUDA and of the kernels' 32-bit counters."""
    for launch in launches:
        if max(launch.grid[1:]) > _MAX_GRID_YZ:
            raise ValueError(
                f"{launch.entry} would take a grid of {launch.grid} for batch {problem.batch:,} and "
                f"{problem.kv_heads:,} key/value heads; along its last two axes CUDA takes {_MAX_GRID_YZ:,}: "
                "decode fewer sequences, or heads, in one call"
            )
    tiles = num_tiles(problem.capacity, config.block_kv) * items(problem, config)
    if tiles > _MAX_TILES:
        raise ValueError(
            f"batch {problem.batch:,} with room for {problem.capacity:,} tokens each makes {tiles:,} tiles "
            f"of keys; kernels count up to {_MAX_TILES:,}: pass fewer columns of block_table, or fewer "
            "sequences"
        )


def _serving(problem: DecodeProblem, device: Device | None, kernel: str | None) -> list[KernelSpec]:
    """In the registry's order. NumPy serves everything: there the kernel's name only says which schedule."""
    if kernel is not None and kernel not in DECODE_KERNELS:
        raise ValueError(f"kernel={kernel!r} is not known; use one of {', '.join(DECODE_KERNELS)}")
    named = [spec for spec in DECODE_KERNELS.values() if kernel in (None, spec.name)]
    if device is None:
        plain = [spec for spec in DECODE_KERNELS.values() if not spec.uses_copy_engine]
        in_numpy = [spec for spec in plain if spec in named]
        return in_numpy or [spec for spec in plain if spec.algorithm == named[0].algorithm]
    serving = [s for s in named if s.takes(problem) and fitting_configs(s, problem.head_dim, device)]
    if not serving:
        named = [s for s in named if s.reads_cache(problem)] or named
        if not any(s.runs_on(device.arch.capability) for s in named):
            least = min(s.min_capability for s in named)
            raise ValueError(
                f"a cache of {problem.cache_dtype} needs sm_{least} or later, and this is {device.arch.name}:"
                f" convert the cache to {problem.dtype}, or compute on the CPU"
            )
        served = "; ".join(spec.requirements for spec in named)
        raise ValueError(
            f"no decode kernel runs on {device.arch.name} for q of {problem.dtype} over a cache of "
            f"{problem.cache_dtype}, head_dim {problem.head_dim}; {served}"
        )
    return serving


def _cut_for_gpu(
    problem: DecodeProblem,
    device: Device,
    serving: list[KernelSpec],
    config: TileConfig | None,
    schedule: str,
    num_splits: int | None,
) -> tuple[TileConfig, Cut]:
    """The tiles, which say where parts are merged, and the cut. Tiles that were asked for stay."""
    if config is not None:
        cut = choose_cut(problem, device, config, schedule, num_splits)
        if merges_in_cluster(config) and cut.num_splits > MAX_CLUSTER:
            reason = f"{MAX_CLUSTER} splits: these tiles merge in clusters, which have no more blocks"
            cut = Cut(cut.schedule, MAX_CLUSTER, (reason,))
        return config, cut
    fitting = fitting_configs(serving[0], problem.head_dim, device)
    config = serving[0].choose(problem, fitting, device.num_sms)  # type: ignore[arg-type]
    in_cluster = merged_in_cluster(config)
    cut = choose_cut(problem, device, config, schedule, num_splits, clusters=in_cluster in fitting)
    return in_cluster if cut.in_cluster else config, cut


def _cut_for_cpu(problem: DecodeProblem, schedule: str, num_splits: int | None) -> Cut:
    """Pieces that are worth a merge in NumPy."""
    tiles, count = num_tiles(problem.capacity, CPU_CONFIG.block_kv), items(problem, CPU_CONFIG)
    if num_splits is not None:
        return Cut("fixed" if schedule == "auto" else schedule, num_splits, ())
    ragged = problem.ragged and problem.batch > 1
    if schedule == "balanced" or (schedule == "auto" and ragged):
        shares = max(1, min(tiles * count // _CPU_TILES, 16))
        return Cut("balanced", shares, (f"{shares} shares of {_CPU_TILES} tiles or more",))
    splits = max(1, min(tiles // _CPU_TILES, 16))
    return Cut("fixed", splits, (f"{splits} splits of {_CPU_TILES} tiles or more",))
