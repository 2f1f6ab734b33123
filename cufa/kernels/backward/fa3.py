"""fa3_backward: gradients on Hopper. Wide heads have a kernel of their own (fa3_pair.py)."""

from __future__ import annotations

from ...gpu.architectures import Device
from ...problem.problem import MASK_KINDS, Problem
from ...schedule import key_order
from ...schedule.order import Order
from ...schedule.schedule import Schedule
from ..base import Kernel
from ..config import Box, Buffer, Launch, Split, ceil_div
from .fa2 import (
    PASS_WARPS,
    STRIP,
    Fa2Backward,
    before_mask,
    gradient_elements,
    prepare_launches,
    reasons_of_order,
)
from .fa3_config import (
    ITEM_BYTES,
    WARPGROUP_KEYS,
    Fa3BackwardConfig,
    listed_tiles,
    narrow_shared_memory,
    tile_config,
)


def _strips(problem: Problem, config: Fa3BackwardConfig) -> int:
    """Row strips of all heads, each head padded to whole query tiles."""
    return problem.query_blocks(config.block_q) * (config.block_q // STRIP) * problem.heads


def _items(problem: Problem, config: Fa3BackwardConfig) -> int:
    return problem.key_blocks(config.block_kv) * problem.kv_heads


#: Fewest key blocks per SM for persistent blocks: with fewer, a thread block for each is 1.01 to 1.13 times as fast
#: (H200). Second: the fewest if a key block takes long, because more queries than the third number see a key. This
#: matters for head dims to 64: wider heads mostly have a block each there (:func:`_takes_long`).
_ITEMS_PER_SM, _LONG_ITEMS_PER_SM, _QUERIES_OF_LONG_ITEM = 3, 16, 8000

#: Over head dim 64, each key block has its own thread block, however many there are, if it takes long: if more queries
#: than this see a key, on average, over all heads that share the key. First: head dims to 96. Second: wider ones, if
#: sequences have at least the third number of rows. Figures: cuda_src/backward/fa3_narrow128/NOTES.md, 2026-11-26.
_QUERIES_OF_LONG_ITEM_UP_TO_96, _QUERIES_OF_LONG_ITEM_WIDE, _LONG_SEQLEN_WIDE = 1500, 1000, 2000


def _takes_long(problem: Problem) -> bool:
    """Whether a key block takes long, with a head dim over 64."""
    queries = _queries_of_key(problem)
    if problem.head_dim <= 96:
        return problem.head_dim > 64 and queries > _QUERIES_OF_LONG_ITEM_UP_TO_96
    return problem.seqlen_q >= _LONG_SEQLEN_WIDE and queries > _QUERIES_OF_LONG_ITEM_WIDE


def _queries_of_key(problem: Problem) -> float:
    """Queries that see a key on average, over all heads that share it."""
    return problem.all_visible_scores / max(problem.batch * problem.kv_heads * problem.seqlen_k, 1)


class Fa3Backward(Kernel):
    name = "fa3_backward"
    algorithm = "fa3"
    title = "FlashAttention-3 backward: TMA, WGMMA, warp specialisation"
    paper = "Shah et al. 2024, FlashAttention-3, section 3 and appendix B"
    source = "backward/fa3_narrow64/kernel.cu"
    entry = "fa3_backward"
    operation = "backward"
    dtypes = ("float16", "bfloat16")
    masks = MASK_KINDS
    options = Fa2Backward.options
    options_with_irregular_masks = options
    score_derivatives_without_score = True
    any_v_dim = True
    min_capability = max_capability = 90
    skip_masked_tiles = True
    configs: tuple[Fa3BackwardConfig, ...] = (
        tile_config(128, 128, 3, max_head_dim=64),
        tile_config(64, 128, 2, min_head_dim=72, max_head_dim=128),
        tile_config(128, 128, 3, max_head_dim=64, persistent=True, bulk_add=False),
        tile_config(64, 128, 2, min_head_dim=72, max_head_dim=96, persistent=True, bulk_add=False),
        tile_config(64, 128, 2, min_head_dim=104, max_head_dim=128, persistent=True),
    )
    workspace_holds = "dQ in float32, which all key blocks add to, and lse and delta of each query"

    def source_of(self, config: Fa3BackwardConfig) -> str:
        """Head dims to 64 have one kernel, wider ones another: their products come in different orders."""
        return self.source if config.max_head_dim <= 64 else "backward/fa3_narrow128/kernel.cu"

    def shared_memory(self, config: Fa3BackwardConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        return narrow_shared_memory(config, head_dim, v_dim)

    def launches(
        self, problem: Problem, config: Fa3BackwardConfig, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """Key blocks and key/value heads, between two passes over the queries."""
        name = self.name
        strips = _strips(problem, config)
        prepared = converted = strips
        if config.persistent:  # the passes take the first and the last head batches
            heads = problem.batch * problem.kv_heads
            per_head = strips // max(heads, 1)
            batches = key_order.head_batches(problem, ceil_div(problem.seqlen_k, config.block_kv))
            prepared = per_head * (heads if batches.before > batches.whole else batches.size * batches.before)
            converted = per_head * (heads - batches.size * batches.converted)
        return (
            *prepare_launches(f"{name}_prepare", problem, config, ceil_div(prepared, PASS_WARPS)),
            Launch(
                name,
                (_items(problem, config) * config.cluster, 1, 1),
                config.num_warps * 32,
                shared_memory,
                persistent=config.persistent,
                cluster=config.cluster,
            ),
            Launch(f"{name}_convert", (ceil_div(converted, PASS_WARPS), 1, 1), PASS_WARPS * 32, 0),
        )

    def workspace(self, problem: Problem, config: Fa3BackwardConfig, split: Split | None = None) -> int:
        """``BackwardWorkspace`` of backward/common/workspace.cuh, with whole query tiles; with a sink, a float for each
        strip; where blocks are persistent, the descriptors of all items and the index of the next one."""
        strips = _strips(problem, config)
        tiles = strips * STRIP // config.block_q
        tile = config.block_q * (problem.head_dim + 2) * 4 + (128 if problem.deterministic else 0)
        used = 128 + tiles * tile + problem.sink * strips * 4
        if config.persistent:
            used += _items(problem, config) * ITEM_BYTES + 16 * problem.batch * problem.kv_heads
        return before_mask(problem, config, used)

    def boxes(self, config: Fa3BackwardConfig) -> dict[str, Box]:
        """A tile of queries, and the keys or values of one consumer."""
        queries, keys = Box(config.block_q), Box(WARPGROUP_KEYS)
        return {"dout": queries, "q": queries, "k": keys, "v": keys}

    def choose(
        self, problem: Problem, fitting: tuple[Fa3BackwardConfig, ...], device: Device
    ) -> Fa3BackwardConfig:
        """A thread block per key block if key blocks take long or are few, or if head batches are small; else
        persistent blocks, if they serve."""
        each = fitting[0]
        long = _queries_of_key(problem) > _QUERIES_OF_LONG_ITEM
        few = _items(problem, each) < (_LONG_ITEMS_PER_SM if long else _ITEMS_PER_SM) * device.num_sms
        if few or _takes_long(problem) or key_order.has_small_head_batches(problem, device):
            return each
        return next((x for x in fitting if x.persistent), each)

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        return reasons_of_order(problem)

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa3BackwardConfig) -> Order:
        if key_order.has_head_batches(problem):
            small = key_order.has_small_head_batches(problem, device) and not config.persistent
            return key_order.key_blocks_in_batches(problem, schedule, small, config.cluster)
        return key_order.key_blocks(problem, schedule)

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        return {
            "DETERMINISTIC": problem.deterministic, "WHOLE_TILES": True, **gradient_elements(problem),
        }  # fmt: skip

    def most_listed_queries(self, head_dim: int) -> int:
        config = next((x for x in self.configs if x.fits(head_dim)), self.configs[0])
        return listed_tiles(config) * config.block_q
