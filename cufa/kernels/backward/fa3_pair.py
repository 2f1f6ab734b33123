"""fa3_backward_wide: gradients of wide heads on Hopper."""

from __future__ import annotations

from ..config import Buffer
from .fa3 import Fa3Backward
from .fa3_config import Fa3BackwardConfig, row_stats_and_barriers, tile_config, tiles


class Fa3BackwardWide(Fa3Backward):
    name = "fa3_backward_wide"
    title = "FlashAttention-3 backward of wide heads: TMA, WGMMA, warp specialisation"
    source = "backward/fa3_pair/kernel.cu"
    entry = "fa3_backward_wide"
    options = tuple(x for x in Fa3Backward.options if x != "gradients")
    options_with_irregular_masks = options
    configs = (
        tile_config(64, 128, 2, cluster=2, min_head_dim=136, max_head_dim=192, bulk_add=False),
        tile_config(64, 128, 2, cluster=2, ds_stages=1, min_head_dim=200, bulk_add=False),
    )

    def source_of(self, config: Fa3BackwardConfig) -> str:
        return self.source

    def shared_memory(self, config: Fa3BackwardConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """K and V; rings of Q, dO and dS, with lse and delta of each row; mbarriers. The buffers of dS have two
        more kinds of mbarriers: for P, which lies in them, and for dS that the other block sends."""
        own = (Buffer(f"{name}_FULL", 8 * config.ds_stages, align=8) for name in ("P", "SENT"))
        return (*tiles(config, head_dim, v_dim), *row_stats_and_barriers(config, head_dim), *own)
