"""Lower bounds on a plan's time, one per resource, from measured ceilings; and a prediction of the time. Needs no GPU.

:mod:`cufa.measure.costs` gives the demand on each resource: the kernel's counters times the tiles visited. No constant
of the prediction is fitted to the predicted times. A warp (on Hopper a consumer warpgroup) uses one unit at a time. If
n warps share an SM's units, they hide all but 1/n of the time in which the busiest unit would idle:

    busiest unit + (sum over units − busiest unit) / n

Thread blocks run in the order of :mod:`cufa.schedule.order`, and each launch adds its overhead.
"""

from __future__ import annotations

import dataclasses

from ..kernels.backward.fa2 import BackwardConfig
from ..kernels.backward.fa3_config import Fa3BackwardConfig
from ..kernels.config import TileConfig
from ..kernels.forward.fa2 import Fa2Config
from ..kernels.forward.fa3 import Fa3Config
from ..plan.planner import Plan
from ..schedule.order import ITEM_COST, makespan
from . import additions, costs
from .limits import Limits

#: From sm_80 on, an SM moves 128 bytes of shared memory and computes 16 exponentials per clock: the measured ceiling of
#: exponentials gives the ceiling of shared memory.
SHARED_BYTES_PER_EXPONENTIAL = 128 / 16
_HOPPERS = (Fa3Config, Fa3BackwardConfig)
"""Configs of the kernels with wgmma. An SM holds one of their thread blocks."""
_TENSOR_CORES = (*_HOPPERS, Fa2Config, BackwardConfig)
"""Configs of kernels whose times are predicted."""
_SCHEDULERS = 4
"""Warp schedulers of an SM. Each issues the instructions of every fourth warp."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds that a plan takes if one resource, at its measured ceiling, is the only limit."""

    products: float
    power: float | None
    """Products at the rate that remains when the power limit has lowered the clocks; None: not measured."""
    exponentials: float
    shared_memory: float
    memory: float
    imbalance: float
    """Tiles of the busiest SM over the average of all SMs: 1.0 when no SM is ever idle."""
    own_shared: float
    """The part of ``shared_memory`` that warps load and store themselves: they compute nothing meanwhile."""
    additions: float | None = None
    """Float32 additions in the L2 cache; None: the plan has none, or their ceiling is not known."""
    passes: float | None = None
    """Launches before and after the main kernel, limited by device memory; None: the plan has none."""

    @property
    def overlapped(self) -> float:
        """Time if all resources work at once and all SMs are busy to the end."""
        found = self.products, self.exponentials, self.shared_memory, self.memory, self.additions
        return max(seconds for seconds in found if seconds is not None)

    @property
    def serial(self) -> float:
        """Time if nothing overlaps in a warp: products, exponentials and the warp's own shared memory accesses."""
        return self.products + self.exponentials + self.own_shared

    def named(self) -> dict[str, float]:
        """Seconds by resource; resources without a measured ceiling are left out."""
        found = {
            "products": self.products,
            "power": self.power,
            "exponentials": self.exponentials,
            "shared memory": self.shared_memory,
            "memory": self.memory,
            additions.NAME: self.additions,
            "passes": self.passes,
            "busiest block": self.overlapped * self.imbalance,
            "no overlap": self.serial,
        }
        return {name: seconds for name, seconds in found.items() if seconds is not None}


def why_not(plan: Plan, limits: Limits) -> str:
    """Why the plan's time cannot be predicted from the ceilings ``limits``; "" if it can."""
    if not isinstance(plan.config, _TENSOR_CORES) or plan.problem.itemsize != 2:
        return f"times of {plan.spec.name} are not predicted: how its warps share an SM is not modelled"
    if reason := costs.why_not(plan):
        return reason
    if plan.problem.deterministic:
        return "times of deterministic additions are not predicted: thread blocks wait for one another"
    if plan.problem.dtype not in _product_rates(plan.config, limits):
        return "the rate of mma.sync is not recorded for this card"
    return ""


