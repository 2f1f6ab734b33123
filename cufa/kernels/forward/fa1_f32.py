"""fa1_forward_f32: FlashAttention-1 for float32."""

from __future__ import annotations

from ..config import Buffer, tile_pitch
from .fa1 import Fa1Config, Fa1Forward


class Fa1ForwardF32(Fa1Forward):
    name = "fa1_forward_f32"
    title = "FlashAttention-1 forward, float32 as pairs of float16"
    paper = "Dao et al. 2022, FlashAttention, Algorithm 1; Ootomo and Yokota 2022"
    source = "forward/fa1_f32/kernel.cu"
    entry = "fa1_forward_f32"
    dtypes = ("float32",)
    precisions = ("float32", "tf32")
    configs = (
        # The block sweep published for FlashAttention-1.
        Fa1Config(128, 128, num_warps=8, max_head_dim=64),
        Fa1Config(64, 128, num_warps=4, max_head_dim=64),
        Fa1Config(128, 128, num_warps=4, max_head_dim=64),
        Fa1Config(128, 64, num_warps=8, max_head_dim=64),
        Fa1Config(128, 64, num_warps=4, max_head_dim=64),
        Fa1Config(64, 64, num_warps=4, max_head_dim=248),
        # For little shared memory, and for head dims at which wider tiles would spill registers.
        Fa1Config(64, 32, num_warps=4, min_head_dim=72),
        Fa1Config(32, 32, num_warps=2, min_head_dim=136),
    )

    def shared_memory(self, config: Fa1Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """K, V and one query block, the warps' parts of P·V, row maxima and sums of each warp."""
        pitch = tile_pitch(head_dim, itemsize=4, pad_to=64)
        parts, values = config.num_warps * (config.key_warps - 1) * 2048, config.num_warps * 32 * 4
        # If a block has one strip of queries, the parts overwrite Q once the scores exist.
        return (
            Buffer("K", config.block_kv * pitch),
            Buffer("V", config.block_kv * pitch),
            Buffer("Q", config.block_q * pitch),
            Buffer("PARTS", parts, over="Q" if config.block_q == 32 else None),
            Buffer("MAX", values),
            Buffer("SUM", values),
        )
