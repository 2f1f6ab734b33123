"""fa2_forward_f32: FlashAttention-2 for float32."""

from __future__ import annotations

from ...plan.operation import Split
from ...problem.problem import MASK_KINDS, Problem
from ...schedule import order
from ..base import KernelSpec, Launch, ceil_div
from ..shared_memory import Buffer, tile_pitch
from .fa2 import Fa2Config
from .mask_blocks import mask_launches


def _fa2_f32_shared_memory(config: Fa2Config, head_dim: int) -> tuple[Buffer, ...]:
    """Q, K and V; each row's gap has room for what the split into pairs needs."""
    pitch, tile = tile_pitch(head_dim, itemsize=4, pad_to=64), config.block_kv
    return Buffer("Q", config.block_q * pitch), Buffer("K", tile * pitch), Buffer("V", tile * pitch)


def _fa2_f32_launches(
    problem: Problem, config: Fa2Config, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """As of fa2_forward."""
    blocks = ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    main = Launch("fa2_forward_f32", (blocks, 1, 1), config.num_warps * 32, shared_memory)
    return (*mask_launches(problem, config), main)


FA2_FORWARD_F32 = KernelSpec(
    name="fa2_forward_f32",
    algorithm="fa2",
    title="FlashAttention-2 forward, float32 as pairs of float16",
    paper="Dao 2023, FlashAttention-2, Algorithm 1; Ootomo and Yokota 2022",
    source="forward/fa2_f32/kernel.cu",
    dtypes=("float32",),
    precisions=("float32", "tf32"),
    configs=(
        Fa2Config(128, 32, num_warps=4, blocks_per_sm=3, max_head_dim=64),
        Fa2Config(128, 32, num_warps=4, blocks_per_sm=2, max_head_dim=128),
        Fa2Config(128, 32, num_warps=8, min_head_dim=136),
        Fa2Config(64, 16, num_warps=4, blocks_per_sm=2, min_head_dim=136),
    ),
    shared_memory=_fa2_f32_shared_memory,
    launches=_fa2_f32_launches,
    masks=MASK_KINDS,
    skip_masked_tiles=True,
    order=lambda problem, schedule, device, config: order.query_blocks(problem, schedule),
)
