"""The view that the controls of Masked work describe, and its derived values."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard.model import launch, work
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.views.shape_controls import card_key
from cufa.gpu.architectures import Device
from cufa.gpu.occupancy import occupancy
from cufa.kernels import Kernel, TileConfig
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule, Tile

MOST_BLOCKS_A_SIDE = 4096
"""The most tiles per side."""
MOST_THREAD_BLOCKS = 400_000
"""The largest launch that is simulated."""
_ANY_REGISTERS = 32  # few enough not to limit


@dataclasses.dataclass(frozen=True)
class View:
    """One problem under one tiling on one card."""

    problem: Problem
    schedule: Schedule
    algorithm: str
    spec: Kernel
    config: TileConfig
    device: Device

    @functools.cached_property
    def blocks_per_sm(self) -> int:
        """The kernel's ``__launch_bounds__``, or fewer if shared memory limits them."""
        config = self.config
        shared = self.spec.shared_bytes(config, self.problem.head_dim)
        fitting = occupancy(
            self.device.arch,
            registers=_ANY_REGISTERS,
            threads=max(1, config.num_warps) * 32,
            shared_memory=shared,
        )
        return max(1, min(config.blocks_per_sm, fitting.blocks))

    @functools.cached_property
    def counts(self) -> dict[Tile, int]:
        """Tiles of one head by class."""
        return work.class_counts(self.schedule)

    @functools.cached_property
    def blocks(self) -> launch.Blocks:
        return launch.thread_blocks(self.problem, self.schedule, self.spec, self.device, self.config)

    @functools.cached_property
    def predicted(self) -> launch.Timeline:
        return launch.predict(self.blocks, self.device.num_sms, self.blocks_per_sm)

    @property
    def whole_heads(self) -> bool:
        """Whether a thread block computes all query blocks of a head."""
        return bool(len(self.blocks)) and int(self.blocks.q_block[0]) == launch.WHOLE_HEAD

    @property
    def item_noun(self) -> str:
        """Work item of a persistent thread block."""
        if self.whole_heads:
            return "head"
        return "key block" if self.schedule.by_keys else "query block"

    @property
    def subject(self) -> Subject:
        return Subject(self.problem, self.spec.name, self.config, card_key(self.device))

    @property
    def is_registered(self) -> bool:
        """Whether a kernel with these tiles serves the mask, so that it can run."""
        return self.config in self.spec.configs and self.refusal is None

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why the kernel does not serve the problem; the page draws the schedule in any case."""
        return self.spec.refuses(self.problem, self.device.arch.capability)
