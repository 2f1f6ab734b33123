"""From a Problem to a Plan: pure Python, no GPU, no CuPy, so that planning is tested everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .core import order as item_order
from .core.architectures import Device
from .core.problem import Problem
from .core.schedule import Schedule
from .kernels import KERNELS, KernelSpec, Launch, TileConfig
from .kernels.spec import launch_lines

#: The CPU path works on larger tiles: they amortise NumPy's call overhead, and 512 KiB of float32 scores
#: still fit a core's L2 cache. Of eight tilings from 128×512 to 512×1024 (seq 4096, head_dim 64, two cores)
#: none was more than 3% faster, full or causal; 256×256 was 15% slower.
CPU_CONFIG = TileConfig(block_q=256, block_kv=512, num_warps=0)

ALGORITHMS = ("auto", *dict.fromkeys(spec.algorithm for spec in KERNELS.values()))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one problem is run. Printable; made without touching a device."""

    problem: Problem
    spec: KernelSpec
    config: TileConfig
    device: Device | None
    """None: the CPU path."""
    launches: tuple[Launch, ...]
    workspace: int
    """Device memory beyond inputs and outputs, bytes."""
    reasons: tuple[str, ...]

    @property
    def backend(self) -> str:
        return "cpu" if self.device is None else "cuda"

    @property
    def schedule(self) -> Schedule:
        return Schedule.of(
            self.problem, self.config.block_q, self.config.block_kv, self.spec.skip_masked_tiles
        )

    @property
    def heads_per_group(self) -> int:
        """Heads that persistent blocks work on side by side under the causal mask (1: does not matter)."""
        if not (self.problem.causal and self.launches and self.launches[0].persistent):
            return 1
        heads, num_blocks = self.problem.batch * self.problem.heads, self.launches[0].grid[0]
        head_bytes = 2 * self.problem.seqlen_k * self.problem.head_dim * self.problem.itemsize
        return item_order.heads_per_group(self.schedule, heads, num_blocks, head_bytes)

    @property
    def constants(self) -> dict[str, int | bool]:
        """The values compiled into the kernel."""
        return self.spec.constants(self.problem, self.config)

    def __str__(self) -> str:
        schedule = self.schedule
        heads = self.problem.batch * self.problem.heads
        where = "CPU (NumPy)" if self.device is None else f"{self.device.name} ({self.device.arch.name})"
        lines = [
            f"problem    {self.problem}",
            f"kernel     {self.spec.name}: {self.spec.title} on {where}",
            f"tiles      {self.config}; {schedule.visited * heads:,} of {schedule.total * heads:,} visited, "
            f"{schedule.skipped * heads:,} skipped",
        ]
        lines += launch_lines(self.launches, None if self.device is None else self.workspace, self.reasons)
        return "\n".join(lines)


def make_plan(
    problem: Problem,
    device: Device | None,
    algorithm: str = "auto",
    config: TileConfig | None = None,
    tuned: Mapping[str, TileConfig] | None = None,
) -> Plan:
    """Choose kernel, tiles and launches.

    ``config`` overrides the tiles (benchmarks, tuning); ``tuned`` maps :func:`tuning_key` to the config
    that ``cufa tune`` measured fastest on this device.

    Raises ValueError when no kernel serves the problem, naming what would, or when ``config`` does not fit.
    """
    spec, reasons = _choose_spec(problem, device, algorithm)
    if problem.empty:
        reasons.append("no query that sees a key: zeros are written without a launch")
        config = config or (CPU_CONFIG if device is None else spec.configs[0])
        return Plan(problem, spec, config, device, (), 0, tuple(reasons))
    if device is None:
        reasons.append("no GPU in this plan: NumPy executes the same schedule on larger tiles")
        return Plan(problem, spec, config or CPU_CONFIG, None, (), 0, tuple(reasons))
    if config is None:
        config, reason = _choose_config(problem, device, spec, tuned or {})
        reasons.append(reason)
    shared_memory = spec.shared_memory(config, problem.head_dim)
    if shared_memory > device.arch.shared_memory_per_block:
        raise ValueError(
            f"config={config} takes {shared_memory:,} B of shared memory at head_dim {problem.head_dim}; a "
            f"block on {device.arch.name} has {device.arch.shared_memory_per_block:,} B: use smaller tiles"
        )
    launches = tuple(_fill(x, device) for x in spec.launches(problem, config, shared_memory))
    return Plan(problem, spec, config, device, launches, spec.workspace(problem, config), tuple(reasons))


def _fill(launch: Launch, device: Device) -> Launch:
    if not launch.persistent:
        return launch
    return dataclasses.replace(launch, grid=(min(launch.grid[0], device.num_sms), 1, 1))


def fitting_configs(spec: KernelSpec, head_dim: int, device: Device) -> tuple[TileConfig, ...]:
    """Configs that can run: architecture and head dim in range, shared memory within the block limit."""
    if not spec.runs_on(device.arch.capability):
        return ()
    limit = device.arch.shared_memory_per_block
    return tuple(c for c in spec.configs if c.fits(head_dim) and spec.shared_memory(c, head_dim) <= limit)


def tuning_key(spec: KernelSpec, problem: Problem) -> str:
    """Shapes that share a tuned config: same kernel, dtype, precision, head dim, mask and length class.

    The length class is the power of two nearest below seqlen_k: tile choice does not depend on more.
    """
    length = 1 << max(problem.seqlen_k.bit_length() - 1, 0)
    mask = "causal" if problem.causal else "full"
    return f"{spec.name}/{problem.dtype}/{problem.precision}/d{problem.head_dim}/{mask}/{length}"


def _choose_spec(problem: Problem, device: Device | None, algorithm: str) -> tuple[KernelSpec, list[str]]:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not known; use one of {', '.join(ALGORITHMS)}")
    named = [s for s in KERNELS.values() if algorithm in ("auto", s.algorithm)]
    if device is None:
        # NumPy runs every algorithm in every dtype; the kernel's name only says which schedule.
        spec = next(s for s in named if algorithm != "auto" or s.algorithm == "fa2")
        return spec, [_why(algorithm, spec)]
    serving = [s for s in named if s.takes(problem) and fitting_configs(s, problem.head_dim, device)]
    if not serving:
        if algorithm == "auto":
            served = "kernels serve " + ", ".join(sorted({d for s in named for d in s.dtypes}))
        else:
            served = "; ".join(s.requirements for s in named)
        cure = "convert with .astype" + (", or use algorithm='auto'" if algorithm != "auto" else "")
        raise ValueError(
            f"no kernel runs algorithm={algorithm!r} on {device.arch.name} for {problem.dtype}, "
            f"head_dim {problem.head_dim}, {problem.alignment}-byte aligned strides; "
            f"{served}: {cure}"
        )
    # Registry order is order of preference.
    return serving[0], [_why(algorithm, serving[0])]


def _why(algorithm: str, spec: KernelSpec) -> str:
    if algorithm == "auto":
        return f"auto: {spec.name} is the fastest registered kernel that serves this problem"
    return f"algorithm={algorithm!r} was asked for"


def _choose_config(
    problem: Problem, device: Device, spec: KernelSpec, tuned: Mapping[str, TileConfig]
) -> tuple[TileConfig, str]:
    fitting = fitting_configs(spec, problem.head_dim, device)
    winner = tuned.get(tuning_key(spec, problem))
    if winner in fitting:
        return winner, f"tiles {winner}: measured fastest on this device by `cufa tune`"
    chosen = spec.choose(problem, fitting, device.num_sms)
    return chosen, f"tiles {chosen}: the registry's choice for head_dim {problem.head_dim} (not tuned here)"
