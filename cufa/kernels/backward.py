"""fa2_backward: gradients for float16 and bfloat16 on GPUs from sm_80 on."""

from __future__ import annotations

import dataclasses

from ..core import order
from ..core.operation import Split
from ..core.problem import Problem
from .config import TileConfig
from .shared_memory import Buffer, tile_pitch
from .spec import KernelSpec, Launch, ceil_div

_STRIP = 16
"""Rows of dQ that lie together in the workspace, and that a warp of the passes before and after takes."""
_PASS_THREADS = 128


@dataclasses.dataclass(frozen=True)
class BackwardConfig(TileConfig):
    """Tiles of the backward: queries and keys of one, as in the forward."""

    warp_keys: int = 16
    """Keys whose gradients a warp keeps; where that leaves more warps than keys, so many share them."""

    in_text = ("warp_keys",)

    @property
    def warps_text(self) -> str:
        return super().warps_text + (f" of {self.warp_keys} keys" if self.num_warps else "")


def _shared_memory(config: BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; stages of Q, dO and their row numbers; Pᵀ where warps share keys, and dSᵀ of each stage."""
    pitch, s_pitch = (tile_pitch(n, itemsize=2, pad_to=32) for n in (head_dim, config.block_q))
    shares_keys = config.num_warps * config.warp_keys > config.block_kv
    queries = config.num_stages * config.block_q
    return (
        Buffer("K", config.block_kv * pitch),
        Buffer("V", config.block_kv * pitch),
        Buffer("Q", queries * pitch),
        Buffer("DO", queries * pitch),
        Buffer("ROWS", queries * 8),
        Buffer("P", config.block_kv * s_pitch if shares_keys else 0),
        Buffer("DS", config.num_stages * config.block_kv * s_pitch),
    )


def _strips(problem: Problem) -> int:
    return problem.batch * problem.heads * ceil_div(problem.seqlen_q, _STRIP)


def _launches(
    problem: Problem, config: BackwardConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """One block per key block and key/value head, between two passes over the queries."""
    passes = (ceil_div(_strips(problem), _PASS_THREADS // 32), 1, 1)
    key_blocks = ceil_div(problem.seqlen_k, config.block_kv) * problem.kv_heads * problem.batch
    return (
        Launch("fa2_backward_prepare", passes, _PASS_THREADS, 0),
        Launch("fa2_backward", (key_blocks, 1, 1), config.num_warps * 32, shared_memory),
        Launch("fa2_backward_convert", passes, _PASS_THREADS, 0),
    )


def _workspace(problem: Problem, config: BackwardConfig, split: Split | None = None) -> int:
    """dQ in float32, two numbers per query, and where the order of sums is fixed whose turn it is per query tile:
    ``BackwardWorkspace`` of backward_workspace.cuh."""
    heads = problem.batch * problem.heads
    turns = heads * ceil_div(problem.seqlen_q, config.block_q) if problem.deterministic else 0
    return 4 * (_strips(problem) * _STRIP * problem.head_dim + 2 * heads * problem.seqlen_q + turns)


FA2_BACKWARD = KernelSpec(
    name="fa2_backward",
    algorithm="fa2",
    title="FlashAttention-2 backward, 16-bit tensor cores",
    paper="Dao 2023, FlashAttention-2, Algorithm 2",
    source="fa2_backward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        BackwardConfig(128, 128, num_warps=8, num_stages=2, max_head_dim=64, warp_keys=32),
        BackwardConfig(64, 128, num_warps=8, num_stages=2, min_head_dim=72, max_head_dim=128),
        BackwardConfig(64, 128, num_warps=8, max_head_dim=128),
        BackwardConfig(64, 64, num_warps=8),
        BackwardConfig(32, 32, num_warps=4),
    ),
    shared_memory=_shared_memory,
    launches=_launches,
    workspace=_workspace,
    workspace_holds="dQ in float32, which the blocks of all keys add to, and two numbers per query",
    skip_masked_tiles=True,
    order=lambda problem, schedule, num_sms: order.key_blocks(problem, schedule),
    operation="backward",
    further_constants=lambda problem: {"DETERMINISTIC": problem.deterministic},
)
