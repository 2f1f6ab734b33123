"""fa3_backward: gradients on Hopper. Wide heads have a kernel of their own (fa3_backward_wide.py)."""

from __future__ import annotations

import dataclasses

from ..core import key_order
from ..core.architectures import Device
from ..core.lengths import DENSE, LENGTH_KINDS
from ..core.operation import Split
from ..core.order import Order
from ..core.problem import MASK_KINDS, Problem
from ..core.schedule import Schedule
from .backward import PASS_WARPS, STRIP
from .fa3_backward_config import (
    GROUP_KEYS,
    ITEM_BYTES,
    Fa3BackwardConfig,
    listed_tiles,
    narrow_shared_memory,
    tile_config,
)
from .spec import Box, KernelSpec, Launch, ceil_div


def _runs_on(problem: Problem, config: Fa3BackwardConfig) -> bool:
    """Whether thread blocks take one key block after another."""
    return config.may_run_on and problem.softcap is None and not problem.sink and key_order.in_groups(problem)


def _order(problem: Problem, schedule: Schedule, device: Device, config: Fa3BackwardConfig) -> Order:
    if key_order.in_groups(problem):
        small = key_order.in_small_groups(problem, device) and not _runs_on(problem, config)
        return key_order.key_blocks_in_groups(problem, schedule, small, config.cluster)
    return key_order.key_blocks(problem, schedule, key_order.share_in_turn(device))


def _strips(problem: Problem, config: Fa3BackwardConfig) -> int:
    """Of all heads, each padded to whole query tiles."""
    return problem.query_blocks(config.block_q) * (config.block_q // STRIP) * problem.heads


def _items(problem: Problem, config: Fa3BackwardConfig) -> int:
    return problem.key_blocks(config.block_kv) * problem.kv_heads


def _launches(
    problem: Problem, config: Fa3BackwardConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """Key blocks and key/value heads, between two passes over the queries."""
    name = "fa3_backward_wide" if config.paired else "fa3_backward"
    strips = _strips(problem, config)
    before = after = strips
    if _runs_on(problem, config):  # the passes take the first and the last groups of heads
        heads = problem.batch * problem.kv_heads
        of_head = strips // max(heads, 1)
        groups = key_order.head_groups(problem, ceil_div(problem.seqlen_k, config.block_kv))
        before = of_head * (heads if groups.before > groups.whole else groups.size * groups.before)
        after = of_head * (heads - groups.size * groups.converted)
    return (
        Launch(f"{name}_prepare", (ceil_div(before, PASS_WARPS), 1, 1), PASS_WARPS * 32, 0),
        Launch(
            name,
            (_items(problem, config) * config.cluster, 1, 1),
            config.num_warps * 32,
            shared_memory,
            dependent=config.early_launches,
            persistent=_runs_on(problem, config),
            cluster=config.cluster,
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


#: Tiles whose dQ is computed transposed.
TRANSPOSED = tile_config(80, 128, 2, min_head_dim=72, max_head_dim=128)

#: Of queries that see a key on average, over all heads that share it, there are four limits here and below.
#:
#: Tiles of 80 rows are faster where these are more: at 4k 1.04 to 1.09 times full, 1.02 to 1.04 with heads that
#: share keys, 0.97 to 1.0 causal; at 8k 1.05 and 1.03, at 16k 1.08 and 1.05 to 1.1; with 1k and 2k queries 0.94 to 1.0
#: (d72 to d128; H100, in turns, 2026-11-25). Where sums have an order, from fewer: 1.09 full and 1.05 causal at 4k.
_QUERIES_FOR_80_ROWS, _QUERIES_FOR_80_ROWS_IN_ORDER = 3000, 2000

#: A thread block that runs on has asked for its next key block when it begins one. With fewer for each SM than this, a
#: thread block for each key block is faster: 1.01 to 1.2 times on an H200. Where more queries than the third number see
#: a key, a key block takes long, and more are needed. That concerns head dims to 64: others take 80 rows by then.
_ITEMS_PER_SM, _LONG_ITEMS_PER_SM, _QUERIES_OF_LONG_ITEM = 4, 16, 8000

#: Heads of more than 96 columns, whose pipeline is long, have a thread block for each key block, however many there
#: are, where there are so many queries and so many see a key: in turns 1.02 full and 0.997 causal, alone at the power
#: limit 1.02 to 1.03 (4k). With 2k queries, or at most 96 columns, 0.97 to 0.99 in turns.
_LONG_SEQLEN, _QUERIES_OF_LONG_ITEM_WIDE = 4000, 2000


def _queries_of_key(problem: Problem) -> float:
    """That see a key on average, of all heads that share it."""
    return problem.all_visible_scores / max(problem.batch * problem.kv_heads * problem.seqlen_k, 1)


def _takes_80_rows(problem: Problem) -> bool:
    """Of dense sequences; others were not measured."""
    most = _QUERIES_FOR_80_ROWS_IN_ORDER if problem.deterministic else _QUERIES_FOR_80_ROWS
    return problem.lengths == DENSE and _queries_of_key(problem) > most


def _choose(problem: Problem, fitting: tuple[Fa3BackwardConfig, ...], device: Device) -> Fa3BackwardConfig:
    """Where key blocks take long, tiles of 80 rows if they serve; else, where key blocks take long or are few, or heads
    come in small groups, a thread block for each. Blocks that run on add dQ from registers where there are tiles that
    do (d64)."""
    if TRANSPOSED in fitting and _takes_80_rows(problem):
        return TRANSPOSED
    chosen = fitting[0]
    each = dataclasses.replace(chosen, persistent=False)
    if not (_runs_on(problem, chosen) and each in fitting):
        return chosen
    queries = _queries_of_key(problem)
    wide = problem.head_dim > 96 and problem.seqlen_q >= _LONG_SEQLEN and queries > _QUERIES_OF_LONG_ITEM_WIDE
    least = _LONG_ITEMS_PER_SM if queries > _QUERIES_OF_LONG_ITEM else _ITEMS_PER_SM
    few = _items(problem, chosen) < least * device.num_sms
    if wide or few or key_order.in_small_groups(problem, device):
        return each
    return next((x for x in fitting if x.persistent and not x.bulk_add), chosen)


def list_refusal(spec: KernelSpec, problem: Problem) -> str | None:
    """Why a problem is not served whose query tiles are listed: the list is too short."""
    config = next((x for x in spec.configs if x.fits(problem.head_dim)), spec.configs[0])
    assert isinstance(config, Fa3BackwardConfig)
    most = listed_tiles(config) * config.block_q
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
        tile_config(128, 128, 3, max_head_dim=64, persistent=True, bulk_add=False),
        TRANSPOSED,
    ),
    choose=_choose,
    shared_memory=narrow_shared_memory,
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
    further_refusal=list_refusal,
    config_refusal=_config_refusal,
)
