"""fa2_backward_f32: gradients of float32 for GPUs from sm_80 on."""

from __future__ import annotations

from ..config import Buffer, tile_pitch
from .fa2 import BackwardConfig, Fa2Backward


class Fa2BackwardF32(Fa2Backward):
    name = "fa2_backward_f32"
    title = "FlashAttention-2 backward, float32 as pairs of float16"
    paper = "Dao 2023, FlashAttention-2, Algorithm 2; Ootomo and Yokota 2022"
    source = "backward/fa2_f32/kernel.cu"
    entry = "fa2_backward_f32"
    dtypes = ("float32",)
    precisions = ("float32", "tf32")
    options = tuple(x for x in Fa2Backward.options if x != "float32 gradients")
    options_with_irregular_masks = options
    configs = (
        # An SM with 228 KiB.
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=3, max_head_dim=64, warp_keys=16),
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=2, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(32, 64, num_warps=8, min_head_dim=136, warp_keys=16),
        # 164 KiB.
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=2, max_head_dim=64, warp_keys=16),
        BackwardConfig(32, 64, num_warps=8, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(32, 32, num_warps=4, min_head_dim=136, warp_keys=16),
        # 100 KiB (sm_86, sm_89, sm_120).
        BackwardConfig(32, 32, num_warps=4, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(16, 32, num_warps=4, min_head_dim=136, max_head_dim=240, warp_keys=16),
        BackwardConfig(16, 16, num_warps=2, min_head_dim=248, warp_keys=16),
    )

    def shared_memory(self, config: BackwardConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """K, V, Q, dO and two numbers per row; P^T and then dS^T; the largest dS of each warp. The gaps between
        rows of K, V, Q and dO hold the units of their pairs."""
        pitch, v_pitch, s_pitch = (
            tile_pitch(n, itemsize=4, pad_to=64) for n in (head_dim, v_dim or head_dim, config.block_q)
        )
        return (
            Buffer("K", config.block_kv * pitch),
            Buffer("V", config.block_kv * v_pitch),
            Buffer("Q", config.block_q * pitch),
            Buffer("DO", config.block_q * v_pitch),
            Buffer("ROWS", config.block_q * 8),
            Buffer("S", config.block_kv * s_pitch),
            Buffer("LARGEST", config.num_warps * 4),
        )
