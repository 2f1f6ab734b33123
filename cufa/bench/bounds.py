"""How far FA3 can go on one shape, derived from its tiles (:mod:`cufa.bench.tile_work`) and from measured ceilings,
resource by resource; and what its techniques are predicted to bring. Pure: no GPU.
"""

from __future__ import annotations

import dataclasses

from ..core.order import makespan
from ..kernels.fa3 import Fa3Config
from ..kernels.fa3_backward import Fa3BackwardConfig
from ..planner import Plan
from . import memory_rates
from .limits import Limits
from .tile_work import Work, fa3_backward_work, forward_work

#: An SM of Hopper moves 128 bytes of shared memory and takes 16 exponentials in one clock; so the ceiling of
#: the one follows from the measured ceiling of the other.
SHARED_BYTES_PER_EXPONENTIAL = 128 / 16


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
    additions: float | None = None
    """Float32 sums in the L2 cache; None: there are none, or their ceiling is not known."""
    passes: float | None = None
    """Launches before and after that only move memory, while nothing else goes on; None: there are none."""

    @property
    def overlapped(self) -> float:
        """All resources at work at the same time, all SMs busy to the end."""
        return max(self.products, self.exponentials, self.shared_memory, self.memory, self.additions or 0.0)

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
            "L2 additions": self.additions,
            "passes": self.passes,
            "busiest block": self.overlapped * self.imbalance,
            "no overlap": self.serial,
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}


def covers(plan: Plan) -> bool:
    """Whether the derivation holds for the plan's kernel. Of split keys it leaves out the parts and their merge."""
    families = (Fa3Config, Fa3BackwardConfig)
    return isinstance(plan.config, families) and plan.device is not None and plan.split is None


def work_of(plan: Plan) -> Work:
    """Of a plan that :func:`covers`."""
    return fa3_backward_work(plan) if isinstance(plan.config, Fa3BackwardConfig) else forward_work(plan)


def bounds_of(plan: Plan, limits: Limits) -> Bounds:
    """For a plan that :func:`covers`, and the ceilings of its GPU."""
    work, kind = work_of(plan), plan.problem.dtype
    assert plan.device is not None
    additions = memory_rates.additions(plan.device.name)
    sustained = limits.sustained_flops.get(kind)
    return Bounds(
        products=work.flops / limits.flops[kind],
        power=work.flops / sustained if sustained else None,
        exponentials=work.exponentials / limits.exponentials,
        shared_memory=work.shared_bytes / (SHARED_BYTES_PER_EXPONENTIAL * limits.exponentials),
        memory=work.memory_bytes / limits.copy_bytes,
        imbalance=_busiest(plan, 0.0),
        additions=work.added_bytes / additions.bytes_per_second if additions and work.added_bytes else None,
        passes=work.further_bytes / limits.copy_bytes if work.further_bytes else None,
    )


def predict(plan: Plan, limits: Limits) -> float:
    """Seconds of a plan that :func:`covers`, from the bounds alone: what runs at the same time counts once, what waits
    adds up, the busiest thread block decides.

    With neither ping-pong nor overlap inside a warpgroup, which a soft cap takes, products wait for exponentials and
    the reverse.
    Blocks that live for one item start and end each of them without overlap.
    """
    bounds = bounds_of(plan, limits)
    overlap = plan.problem.softcap is None or not isinstance(plan.config, Fa3Config) or plan.config.ping_pong
    shared_by_all = bounds.overlapped if overlap else max(bounds.serial, bounds.overlapped)
    per_item = max(0.0, bounds.serial - shared_by_all) / shared_by_all if _lives_for_one_item(plan) else 0.0
    return shared_by_all * _busiest(plan, per_item) + (bounds.passes or 0.0)


def _lives_for_one_item(plan: Plan) -> bool:
    """Blocks that are as many as there are items, more than SMs."""
    launch = max(plan.launches, key=lambda launch: launch.shared_memory)
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
