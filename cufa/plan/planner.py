"""From a Problem to a Plan: pure Python without a GPU or CuPy, so that every machine can test planning."""

from __future__ import annotations

import dataclasses
import html as markup
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..gpu.architectures import Device
from ..kernels import Kernel, Launch, Split, TileConfig
from ..kernels.params import Params
from ..kernels.support import refusal
from ..problem.integers import Integers
from ..problem.problem import Problem
from ..schedule import order
from ..schedule.schedule import Schedule
from .candidates import serving_kernels
from .operation import OPERATIONS, Operation, Request, Tuned

if TYPE_CHECKING:
    from ..schedule.order import Order

MAX_GRID_YZ = 65535


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """How one problem is run. Printable; made without access to a device."""

    problem: Problem
    spec: Kernel
    config: TileConfig
    device: Device | None
    """None: the CPU path."""
    launches: tuple[Launch, ...]
    workspace: int
    """Bytes of device memory in addition to inputs and outputs."""
    reasons: tuple[str, ...]
    split: Split | None = None
    """How keys are split over thread blocks; None: keys are not split."""

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.problem.operation]

    @property
    def params(self) -> Params:
        return self.operation.params_of(self.problem)

    @property
    def backend(self) -> str:
        return "cpu" if self.device is None else "cuda"

    @property
    def schedule(self) -> Schedule:
        """Tiles of one head's score matrix. Padded or packed sequences: tiles of the first sub-problem
        (:attr:`~cufa.problem.problem.Problem.parts`)."""
        return self.schedule_of(self.problem)

    def schedule_of(self, problem: Problem) -> Schedule:
        """Tiles of the score matrix of ``problem``, a sub-problem of this plan's problem, with this plan's config."""
        return Schedule.of(problem, self.config.head_rows, self.config.block_kv, self.spec.skip_masked_tiles)

    @property
    def num_splits(self) -> int:
        return self.split.count if self.split else 1

    @property
    def counters(self) -> int:
        """Count of 32-bit words that are zero between launches. Kernels count partial results and work items in
        them."""
        return self.spec.counters(self.problem, self.config, self.workspace) if self.launches else 0

    @property
    def order(self) -> Order | None:
        """The order in which thread blocks take work items on the plan's GPU. None: the kernel's order is not known,
        sequences are padded or packed, a forward splits keys, or nothing is launched."""
        ragged = self.problem.lengths.kind != "dense"
        if (
            self.device is None
            or not self.launches
            or ragged
            or (self.split and not self.operation.split_selects_kernel)
        ):
            return None
        return self.spec.order(self.problem, self.schedule, self.device, self.config)

    @property
    def heads_per_head_batch(self) -> int:
        """Heads of a head batch, if blocks are persistent and later rows see more keys; else 1."""
        problem = self.problem
        persistent = [launch for launch in self.launches if launch.persistent]
        if not (problem.later_rows_see_more and persistent) or self.device is None:
            return 1
        return order.head_batch_size(problem, self.schedule, persistent[0].grid[0], self.device.slow_memory)

    @property
    def block_order(self) -> Integers | None:
        """Query blocks from the longest to the shortest, for kernels that read this order. None: the kernel goes from
        the last query block to the first. The mask owns the array."""
        listed = self.problem.tiles_are_listed and not self.problem.lengths.ragged
        if not (self.spec.reads_block_order and self.launches and listed):
            return None
        orders = self.problem.mask.block_orders
        key = self.config.block_q, self.config.block_kv, self.problem.seqlen_q, self.problem.seqlen_k
        if key not in orders:
            found = order.longest_first(self.problem, self.schedule)
            orders.setdefault(key, None if found is None else Integers(found))
        return orders[key]

    @property
    def constants(self) -> dict[str, int | bool]:
        """The values compiled into the kernel."""
        return self.spec.constants(self.problem, self.config)

    @property
    def _workspace_text(self) -> str:
        problem, config = self.problem, self.config
        mask_bytes = problem.mask_bytes(config.block_q, config.block_kv) if self.workspace else 0
        holds = [self.spec.workspace_holds] * (self.workspace > mask_bytes)
        holds += [problem.kernel_mask.workspace_holds] * (mask_bytes > 0)
        return f"{self.workspace:,} B" + (f": {'; '.join(holds)}" if any(holds) else "")

    @property
    def _where(self) -> str:
        return "CPU (NumPy)" if self.device is None else f"{self.device.name} ({self.device.arch.name})"

    def __repr__(self) -> str:
        """At most five lines; ``print(plan)`` has the rest."""
        launches = ", ".join(f"{x.entry} {x.grid}" for x in self.launches)
        lines = [
            f"<Plan: {self.spec.name} on {self._where}",
            f" {self.problem}",
            f" {self.operation.plan_lines(self)[0].replace('      ', ' ', 1)}",
            *([f" launches {launches}; workspace {self.workspace:,} B"] if launches else []),
            " print(plan) says why>",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: the lines of ``print(plan)`` as a table."""
        rows = ((line[:11].strip(), markup.escape(line[11:])) for line in str(self).splitlines())
        cells = "".join(
            f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{text}</td></tr>'
            for name, text in rows
        )
        return f"<table>{cells}</table>"

    def __str__(self) -> str:
        lines = [
            f"problem    {self.problem}",
            f"kernel     {self.spec.name}: {self.spec.title} on {self._where}",
            *self.operation.plan_lines(self),
            *(f"launch     {launch}" for launch in self.launches),
            *([] if self.device is None else [f"workspace  {self._workspace_text}"]),
            *(f"because    {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def make_plan(
    problem: Problem, device: Device | None, algorithm: str = "auto", config: TileConfig | None = None,
    tuned: Mapping[str, Tuned] | None = None, *, num_splits: int | None = None, kernel: str | None = None,
    fastest: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """Choose kernel, tiles, splits and launches.

    ``algorithm``: "auto" or an algorithm of the operation (decode: the schedule). ``num_splits``: number of splits or
    shares. ``config`` overrides the tiles. ``kernel``, a name in the registry, overrides kernel and algorithm
    (benchmarks, tuning, tests). ``tuned`` maps :func:`~cufa.plan.candidates.tuning_key` to the tiles that ``cufa tune``
    measured fastest on this device. ``fastest`` maps :func:`~cufa.plan.candidates.problem_class` to the kernel that
    recorded benchmarks found fastest on this device. Without an entry, the registry's order decides.

    Raises TypeError if ``config`` has the config class of another kernel. Raises ValueError if ``config`` does not fit,
    or if no kernel serves the problem; the message then says why each kernel refuses.
    """
    operation = OPERATIONS[problem.operation]
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits} is not possible: pass at least 1, or None")
    serving, reasons = serving_kernels(operation, problem, device, algorithm, kernel, fastest or {})
    if kernel is not None:
        algorithm = serving[0].algorithm
    if problem.empty:
        reasons.append("no query sees a key: results are filled without a launch")
        spec = serving[0] if device else operation.cpu_kernel(serving)
        config = config or (operation.cpu_config if device is None else spec.configs[0])
        split = Split(spec.algorithm, 1) if operation.split_selects_kernel else None
        return Plan(problem, spec, config, device, (), 0, tuple(reasons), split)
    if config is not None and device is not None:
        _check_class(serving[0], config)
    request = Request(algorithm, config, num_splits, tuned or {})
    choice = operation.choose(problem, device, serving, request)
    spec, config, split = choice.spec, choice.config, choice.split
    reasons += choice.reasons
    if device is None:
        return Plan(problem, spec, config, None, (), 0, tuple(reasons), split)
    if reason := refusal(spec, problem, config=config):
        raise ValueError(
            f"config={config} {reason}: pass another config of {spec.name}, or leave config at None"
        )
    shared_memory = _check_shared_memory(problem, spec, config, device)
    launches = tuple(_fill(x, device) for x in spec.launches(problem, config, shared_memory, split))
    _check_grids(problem, launches)
    workspace = spec.workspace(problem, config, split)
    if mask_bytes := problem.mask_bytes(config.block_q, config.block_kv):  # at the end of the workspace
        workspace = -(-workspace // 16) * 16 + mask_bytes
    return Plan(problem, spec, config, device, launches, workspace, tuple(reasons), split)


def _check_class(spec: Kernel, config: TileConfig) -> None:
    if not isinstance(config, spec.config_class):
        raise TypeError(
            f"config={config} is a {type(config).__name__}; {spec.name} takes a {spec.config_class.__name__}: "
            f"change the fields of one of KERNELS[{spec.name!r}].configs with dataclasses.replace"
        )


def _check_shared_memory(problem: Problem, spec: Kernel, config: TileConfig, device: Device) -> int:
    shared_memory = spec.shared_bytes(config, problem.head_dim, problem.v_dim)
    if shared_memory > device.arch.shared_memory_per_block:
        raise ValueError(
            f"config={config} needs {shared_memory:,} B of shared memory at head_dim {problem.dims_text}; a "
            f"block on {device.arch.name} has {device.arch.shared_memory_per_block:,} B: use smaller tiles"
        )
    return shared_memory


def _fill(launch: Launch, device: Device) -> Launch:
    if not launch.persistent:
        return launch
    return dataclasses.replace(launch, grid=(min(launch.grid[0], device.num_sms), 1, 1))


def _check_grids(problem: Problem, launches: tuple[Launch, ...]) -> None:
    for launch in launches:
        if max(launch.grid[1:]) > MAX_GRID_YZ:
            raise ValueError(
                f"{launch.entry} needs a grid of {launch.grid} for batch {problem.batch:,} and "
                f"{problem.kv_heads:,} key/value heads; CUDA limits the last two axes to {MAX_GRID_YZ:,}: "
                "pass fewer sequences or heads in one call"
            )


def fitting_configs(spec: Kernel, head_dim: int, device: Device) -> tuple[TileConfig, ...]:
    """The kernel's configs that fit: architecture and head dim in range, shared memory within the block limit."""
    return spec.fitting(spec.configs, head_dim, device)
