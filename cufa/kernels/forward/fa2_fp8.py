"""fa2_forward_fp8: FlashAttention-2 on mma.sync for e4m3 inputs with scales."""

from __future__ import annotations

from ...gpu.architectures import Device
from ...problem.problem import Problem
from ...schedule.order import Order, query_blocks
from ...schedule.schedule import Schedule
from ..config import Buffer, Launch, Split, tile_pitch
from .fa2 import Fa2Config
from .float8 import Float8Kernel


class Fa2ForwardFp8(Float8Kernel):
    name = "fa2_forward_fp8"
    algorithm = "fa2"
    title = "FlashAttention-2 forward in e4m3, 8-bit tensor cores"
    paper = "Dao 2023, FlashAttention-2, Algorithm 1"
    source = "forward/fa2_fp8/kernel.cu"
    entry = "fa2_forward_fp8"
    aligned_rows = True
    min_capability = 89
    # Key tiles as in KEY_TILES. 96 rows: with more, sm_89 and sm_120 lack shared memory from head dim 240 on.
    configs = (
        Fa2Config(64, 160, num_warps=4, blocks_per_sm=3, min_head_dim=16, max_head_dim=64),
        Fa2Config(128, 224, num_warps=8, min_head_dim=80, max_head_dim=128),
        Fa2Config(128, 128, num_warps=8, min_head_dim=144, max_head_dim=224),
        Fa2Config(96, 128, num_warps=6, min_head_dim=240),
    )

    def shared_memory(self, config: Fa2Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q, a tile of K, and a tile of V, transposed."""
        pitch, v_pitch = (tile_pitch(n, itemsize=1, pad_to=32) for n in (head_dim, config.block_kv))
        return (
            Buffer("Q", config.block_q * pitch),
            Buffer("K", config.block_kv * pitch),
            Buffer("V", head_dim * v_pitch),
        )

    def launches(
        self, problem: Problem, config: Fa2Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per query block and head; an earlier launch transposes values in rows."""
        grid = config.query_items(problem), 1, 1
        return self.with_transposition(
            problem, Launch(self.entry, grid, config.num_warps * 32, shared_memory)
        )

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        return {**super().own_constants(problem), "VALUES_IN_ROWS": problem.values_in_rows}

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        remark = (
            ""
            if problem.accumulate in ("auto", "tile")
            else f", as accumulate={problem.accumulate!r} saves nothing"
        )
        return (f"products with V are added after each tile, in float32{remark}",)

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa2Config) -> Order:
        return query_blocks(problem, schedule)
