"""fa2_forward_f32: FlashAttention-2 for float32."""

from __future__ import annotations

from ...gpu.architectures import Device
from ...problem.problem import BAND_KINDS, MASK_KINDS, Problem
from ...schedule.order import Order, query_blocks
from ...schedule.schedule import Schedule
from ..base import Kernel, mask_launches
from ..config import Buffer, Launch, Split, tile_pitch
from .fa2 import Fa2Config


class Fa2ForwardF32(Kernel):
    name = "fa2_forward_f32"
    algorithm = "fa2"
    title = "FlashAttention-2 forward, float32 as pairs of float16"
    paper = "Dao 2023, FlashAttention-2, Algorithm 1; Ootomo and Yokota 2022"
    source = "forward/fa2_f32/kernel.cu"
    entry = "fa2_forward_f32"
    dtypes = ("float32",)
    precisions = ("float32", "tf32")
    masks: tuple[str, ...] = MASK_KINDS
    options: tuple[str, ...] = ("padded", "packed", "alibi", "sink", "score", "dropout")
    options_with_irregular_masks = options
    any_v_dim = True
    skip_masked_tiles = True
    configs = (
        Fa2Config(128, 32, num_warps=4, blocks_per_sm=3, max_head_dim=64),
        Fa2Config(128, 32, num_warps=4, blocks_per_sm=2, max_head_dim=128),
        Fa2Config(128, 32, num_warps=8, min_head_dim=136),
        Fa2Config(64, 16, num_warps=4, blocks_per_sm=2, min_head_dim=136),
    )

    def shared_memory(self, config: Fa2Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q, K and V; the gap after each row has room for the split into pairs."""
        pitch, v_pitch = (tile_pitch(n, itemsize=4, pad_to=64) for n in (head_dim, v_dim or head_dim))
        sizes = {"Q": config.block_q * pitch, "K": config.block_kv * pitch, "V": config.block_kv * v_pitch}
        return tuple(Buffer(name, size) for name, size in sizes.items())

    def launches(
        self, problem: Problem, config: Fa2Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per query block and head; if the mask has runs of rows per key, first their reduction."""
        main = Launch(
            "fa2_forward_f32", (config.query_items(problem), 1, 1), config.num_warps * 32, shared_memory
        )
        return (*mask_launches(problem, config), main)

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa2Config) -> Order:
        return query_blocks(problem, schedule)


class Fa2NoSkipF32(Fa2ForwardF32):
    """The ablation: the same source; masked tiles are computed, and the mask hides their scores."""

    name = "fa2_noskip_f32"
    algorithm = "fa2_noskip"
    title = "FlashAttention-2 forward without skipping of masked tiles, float32 as pairs of float16"
    masks = BAND_KINDS
    options = ("padded", "packed", "alibi", "sink")
    skip_masked_tiles = False
    ablation = True
