"""fa3_backward: gradients on Hopper. Wide heads have a kernel of their own (fa3_backward_wide.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ..core import order
from ..core.architectures import Device
from ..core.lengths import DENSE, LENGTH_KINDS
from ..core.operation import Split
from ..core.problem import MASK_KINDS, Problem
from ..core.schedule import Schedule
from .backward import PASS_WARPS, STRIP
from .config import TileConfig
from .shared_memory import Buffer
from .spec import Box, KernelSpec, Launch, ceil_div

GROUP_KEYS = 64
"""Rows of Sᵀ in one consumer warpgroup."""

ITEM_RECORDS = 3
"""The item at hand, the one after it, which the producer may be at, and the next, which it asks for."""

ITEM_BYTES = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fa3BackwardConfig(TileConfig):
    """Tiles of the backward on Hopper: 64 keys for each consumer warpgroup, and a producer. ``num_stages`` are those
    of Q."""

    do_stages: int = 2
    """Buffers of dO."""
    ds_stages: int = 2
    """Buffers of dS."""
    bulk_add: bool = True
    """dQ is added by the copy engine, from shared memory; else by every thread from its registers."""
    persistent: bool = False
    """As many thread blocks as run at once take one key block after another, and prepare and convert dQ beside their
    tiles; else each is launched for one. Where :func:`_runs_on`."""
    early_launches: bool = False
    """The main pass and the last one may begin while the one before ends (programmatic dependent launch)."""

    gone: ClassVar[Mapping[str, Any]] = {"dq_first": False}

    @property
    def dq_transposed(self) -> bool:
        """dQ is computed as dQᵀ = Kᵀ dSᵀ, whose 64 rows for each warpgroup are columns of the head: ``DQ_TRANSPOSED``
        of backward_workspace.cuh. Then blocks do not run on."""
        return self.block_q % 64 != 0

    @property
    def may_run_on(self) -> bool:
        """Whether thread blocks take one key block after another, where the problem lets them."""
        return self.persistent and not self.dq_transposed

    def dq_columns(self, head_dim: int) -> int:
        """Of a row of dQ in the workspace: transposed, accumulators of 16 columns lie there whole."""
        return ceil_div(head_dim, 16) * 16 if self.dq_transposed else head_dim

    @property
    def warps_text(self) -> str:
        """That blocks run on goes without saying; of wide heads none do."""
        return super().warps_text + (
            "" if self.persistent or self.block_kv <= GROUP_KEYS else ", a block each"
        )


def _listed_tiles(config: Fa3BackwardConfig) -> int:
    """Query tiles that a key block may visit where they need not lie side by side: its list lies in shared memory. None
    with 80 rows, which leave no room (:func:`_config_refusal`)."""
    if config.dq_transposed:
        return 0
    return 4096 if config.block_kv > GROUP_KEYS else 2048


def _shared_memory(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; rings of Q, dO and dS, with the two numbers of each row; dQ on its way; barriers."""
    consumers = config.block_kv // GROUP_KEYS
    by_rows = config.block_q == 64 * consumers
    dq_columns = head_dim if by_rows or head_dim <= 8 else min(ceil_div(head_dim, 8 * consumers) * 8, 64)
    if not by_rows and head_dim > 64:
        dq_columns = 64
    if config.dq_transposed:  # as many rows of dQᵀ, each as long as the tile has queries
        dq_columns = config.block_q
    dq = Buffer("DQ", consumers * 64 * dq_columns * 4 if config.bulk_add else 0)
    counts = {"Q": config.num_stages, "DO": config.do_stages, "DS": config.ds_stages, "DQ": 1}
    return (*tiles(config, head_dim), dq, *numbers_and_barriers(config, head_dim, counts))


