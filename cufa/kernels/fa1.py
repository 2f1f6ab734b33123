"""fa1_forward: FlashAttention-1."""

from __future__ import annotations

from ..core import order
from ..core.operation import Split
from ..core.problem import Problem
from .config import TileConfig
from .spec import KernelSpec, Launch, ceil_div, tile_pitch


def _fa1_shared_memory(config: TileConfig, head_dim: int) -> int:
    """K and V, the warps' parts of P·V (over K and V where those move to registers), two query blocks,
    row maxima and sums."""
    pitch = tile_pitch(head_dim, itemsize=2, pad_to=32)
    key_warps = 2 if config.block_kv < 64 else 4
    keys_and_values = 2 * config.block_kv * pitch
    parts = config.num_warps * (key_warps - 1) * 2048
    in_registers = head_dim <= 64 and config.block_kv // key_warps <= 32
    first = max(keys_and_values, parts) if in_registers else keys_and_values + parts
    return first + 2 * config.block_q * pitch + 2 * config.num_warps * 32 * 4


def _fa1_launches(
    problem: Problem, config: TileConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """One block per head."""
    blocks = problem.batch * problem.heads
    return (Launch("fa1_forward", (blocks, 1, 1), config.num_warps * 32, shared_memory),)


def _fa1_workspace(problem: Problem, config: TileConfig, split: Split | None = None) -> int:
    """O, l and m in float32 between key blocks, for whole query blocks and 16-column tiles."""
    rows = ceil_div(problem.seqlen_q, config.block_q) * config.block_q
    columns = ceil_div(problem.head_dim, 16) * 16
    return problem.batch * problem.heads * rows * (columns + 2) * 4


FA1_FORWARD = KernelSpec(
    name="fa1_forward",
    algorithm="fa1",
    title="FlashAttention-1 forward, 16-bit tensor cores",
    paper="Dao et al. 2022, FlashAttention, Algorithm 1",
    source="fa1_forward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        # O crosses device memory once per key block, so the more keys the better: 256, as in the authors' own.
        # (Between these head dims a few registers spill.)
        TileConfig(64, 256, num_warps=8, min_head_dim=64, max_head_dim=64),
        TileConfig(64, 256, num_warps=8, min_head_dim=128, max_head_dim=128),
        TileConfig(32, 128, num_warps=4, min_head_dim=152, max_head_dim=184),
        TileConfig(32, 128, num_warps=4, min_head_dim=200),
        # The block sweep published for FlashAttention-1.
        TileConfig(128, 128, num_warps=8, max_head_dim=128),
        TileConfig(128, 128, num_warps=4, max_head_dim=128),
        TileConfig(64, 128, num_warps=4, max_head_dim=128),
        TileConfig(64, 64, num_warps=4),
        TileConfig(128, 64, num_warps=4, max_head_dim=128),
        TileConfig(128, 64, num_warps=8, max_head_dim=128),
        # Wide heads where shared memory is short.
        TileConfig(64, 32, num_warps=4, min_head_dim=136),
        TileConfig(32, 32, num_warps=2, min_head_dim=136),
    ),
    shared_memory=_fa1_shared_memory,
    launches=_fa1_launches,
    workspace=_fa1_workspace,
    order=lambda problem, schedule, num_sms: order.whole_heads(problem, schedule),
)
