"""fa3_backward: gradients on Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core import order
from ..core.lengths import LENGTH_KINDS
from ..core.operation import Split
from ..core.problem import MASK_KINDS, MAX_HEAD_DIM, Problem
from .backward import PASS_WARPS, STRIP
from .config import TileConfig
from .shared_memory import Buffer
from .spec import Box, KernelSpec, Launch, ceil_div

GROUP_KEYS = 64
"""Rows of Sᵀ in one consumer warpgroup."""

ITEM_RECORDS = 2
"""The item at hand and the one after it, which the producer is ahead with."""

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
    dq_first: bool = False
    """dQ of the tile before is in flight under the exponentials, not behind them."""
    persistent: bool = False
    """As many thread blocks as run at once take one key block after another; else each is launched for one."""
    cluster: int = 1
    """Thread blocks of a cluster, which share out the keys of a tile: 64 each."""
    early_launches: bool = False
    """The main pass and the last one may begin while the one before ends (programmatic dependent launch)."""


def _listed_tiles(config: TileConfig) -> int:
    """Query tiles that a key block may visit where they need not lie side by side: its list lies in shared memory."""
    return 4096 if config.cluster == 1 else 2048


def _shared_memory(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; rings of Q, dO and dS, with the two numbers of each row; dQ on its way; barriers."""
    consumers = config.block_kv // GROUP_KEYS
    by_rows = config.block_q == 64 * consumers
    dq_columns = head_dim if by_rows or head_dim <= 8 else min(ceil_div(head_dim, 8 * consumers) * 8, 64)
    if not by_rows and head_dim > 64:
        dq_columns = 64
    dq = Buffer("DQ", consumers * 64 * dq_columns * 4 if config.bulk_add else 0)
    counts = {"Q": config.num_stages, "DO": config.do_stages, "DS": config.ds_stages, "DQ": 1}
    return (*_tiles(config, head_dim), dq, *_numbers_and_barriers(config, counts))


def _wide_shared_memory(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; rings of Q, dO and dS, with the two numbers of each row; two atoms of the other block's K; P; barriers."""
    others = Buffer("OTHER_K", 2 * GROUP_KEYS * 128, align=1024)
    p = Buffer("P", config.block_q * GROUP_KEYS * 2)
    counts = {
        "Q": config.num_stages,
        "DO": config.do_stages,
        "P": 1,
        "DS": config.ds_stages,
        "DS_STORED": config.ds_stages,
        "DQ": 1,
    }
    return (*_tiles(config, head_dim), others, p, *_numbers_and_barriers(config, counts))


def _tiles(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    row = ceil_div(head_dim, 64) * 128
    return (
        Buffer("K", config.block_kv // config.cluster * row, align=1024),
        Buffer("V", config.block_kv // config.cluster * row, align=1024),
        Buffer("Q", config.num_stages * config.block_q * row, align=1024),
        Buffer("DO", config.do_stages * config.block_q * row, align=1024),
        Buffer("DS", config.ds_stages * config.block_q * config.block_kv * 2, align=1024),
    )


def _numbers_and_barriers(config: Fa3BackwardConfig, counts: dict[str, int]) -> tuple[Buffer, ...]:
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
    )


def _strips(problem: Problem, config: Fa3BackwardConfig) -> int:
    """Of all heads, each padded to whole query tiles."""
    return problem.query_blocks(config.block_q) * (config.block_q // STRIP) * problem.heads


def _items(problem: Problem, config: Fa3BackwardConfig) -> int:
    return problem.key_blocks(config.block_kv) * problem.kv_heads


def _launches(
    problem: Problem, config: Fa3BackwardConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """Key blocks and key/value heads, between two passes over the queries."""
    name = "fa3_backward" if config.cluster == 1 else "fa3_backward_wide"
    passes = (ceil_div(_strips(problem, config), PASS_WARPS), 1, 1)
    return (
        Launch(f"{name}_prepare", passes, PASS_WARPS * 32, 0),
        Launch(
            name,
            (_items(problem, config) * config.cluster, 1, 1),
            config.num_warps * 32,
            shared_memory,
            cluster=config.cluster,
            dependent=config.early_launches,
            persistent=config.persistent,
        ),
        Launch(f"{name}_convert", passes, PASS_WARPS * 32, 0, dependent=config.early_launches),
    )


def _workspace(problem: Problem, config: Fa3BackwardConfig, split: Split | None = None) -> int:
    """``BackwardWorkspace`` of backward_workspace.cuh, with whole query tiles; with a sink a number for each strip;
    where blocks are persistent records of items, and the number of the next one."""
    strips = _strips(problem, config)
    tiles = strips * STRIP // config.block_q
    tile = config.block_q * (problem.head_dim + 2) * 4 + (128 if problem.deterministic else 0)
    return (
        128
        + tiles * tile
        + problem.sink * strips * 4
        + (_items(problem, config) * ITEM_BYTES if config.persistent else 0)
    )


def _boxes(config: Fa3BackwardConfig) -> dict[str, Box]:
    """Tiles of queries, keys and values of a consumer."""
    queries, keys = Box(config.block_q // config.cluster), Box(GROUP_KEYS)
    return {"dout": queries, "q": queries, "k": keys, "v": keys}


def _config(block_q: int, block_kv: int, num_stages: int, **own: Any) -> Fa3BackwardConfig:
    return Fa3BackwardConfig(block_q, block_kv, num_warps=12, num_stages=num_stages, **own)


def _refusal(spec: KernelSpec, problem: Problem) -> str | None:
    """A list that is too short."""
    config = next((x for x in spec.configs if x.fits(problem.head_dim)), spec.configs[0])
    most = _listed_tiles(config) * config.block_q
    if problem.mask.beyond_band and problem.seqlen_q > most:
        return f"takes at most {most:,} queries where the mask is more than a band"
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
        _config(128, 128, 2, max_head_dim=64),
        _config(64, 128, 2, min_head_dim=72, max_head_dim=128),
    ),
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
    order=lambda problem, schedule, num_sms: order.key_blocks(problem, schedule, 2 * order.L2_SHARE),
    operation="backward",
    further_constants=lambda problem: {"DETERMINISTIC": problem.deterministic, "WHOLE_TILES": True},
    further_refusal=_refusal,
)


def _wide_refusal(spec: KernelSpec, problem: Problem) -> str | None:
    """What does not fit the registers."""
    if problem.deterministic and problem.softcap is not None and problem.head_dim == MAX_HEAD_DIM:
        where = f"with a softcap at head_dim {MAX_HEAD_DIM} in any order of additions only"
        if problem.mask_kind not in ("full", "causal"):
            return f"takes a window {where}"
        if problem.alibi and problem.lengths.ragged:
            return f"takes lengths with ALiBi {where}"
    return _refusal(spec, problem)


FA3_BACKWARD_WIDE = dataclasses.replace(
    FA3_BACKWARD,
    name="fa3_backward_wide",
    title="FlashAttention-3 backward of wide heads: TMA, WGMMA, warp specialisation",
    source="fa3_backward_wide.cu",
    configs=(
        _config(64, 128, 2, min_head_dim=136, max_head_dim=192, bulk_add=False, cluster=2),
        _config(64, 128, 2, min_head_dim=200, do_stages=1, bulk_add=False, cluster=2),
    ),
    shared_memory=_wide_shared_memory,
    further_refusal=_wide_refusal,
)
