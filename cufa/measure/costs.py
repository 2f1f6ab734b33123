"""Work that a plan asks of the GPU: counters of the kernel's own source, executed on a CPU, times the tiles visited.

``tests/evidence/counting.py`` executes each kernel on a few small shapes and records what one unit of work costs
(a visited tile, a work item, …). Here a plan's units come from its schedule; a plan's counters are units × costs.
Needs neither a GPU nor a compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..gpu.architectures import Device
from ..kernels import Kernel, TileConfig
from ..kernels.forward.fa3 import Fa3Config
from ..plan.planner import Plan, make_plan
from ..problem.problem import Problem
from ..problem.tile_classes import TileClass
from ..schedule.schedule import Schedule

PATH = Path(__file__).parents[1] / "records" / "emulated" / "costs.json"

ON_CHIP = ("products", "exponentials", "shared", "own_shared", "added")
"""In order: multiply-adds; operations of the special-function unit; bytes of shared memory, 128 per wavefront; the part
of these bytes that threads load and store themselves; bytes of float32 additions in the L2 cache."""
COUNTERS = (*ON_CHIP, "read", "written", "passes")
"""Also the bytes that all launches read from and write to the L2 cache, and the part of them in launches that visit no
tiles (passes)."""

#: An H200 with one SM: a single persistent block takes all work items, whatever the order of threads on this CPU.
ONE_SM = dataclasses.replace(Device.typical("sm_90"), num_sms=1)

#: Query rows of a consumer warpgroup in FlashAttention-3's forward. A warpgroup skips tiles that none of its rows sees.
GROUP_ROWS = 64

_NO_COST = frozenset({"min_head_dim", "max_head_dim", "max_v_dim"})
"""Fields of configs that change no counter."""

Units = dict[str, float]
Table = Mapping[str, Mapping[str, int]]
"""Counter → unit → count."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counters of a whole call: the fields are :data:`COUNTERS`."""

    products: int
    exponentials: int
    shared: int
    own_shared: int
    added: int
    read: int
    written: int
    passes: int

    @property
    def flops(self) -> int:
        return 2 * self.products

    @property
    def l2(self) -> int:
        """Bytes that cross between the L2 cache and the SMs."""
        return self.read + self.written


def units(plan: Plan) -> dict[str, Units]:
    """How often each unit of work occurs, by counter. On-chip work counts whole tiles. Reads of device
    memory count existing rows only; additions to dQ also cover rows past the ends."""
    problem, config, schedule = plan.problem, plan.config, plan.schedule
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    key_heads = kv_heads if schedule.by_keys else heads
    visited = schedule.classes != TileClass.SKIP
    length, block = (
        (problem.seqlen_q, config.block_q) if schedule.by_keys else (problem.seqlen_k, config.block_kv)
    )
    missing = (-length % block) / block * int(visited[:, -1].sum())
    main = main_launch(plan)
    whole: Units = {
        "tile": schedule.visited * heads,
        "query block": schedule.num_q_blocks * heads,
        "key block": schedule.num_kv_blocks * key_heads,
        "head": heads,
        "call": 0 if main.persistent else 1,
        "thread block": int(np.prod(main.grid)) if main.persistent else 0,
        "idle warpgroup": _idle_warpgroups(plan) * heads,
    }
    partial = {
        **whole,
        "tile": (schedule.visited - missing) * heads,
        "query block": problem.seqlen_q / config.block_q * heads,
        "key block": problem.seqlen_k / config.block_kv * key_heads,
    }
    written = {**partial, "tile": whole["tile"]}
    return dict.fromkeys(ON_CHIP, whole) | {"read": partial, "written": written, "passes": partial}


def main_launch(plan: Plan) -> Any:
    """The launch that visits tiles."""
    return max(plan.launches, key=lambda launch: launch.shared_memory)


def _idle_warpgroups(plan: Plan) -> int:
    """Tiles that warpgroups of FlashAttention-3's forward skip within visited tiles of their thread block, per head.

    A warpgroup whose rows all lie past the end computes one tile.
    """
    if not isinstance(plan.config, Fa3Config):
        return 0
    config, schedule = plan.config, plan.schedule
    groups = Schedule.of(plan.problem, GROUP_ROWS, config.block_kv, plan.spec.skip_masked_tiles)
    per_block = config.block_q // GROUP_ROWS
    past_the_end = schedule.num_q_blocks * per_block - groups.num_q_blocks
    return max(0, schedule.visited * per_block - groups.visited - past_the_end)


def key_of(config: TileConfig) -> dict[str, Any]:
    """The fields of a config that costs depend on."""
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: x for name, x in fields.items() if name not in _NO_COST and (name != "page_box" or x)}


@functools.cache
def load() -> dict[str, Any]:
    """The recorded costs."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


@functools.lru_cache(4096)
def table_of(kernel: Kernel, config: TileConfig, head_dim: int, softcap: bool) -> Table | None:
    """Costs of one build; None: not recorded."""
    wanted = key_of(config)
    for entry in load()["kernels"].get(kernel.name, {}).get("configs", ()):
        found: dict[str, Table] = entry["head_dims"]
        if (
            entry["config"] == wanted and str(head_dim) in found
        ):  # two ranges of head dims may have the same tiles
            plain = found[str(head_dim)]
            return found.get(f"{head_dim} softcap", plain) if softcap else plain
    return None


def why_not(plan: Plan) -> str:
    """Why the cost of a plan is not known; "" where it is."""
    if plan.device is None or not plan.launches:
        return "nothing is launched on a GPU"
    if plan.split is not None:
        return "costs are not counted for split keys"
    if plan.order is None:
        return "costs are counted only if every sequence fills the arrays: else the order of work items is unknown"
    p = plan.problem
    if p.v_head_dim or table_of(plan.spec, plan.config, p.head_dim, p.softcap is not None) is None:
        return (
            f"no counters are recorded for {plan.spec.name} with tiles {plan.config} at head dim "
            f"{p.dims_text}{' with a soft cap' * (plan.problem.softcap is not None)}"
        )
    return ""


def cost_of(plan: Plan) -> Cost:
    """The cost of a plan for which :func:`why_not` returns ""."""
    table = table_of(plan.spec, plan.config, plan.problem.head_dim, plan.problem.softcap is not None)
    assert table is not None
    counts = units(plan)
    return Cost(
        **{
            name: round(sum(n * counts[name][unit] for unit, n in table.get(name, {}).items()))
            for name in COUNTERS
        }
    )


def cost_on(problem: Problem, kernel: Kernel, config: TileConfig) -> Cost | None:
    """The cost on the kernel's typical card. None: it is not known, or the config does not fit."""
    device = Device.typical(max(90, kernel.min_capability))
    try:
        plan = make_plan(problem, device, config=config, kernel=kernel.name, num_splits=1)
    except ValueError:
        return None
    return None if why_not(plan) else cost_of(plan)
