"""fa2_backward: gradients for GPUs from sm_80 on."""

from __future__ import annotations

from ..core import order
from ..core.operation import Split
from ..core.problem import Problem
from .config import TileConfig
from .spec import KernelSpec, Launch, ceil_div, tile_pitch


def _fa2_backward_shared_memory(config: TileConfig, head_dim: int) -> int:
    """K and V, ``num_stages`` of Q, dO; P and dS."""
    rows = 2 * config.block_kv + (1 + config.num_stages) * config.block_q
    scores = 2 * config.block_q * tile_pitch(config.block_kv, itemsize=2, pad_to=32)
    return rows * tile_pitch(head_dim, itemsize=2, pad_to=32) + scores


def _fa2_backward_launches(
    problem: Problem, config: TileConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """One block per key block and key/value head, between two passes over the queries."""
    query_blocks = ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    key_blocks = ceil_div(problem.seqlen_k, config.block_kv) * problem.kv_heads * problem.batch
    threads = config.num_warps * 32
    return (
        Launch("fa2_backward_prepare", (query_blocks, 1, 1), threads, 0),
        Launch("fa2_backward", (key_blocks, 1, 1), threads, shared_memory),
        Launch("fa2_backward_convert", (query_blocks, 1, 1), threads, 0),
    )


def _fa2_backward_workspace(problem: Problem, config: TileConfig, split: Split | None = None) -> int:
    """dQ in float32; delta and LSE of each query."""
    queries = problem.batch * problem.heads * problem.seqlen_q
    return queries * (problem.head_dim + 2) * 4


FA2_BACKWARD = KernelSpec(
    name="fa2_backward",
    algorithm="fa2",
    title="FlashAttention-2 backward, 16-bit tensor cores",
    paper="Dao 2023, FlashAttention-2, Algorithm 2",
    source="fa2_backward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        TileConfig(128, 128, num_warps=8, num_stages=2, max_head_dim=64),
        TileConfig(64, 128, num_warps=8, num_stages=2, max_head_dim=128),
        TileConfig(64, 64, num_warps=8),
    ),
    shared_memory=_fa2_backward_shared_memory,
    launches=_fa2_backward_launches,
    workspace=_fa2_backward_workspace,
    workspace_holds="dQ in float32, which the blocks of all keys add to, and two numbers per query",
    skip_masked_tiles=True,
    order=lambda problem, schedule, num_sms: order.key_blocks(problem, schedule),
    operation="backward",
)
