"""How far FA3 can go on one shape, derived from its tiles and from measured ceilings, resource by resource;
and what its techniques are predicted to bring. Pure: no GPU.

Every consumer warpgroup multiplies 64 query rows with one key tile at a time. Counted per such step:

- products: S = Q Kᵀ over head_dim rounded up to 16, and O += P V;
- exponentials: one per score;
- shared memory: what the tensor cores read (K, V and Q; Q only once when it is kept in registers), what TMA
  writes, and O on its way out.

Rows past the end of the queries and rows that see no key are left out; a query block may compute some of them
all the same.
"""

from __future__ import annotations

import dataclasses

from ..core.order import makespan
from ..core.schedule import Schedule
from ..kernels.fa3 import Fa3Config
from ..planner import Plan
from .limits import Limits

#: Query rows of a consumer warpgroup.
GROUP_ROWS = 64
#: An SM of Hopper moves 128 bytes of shared memory and takes 16 exponentials in one clock; so the ceiling of
#: the one follows from the measured ceiling of the other.
SHARED_BYTES_PER_EXPONENTIAL = 128 / 16
_ATOM_COLUMNS, _ATOM_ROW_BYTES = 64, 128


@dataclasses.dataclass(frozen=True)
class Work:
    """What the tiles of a plan ask of the GPU in all, masked parts included."""

    flops: int
    exponentials: int
    shared_bytes: int
    memory_bytes: int
    """Compulsory: q, k, v and o once."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds that each resource needs at its measured ceiling, were it the only one."""

    products: float
    power: float | None
    """Products at the rate that the power limit leaves under lasting load; None: not measured."""
    exponentials: float
    shared_memory: float
    memory: float
    imbalance: float
    """Tiles of the busiest thread block over the average of all SMs: 1.0 when none is ever idle."""

    @property
    def overlapped(self) -> float:
        """All resources at work at the same time, all SMs busy to the end."""
        return max(self.products, self.exponentials, self.shared_memory, self.memory)

    @property
    def serial(self) -> float:
        """Products and exponentials one after the other: a faster kernel overlaps them."""
        return self.products + self.exponentials

    def named(self) -> dict[str, float]:
        """Seconds by the name of what they are spent on; what was not measured is left out."""
        found = {
            "products": self.products,
            "power": self.power,
            "exponentials": self.exponentials,
            "shared memory": self.shared_memory,
            "memory": self.memory,
            "busiest block": self.overlapped * self.imbalance,
            "no overlap": self.serial,
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}


def covers(plan: Plan) -> bool:
    """Whether the derivation holds for the plan's kernel. Of split keys it leaves out the parts and their merge."""
    return isinstance(plan.config, Fa3Config) and plan.device is not None and plan.split is None


def work_of(plan: Plan) -> Work:
    problem, config = plan.problem, _tiles_of(plan)
    heads = problem.batch * problem.heads
    groups = Schedule.of(problem, GROUP_ROWS, config.block_kv, plan.spec.skip_masked_tiles)
    steps, tiles = groups.visited * heads, plan.schedule.visited * heads
    items = plan.schedule.num_q_blocks * heads
    depth = -(-problem.head_dim // 16) * 16
    row_bytes = -(-problem.head_dim // _ATOM_COLUMNS) * _ATOM_ROW_BYTES
    operand = problem.k_element.itemsize
    reads = steps * config.block_kv * (depth + problem.head_dim) * operand
    q_bytes = items * config.block_q * row_bytes
    reads += q_bytes if config.q_in_registers else steps * GROUP_ROWS * depth * operand
    writes = tiles * 2 * config.block_kv * row_bytes + q_bytes
    # O takes the place of Q on its way out, where a buffer of Q is free by then.
    if config.store_by_tma and (config.q_in_registers or config.q_stages > 1):
        reads, writes = reads + q_bytes, writes + q_bytes
    return Work(
        flops=steps * 2 * GROUP_ROWS * config.block_kv * (depth + problem.head_dim),
        exponentials=steps * GROUP_ROWS * config.block_kv,
        shared_bytes=reads + writes,
        memory_bytes=problem.io_bytes,
    )


def bounds_of(plan: Plan, limits: Limits) -> Bounds:
    """For a plan that :func:`covers`, and the ceilings of its GPU."""
    work, kind = work_of(plan), plan.problem.dtype
    sustained = limits.sustained_flops.get(kind)
    return Bounds(
        products=work.flops / limits.flops[kind],
        power=work.flops / sustained if sustained else None,
        exponentials=work.exponentials / limits.exponentials,
        shared_memory=work.shared_bytes / (SHARED_BYTES_PER_EXPONENTIAL * limits.exponentials),
        memory=work.memory_bytes / limits.copy_bytes,
        imbalance=_busiest(plan, 0.0),
    )


def predict(plan: Plan, limits: Limits) -> float:
    """Seconds, from the bounds alone: what runs at the same time counts once, what waits adds up, the busiest
    thread block decides.

    With neither ping-pong nor overlap inside a warpgroup, which a soft cap takes, products wait for exponentials and
    the reverse.
    Blocks that live for one item start and end each of them without overlap.
    """
    bounds = bounds_of(plan, limits)
    overlap = plan.problem.softcap is None or _tiles_of(plan).ping_pong
    shared_by_all = bounds.overlapped if overlap else max(bounds.serial, bounds.overlapped)
    per_item = max(0.0, bounds.serial - shared_by_all) / shared_by_all if _lives_for_one_item(plan) else 0.0
    return shared_by_all * _busiest(plan, per_item)


def _tiles_of(plan: Plan) -> Fa3Config:
    assert isinstance(plan.config, Fa3Config)
    return plan.config


def _lives_for_one_item(plan: Plan) -> bool:
    """Blocks that are as many as there are items, more than SMs."""
    (launch,) = plan.launches
    assert plan.device is not None
    return launch.grid[0] > plan.device.num_sms


def _busiest(plan: Plan, item_cost: float) -> float:
    """Time of the busiest SM over that of all SMs, without the items' own cost, if they shared evenly.

    ``item_cost``: time that an item takes besides its tiles, in tiles.
    """
    assert plan.device is not None and plan.order is not None
    num_sms, order = plan.device.num_sms, plan.order
    if _lives_for_one_item(plan):
        order = dataclasses.replace(order, thread_block=None)
    tiles = order.tiles(plan.schedule)
    total = float(tiles.sum())
    return makespan(order, tiles + item_cost, num_sms) * num_sms / total if total else 1.0