def tiles(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    row = ceil_div(head_dim, 64) * 128
    return (
        Buffer("K", config.block_kv * row, align=1024),
        Buffer("V", config.block_kv * row, align=1024),
        Buffer("Q", config.num_stages * config.block_q * row, align=1024),
        Buffer("DO", config.do_stages * config.block_q * row, align=1024),
        Buffer("DS", config.ds_stages * config.block_q * config.block_kv * 2, align=1024),
    )


def numbers_and_barriers(
    config: Fa3BackwardConfig, head_dim: int, counts: dict[str, int]
) -> tuple[Buffer, ...]:
    """``counts``: buffers of each ring."""
    return (
        Buffer("LSE", config.num_stages * config.block_q * 4),
        Buffer("DELTA", config.do_stages * config.block_q * 4),
        Buffer("ITEMS", ITEM_RECORDS * ITEM_BYTES),
        Buffer("ITEM_FULL", ITEM_RECORDS * 8, align=8),
        Buffer("ITEM_EMPTY", ITEM_RECORDS * 8, align=8),
        Buffer("KV_FULL", 2 * 8, align=8),
        Buffer("KV_EMPTY", 8, align=8),
        *(
            Buffer(f"{name}_{state}", 8 * count, align=8)
            for name, count in counts.items()
            for state in ("FULL", "EMPTY")
        ),
        Buffer("TAIL_FULL", 2 * 8, align=8),
        Buffer("SEQUENCE", 32, align=16),
        Buffer("LIST", 4 * _listed_tiles(config), align=16),
        Buffer("BACKGROUND", 4 * 64 * head_dim if config.may_run_on else 0, align=16, over="LIST"),
    )


def _runs_on(problem: Problem, config: Fa3BackwardConfig) -> bool:
    """Whether thread blocks take one key block after another."""
    return config.may_run_on and problem.softcap is None and not problem.sink and order.in_groups(problem)


def _order(problem: Problem, schedule: Schedule, device: Device) -> order.Order:
    if order.in_groups(problem):
        return order.key_blocks_in_groups(problem, schedule)
    return order.key_blocks(problem, schedule, 2 * order.L2_SHARE)


def _strips(problem: Problem, config: Fa3BackwardConfig) -> int:
    """Of all heads, each padded to whole query tiles."""
    return problem.query_blocks(config.block_q) * (config.block_q // STRIP) * problem.heads


def _items(problem: Problem, config: Fa3BackwardConfig) -> int:
    return problem.key_blocks(config.block_kv) * problem.kv_heads


def _launches(
    problem: Problem, config: Fa3BackwardConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """Key blocks and key/value heads, between two passes over the queries."""
    name = "fa3_backward" if config.block_kv > GROUP_KEYS else "fa3_backward_wide"
    strips = _strips(problem, config)
    before = after = strips
    if _runs_on(problem, config):  # the passes take the first and the last groups of heads
        heads = problem.batch * problem.kv_heads
        of_head = strips // max(heads, 1)
        groups = order.head_groups(problem, ceil_div(problem.seqlen_k, config.block_kv))
        before = of_head * (heads if groups.before > groups.whole else groups.size * groups.before)
        after = of_head * (heads - groups.size * groups.converted)
    return (
        Launch(f"{name}_prepare", (ceil_div(before, PASS_WARPS), 1, 1), PASS_WARPS * 32, 0),
        Launch(
            name,
            (_items(problem, config), 1, 1),
            config.num_warps * 32,
            shared_memory,
            dependent=config.early_launches,
            persistent=_runs_on(problem, config),
        ),
        Launch(
            f"{name}_convert",
            (ceil_div(after, PASS_WARPS), 1, 1),
            PASS_WARPS * 32,
            0,
            dependent=config.early_launches,
        ),
    )


def _workspace(problem: Problem, config: Fa3BackwardConfig, split: Split | None = None) -> int:
    """``BackwardWorkspace`` of backward_workspace.cuh, with whole query tiles; with a sink a number for each strip;
    where blocks are persistent records of items, and the number of the next one."""
    strips = _strips(problem, config)
    tiles = strips * STRIP // config.block_q
    tile = config.block_q * (config.dq_columns(problem.head_dim) + 2) * 4 + (
        128 if problem.deterministic else 0
    )
    return (
        128
        + tiles * tile
        + problem.sink * strips * 4
        + _runs_on(problem, config)
        * (_items(problem, config) * ITEM_BYTES + 16 * problem.batch * problem.kv_heads)
    )


def _boxes(config: Fa3BackwardConfig) -> dict[str, Box]:
    """Tiles of queries, keys and values of a consumer."""
    queries, keys = Box(config.block_q), Box(GROUP_KEYS)
    return {"dout": queries, "q": queries, "k": keys, "v": keys}


def tile_config(block_q: int, block_kv: int, num_stages: int, **own: Any) -> Fa3BackwardConfig:
    return Fa3BackwardConfig(block_q, block_kv, num_warps=12, num_stages=num_stages, **own)


#: Tiles whose dQ is computed transposed.
TRANSPOSED = tile_config(80, 128, 2, min_head_dim=72, max_head_dim=128)

#: They are faster where a key is seen by more queries than this on average: at 4k 1.04 to 1.09 times full, 1.02 to 1.04
#: with heads that share keys, 0.97 to 1.0 causal; at 8k 1.05 and 1.03, at 16k 1.08 and 1.05 to 1.1; with 1k and 2k
#: queries 0.94 to 1.0 (d72 to d128; H100, in turns, 2026-11-25). Where sums have an order, from fewer: 1.09 full and
#: 1.05 causal at 4k.
_QUERIES_OF_LONG_KEY, _IN_ORDER = 3000, 2000

#: A thread block that runs on has asked for its next key block when it begins one. With fewer for each SM than this, or
#: where a key is seen by more queries on average, a thread block for each key block is faster: 1.01 to 1.2 times on an
#: H200.
_ITEMS_PER_SM, _QUERIES_OF_KEY = 4, 8000

#: Heads of more than 96 columns, whose pipeline is long, have the second limit lower from so many queries on: in turns
#: 1.02 full and 0.997 causal, alone at the power limit 1.02 to 1.03 (4k). With 2k queries, or at most 96 columns, 0.97
#: to 0.99 in turns.
_LONG_SEQLEN, _QUERIES_OF_WIDE_KEY = 4000, 2000


def _queries_of_key(problem: Problem) -> float:
    """That see a key on average, of all heads that share it."""
    return problem.all_visible_scores / max(problem.batch * problem.kv_heads * problem.seqlen_k, 1)


def _takes_80_rows(problem: Problem) -> bool:
    """Of dense sequences; others were not measured."""
    most = _IN_ORDER if problem.deterministic else _QUERIES_OF_LONG_KEY
    return problem.lengths == DENSE and _queries_of_key(problem) > most


def _choose(problem: Problem, fitting: tuple[Fa3BackwardConfig, ...], device: Device) -> Fa3BackwardConfig:
    """Where key blocks take long, tiles of 80 rows if they serve; else, where key blocks take long or are few, a
    thread block for each."""
    if TRANSPOSED in fitting and _takes_80_rows(problem):
        return TRANSPOSED
    chosen = fitting[0]
    each = dataclasses.replace(chosen, persistent=False)
    if not (_runs_on(problem, chosen) and each in fitting):
        return chosen
    few = _items(problem, chosen) < _ITEMS_PER_SM * device.num_sms
    wide = problem.head_dim > 96 and problem.seqlen_q >= _LONG_SEQLEN
    most = _QUERIES_OF_WIDE_KEY if wide else _QUERIES_OF_KEY
    return each if few or _queries_of_key(problem) > most else chosen


def refusal(spec: KernelSpec, problem: Problem) -> str | None:
    """A list that is too short."""
    config = next((x for x in spec.configs if x.fits(problem.head_dim)), spec.configs[0])
    assert isinstance(config, Fa3BackwardConfig)
    most = _listed_tiles(config) * config.block_q
    if problem.mask.beyond_band and problem.seqlen_q > most:
        return f"takes at most {most:,} queries where the mask is more than a band"
    return None


def _config_refusal(config: Fa3BackwardConfig, problem: Problem) -> str | None:
    """Tiles of 80 rows, of which all registers and nearly all shared memory are in use."""
    if config.dq_transposed and problem.softcap is not None:
        return "takes no softcap, for which registers do not suffice"
    if config.dq_transposed and problem.mask.beyond_band:
        return "takes masks that are bands, for a list of tiles does not fit into shared memory"
    return None


FA3_BACKWARD = KernelSpec(
    name="fa3_backward",
    algorithm="fa3",
    title="FlashAttention-3 backward: TMA, WGMMA, warp specialisation",
    paper="Shah et al. 2024, FlashAttention-3, section 3 and appendix B",
    source="fa3_backward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        *(
            config
            for persistent in (True, False)
            for config in (
                tile_config(128, 128, 3, max_head_dim=64, persistent=persistent),
                tile_config(64, 128, 2, min_head_dim=72, max_head_dim=128, persistent=persistent),
            )
        ),
        TRANSPOSED,
    ),
    choose=_choose,
    shared_memory=_shared_memory,
    launches=_launches,
    workspace=_workspace,
    workspace_holds="dQ in float32, which the blocks of all keys add to, and two numbers per query",
    masks=MASK_KINDS,
    lengths=LENGTH_KINDS,
    score_changes=("alibi", "sink"),
    skip_masked_tiles=True,
    min_capability=90,
    max_capability=90,
    boxes=_boxes,
    order=_order,
    operation="backward",
    further_constants=lambda problem: {"DETERMINISTIC": problem.deterministic, "WHOLE_TILES": True},
    further_refusal=refusal,
    config_refusal=_config_refusal,
)
