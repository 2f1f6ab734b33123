"""fa1_forward: FlashAttention-1 for float16 and bfloat16."""

from __future__ import annotations

import dataclasses

from ...gpu.architectures import Device
from ...problem.problem import Problem
from ...schedule.order import Order, whole_heads
from ...schedule.schedule import Schedule
from ..base import Kernel
from ..config import Buffer, Launch, Split, TileConfig, ceil_div, tile_pitch


@dataclasses.dataclass(frozen=True)
class Fa1Config(TileConfig):
    """Tiles of FlashAttention-1."""

    @property
    def key_warps(self) -> int:
        """Warps that share rows and split the keys of a block."""
        return 2 if self.block_kv < 64 else 4

    def constants(self, head_dim: int, v_dim: int = 0) -> dict[str, int | bool]:
        return {**super().constants(head_dim), "KEY_WARPS": self.key_warps}


class Fa1Forward(Kernel):
    name = "fa1_forward"
    algorithm = "fa1"
    title = "FlashAttention-1 forward, 16-bit tensor cores"
    paper = "Dao et al. 2022, FlashAttention, Algorithm 1"
    source = "forward/fa1/kernel.cu"
    entry = "fa1_forward"
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    configs: tuple[Fa1Config, ...] = (
        # O crosses device memory once per key block, so the more keys the better: 256, as in the authors' code.
        # (Between these head dims a few registers spill.)
        Fa1Config(64, 256, num_warps=8, min_head_dim=64, max_head_dim=64),
        Fa1Config(64, 256, num_warps=8, min_head_dim=128, max_head_dim=128),
        Fa1Config(32, 128, num_warps=4, min_head_dim=152, max_head_dim=184),
        Fa1Config(32, 128, num_warps=4, min_head_dim=200),
        # The block sweep published for FlashAttention-1.
        Fa1Config(128, 128, num_warps=8, max_head_dim=128),
        Fa1Config(128, 128, num_warps=4, max_head_dim=128),
        Fa1Config(64, 128, num_warps=4, max_head_dim=128),
        Fa1Config(64, 64, num_warps=4),
        Fa1Config(128, 64, num_warps=4, max_head_dim=128),
        Fa1Config(128, 64, num_warps=8, max_head_dim=128),
        # Wide heads where shared memory is short.
        Fa1Config(64, 32, num_warps=4, min_head_dim=136),
        Fa1Config(32, 32, num_warps=2, min_head_dim=136),
    )

    def shared_memory(self, config: Fa1Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """K and V, the warps' parts of P·V, two query blocks, row maxima and sums of each warp."""
        pitch = tile_pitch(head_dim, itemsize=2, pad_to=32)
        # A warp's K and V move to registers where they take no more than 64 of them: more would spill.
        in_registers = head_dim <= 64 and config.block_kv // config.key_warps <= 32
        parts, values = config.num_warps * (config.key_warps - 1) * 2048, config.num_warps * 32 * 4
        return (
            Buffer("K", config.block_kv * pitch),
            Buffer("V", config.block_kv * pitch),
            Buffer("PARTS", parts, over="K" if in_registers else None),
            Buffer("Q", 2 * config.block_q * pitch),
            Buffer("MAX", values),
            Buffer("SUM", values),
        )

    def launches(
        self, problem: Problem, config: Fa1Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per head."""
        blocks = problem.batch * problem.heads
        return (Launch(self.name, (blocks, 1, 1), config.num_warps * 32, shared_memory),)

    def workspace(self, problem: Problem, config: Fa1Config, split: Split | None = None) -> int:
        """O, l and m in float32 between key blocks, for whole query blocks and 16-column tiles."""
        rows = ceil_div(problem.seqlen_q, config.block_q) * config.block_q
        columns = ceil_div(problem.head_dim, 16) * 16
        return problem.batch * problem.heads * rows * (columns + 2) * 4

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa1Config) -> Order:
        return whole_heads(problem, schedule)
