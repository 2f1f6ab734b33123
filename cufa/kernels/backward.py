"""fa2_backward: gradients for GPUs from sm_80 on."""

from __future__ import annotations

import dataclasses

from ..core import order
from ..core.operation import Split
from ..core.problem import Problem
from .config import TileConfig
from .shared_memory import Buffer, tile_pitch
from .spec import KernelSpec, Launch, ceil_div


@dataclasses.dataclass(frozen=True)
class Fa2BackwardConfig(TileConfig):
    """Tiles of the backward pass: ``block_kv`` keys stay, ``num_stages`` tiles of ``block_q`` queries pass by."""

    warp_keys: int = 32
    """Keys of one warp. Where there are more warps than that, they share keys and split queries."""


def _fa2_backward_shared_memory(config: Fa2BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; stages of Q and of dO, of the two numbers of each row, and of dS; P where warps share keys. P and dS
    have a row per key."""
    pitch, score_pitch = (tile_pitch(n, itemsize=2, pad_to=32) for n in (head_dim, config.block_q))
    queries, shared = (
        config.num_stages * config.block_q,
        config.num_warps * config.warp_keys > config.block_kv,
    )
    return (
        Buffer("K", config.block_kv * pitch),
        Buffer("V", config.block_kv * pitch),
        Buffer("Q", queries * pitch),
        Buffer("DO", queries * pitch),
        Buffer("ROWS", queries * 8),
        Buffer("P", config.block_kv * score_pitch if shared else 0),
        Buffer("DS", config.num_stages * config.block_kv * score_pitch),
    )


def _fa2_backward_launches(
    problem: Problem, config: Fa2BackwardConfig, shared_memory: int, split: Split | None = None
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


def _fa2_backward_workspace(problem: Problem, config: Fa2BackwardConfig, split: Split | None = None) -> int:
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
        Fa2BackwardConfig(128, 128, num_warps=8, num_stages=2, max_head_dim=64),
        Fa2BackwardConfig(64, 128, num_warps=8, num_stages=2, max_head_dim=128),
        Fa2BackwardConfig(64, 64, num_warps=8),
    ),
    shared_memory=_fa2_backward_shared_memory,
    launches=_fa2_backward_launches,
    workspace=_fa2_backward_workspace,
    workspace_holds="dQ in float32, which the blocks of all keys add to, and two numbers per query",
    skip_masked_tiles=True,
    order=lambda problem, schedule, num_sms: order.key_blocks(problem, schedule),
    operation="backward",
)