def bounds_of(plan: Plan, limits: Limits) -> Bounds:
    """The bounds of a plan for which :func:`why_not` returns "". ``limits``: ceilings of the plan's GPU."""
    assert plan.device is not None
    kind, cost = plan.problem.dtype, costs.cost_of(plan)
    rate = additions.of_card(plan.device.name) if cost.added else None
    sustained = limits.sustained_flops.get(kind) if isinstance(plan.config, _HOPPERS) else None
    shared = SHARED_BYTES_PER_EXPONENTIAL * limits.exponentials
    return Bounds(
        products=cost.flops / _product_rates(plan.config, limits)[kind],
        power=cost.flops / sustained if sustained else None,
        exponentials=cost.exponentials / limits.exponentials,
        shared_memory=cost.shared / shared,
        memory=plan.problem.io_bytes / limits.copy_bytes,
        imbalance=_busiest(plan, 0.0),
        own_shared=cost.own_shared / shared,
        additions=cost.added / rate.bytes_per_second if rate else None,
        passes=cost.passes / limits.copy_bytes if cost.passes else None,
    )


def _product_rates(config: TileConfig, limits: Limits) -> dict[str, float]:
    return limits.flops if isinstance(config, _HOPPERS) else limits.mma_flops


def predict(plan: Plan, limits: Limits) -> float:
    """Predicted seconds of a plan for which :func:`why_not` returns "", from its bounds alone."""
    bounds = bounds_of(plan, limits)
    not_hidden = max(0.0, bounds.serial - bounds.overlapped)
    tiles = bounds.overlapped + not_hidden / _sharing(plan)
    item_cost = ITEM_COST
    if bounds.overlapped and isinstance(plan.config, _HOPPERS) and _takes_one_item(plan):
        # No other work item overlaps the first and the last step of an item.
        item_cost += not_hidden / bounds.overlapped
    overhead = (bounds.passes or 0.0) + len(plan.launches) * limits.launch_seconds
    return tiles * _busiest(plan, item_cost) + overhead


def _sharing(plan: Plan) -> float:
    """Number of warps of one scheduler, or of consumer warpgroups of one SM, that hide each other's waits.

    Consumer warpgroups overlap by ping-pong, or each overlaps its softmax with its own products; a soft cap prevents
    the latter. Warpgroups of a pair of blocks exchange P and dS in every tile: no wait is hidden.
    """
    config = plan.config
    if isinstance(config, Fa3Config):
        overlaps = config.ping_pong or plan.problem.softcap is None
        return config.num_warps // 4 - 1 if overlaps else 1
    if isinstance(config, Fa3BackwardConfig):
        return 1 if config.paired else config.num_warps // 4 - 1
    return max(1.0, config.num_warps * _resident(plan) / _SCHEDULERS)


def _resident(plan: Plan) -> int:
    """Thread blocks that are resident on one SM."""
    assert plan.device is not None and plan.order is not None
    fitting = 1 if isinstance(plan.config, _HOPPERS) else plan.config.blocks_per_sm
    return max(1, min(fitting, -(-len(plan.order) // plan.device.num_sms)))


def _takes_one_item(plan: Plan) -> bool:
    """Whether each thread block takes one work item, and there are more blocks than SMs."""
    assert plan.device is not None
    return bool(costs.main_launch(plan).grid[0] > plan.device.num_sms)


def _busiest(plan: Plan, item_cost: float) -> float:
    """Time of the busiest SM over the time with equally many tiles on all SMs. ``item_cost``: overhead of a work item,
    in tiles."""
    assert plan.device is not None and plan.order is not None
    slots, order = plan.device.num_sms * _resident(plan) // plan.config.blocks_of_item, plan.order
    if isinstance(plan.config, Fa3Config) and _takes_one_item(plan):
        order = dataclasses.replace(order, thread_block=None)
    tiles = order.tiles(plan.schedule) * (plan.problem.group_size if plan.schedule.by_keys else 1)
    total = float(tiles.sum())
    return makespan(order, tiles + item_cost, slots) * slots / total if total else 1.0
