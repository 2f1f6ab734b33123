"""The launch of a kernel: its order from :mod:`cufa.schedule.order`, and the simulated time of each thread block.

The simulation is simple: each SM holds ``blocks_per_sm`` blocks, the next block takes the first free place, and the
time of a block is its number of tiles. Clocks, memory and work outside the loop are ignored. The simulation shows the
shape of a launch: waves, and idle SMs at the end.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig, kernels_of
from cufa.problem.problem import Problem, default_scale
from cufa.problem.work import WORK
from cufa.schedule.order import WHOLE_HEAD, Order, simulate
from cufa.schedule.schedule import Schedule

__all__ = ["KEYS", "WHOLE_HEAD", "Blocks", "Timeline", "algorithms", "predict", "thread_blocks"]

Ints = npt.NDArray[np.int64]

KEYS = -2
"""A value of ``q_block``: the thread block computes part of the keys of a sequence, for all its queries."""

_DTYPE = "bfloat16"
"""Default element type."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Work items in launch order; arrays have one entry per item."""

    q_block: Ints
    """:data:`WHOLE_HEAD` where an item is a whole head, :data:`KEYS` where it is part of the keys."""
    head: Ints
    batch: Ints
    tiles: Ints
    """Key/value tiles visited."""
    thread_block: Ints | None = None
    """Persistent thread block of each item; None: each item is one thread block."""

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def order(self) -> Order:
        return Order(self.q_block, self.head, self.thread_block)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Time and SM of each thread block. Times count from the first start."""

    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    sm: Ints
    slot: Ints
    """Place on the SM; concurrent blocks have different places."""
    blocks: Blocks
    num_sms: int
    slots_per_sm: int
    unit: str
    """"tiles" when predicted, "µs" when measured."""

    @property
    def span(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def sm_end(self) -> npt.NDArray[np.float64]:
        """End of the last block of each SM, (num_sms,); 0 for an SM without blocks."""
        last = np.zeros(self.num_sms)
        np.maximum.at(last, self.sm, self.end)
        return last

    @property
    def tail(self) -> float:
        """Share of SM time idle at the end: after an SM's last block, before the kernel's end. 0 to 1."""
        return 1 - float(self.sm_end.sum()) / (self.num_sms * self.span) if self.span else 0.0

    @property
    def idle_places(self) -> float:
        """Share of the places' time without a block, including gaps and the last wave. 0 to 1."""
        if self.blocks.thread_block is not None:  # a persistent block keeps its place to the end
            return self.tail
        return 1 - self.mean_blocks / self.slots_per_sm if self.span else 0.0

    @property
    def busy_sms(self) -> int:
        """SMs with at least one block."""
        return len(np.unique(self.sm))

    @property
    def mean_blocks(self) -> float:
        """Resident thread blocks per SM, averaged over all SMs and the run. A persistent block lasts from the start of
        its first item to the end of its last item; its items may overlap."""
        if not self.span:
            return 0.0
        start, end, block = self.start, self.end, self.blocks.thread_block
        if block is not None:
            count = int(block.max(initial=0)) + 1
            start, end = np.full(count, np.inf), np.zeros(count)
            np.minimum.at(start, block, self.start)
            np.maximum.at(end, block, self.end)
            start = np.minimum(start, end)  # a number without a block: start is infinite
        return float((end - start).sum()) / (self.num_sms * self.span)


def algorithms(operation: str = "forward", dtype: str = _DTYPE, head_dim: int = 64) -> dict[str, Kernel]:
    """Kernels with a known launch order by algorithm, the simplest first. If an algorithm has several kernels: the
    kernel with tiles for the head dim."""
    problem = Problem(1, 1, 1, 64, 64, 64, dtype, scale=default_scale(64), operation=operation)
    schedule = Schedule.of(problem, 64, 64, skip_masked_tiles=True)
    kernels: dict[str, Kernel] = {}
    for spec in reversed(kernels_of(operation).values()):
        if dtype not in spec.dtypes:
            continue
        if spec.order(problem, schedule, Device.typical(90), spec.configs[0]) is None:
            continue
        if spec.algorithm not in kernels or any(config.fits(head_dim) for config in spec.configs):
            kernels[spec.algorithm] = spec
    return kernels


def thread_blocks(
    problem: Problem, schedule: Schedule, spec: Kernel, device: Device, config: TileConfig | None = None
) -> Blocks:
    """The launch of a kernel in its own order. ``config`` None: the first config, whose tiles may differ from the
    schedule."""
    order = spec.order(problem, schedule, device, config or spec.configs[0])
    assert order is not None, f"{spec.name} has no known launch order: see algorithms()"
    by_keys = WORK[problem.operation].by_keys
    batch, head = np.divmod(order.head, problem.kv_heads if by_keys else problem.heads)
    together = (config or spec.configs[0]).blocks_of_item
    items = (order.q_block, head, batch, order.tiles(schedule))
    q_block, head, batch, tiles = (np.repeat(x, together) for x in items)
    return Blocks(q_block, head, batch, tiles, order.thread_block)


def predict(blocks: Blocks, num_sms: int, blocks_per_sm: int, overhead: int = 0) -> Timeline:
    """The simulated launch. The unit of time is a tile; each item takes ``overhead`` more."""
    start, end, where = simulate(blocks.order, blocks.tiles + overhead, num_sms * blocks_per_sm)
    slot, sm = np.divmod(where, num_sms)
    slots = blocks_per_sm if blocks.thread_block is None else int(slot.max(initial=0)) + 1
    return Timeline(start, end, sm, slot, blocks, num_sms, slots, "tiles")
