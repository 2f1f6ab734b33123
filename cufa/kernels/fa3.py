"""fa3_forward: FlashAttention-3 on Hopper."""

from __future__ import annotations

from ..problem import Problem
from .spec import KernelSpec, Launch, TileConfig, ceil_div


def _fa3_shared_memory(config: TileConfig, head_dim: int) -> int:
    """Q of each consumer warpgroup, the K and V rings, a full and an empty barrier for each buffer, four
    items."""
    row = ceil_div(head_dim, 64) * 128
    consumers, q_stages = config.num_warps // 4 - 1, dict(config.switches)["Q_STAGES"]
    buffers = q_stages * consumers + 2 * config.num_stages
    tiles = (q_stages * config.block_q + 2 * config.num_stages * config.block_kv) * row
    return tiles + buffers * 16 + 4 * 16


def _fa3_launches(problem: Problem, config: TileConfig, shared_memory: int) -> tuple[Launch, ...]:
    """Persistent blocks that share out query blocks and heads."""
    items = ceil_div(problem.seqlen_q, config.block_q) * problem.heads * problem.batch
    return (Launch("fa3_forward", (items, 1, 1), config.num_warps * 32, shared_memory, persistent=True),)


def _fa3_config(
    block_q: int, block_kv: int, num_stages: int, *, q_stages: int, min_head_dim: int, max_head_dim: int
) -> TileConfig:
    """A producer and block_q / 64 consumer warpgroups. One Q buffer goes with Q kept in registers, or with
    tiles that leave no room for two."""
    in_registers = q_stages == 1 and max_head_dim <= 128
    return TileConfig(
        block_q,
        block_kv,
        num_warps=4 * (block_q // 64 + 1),
        num_stages=num_stages,
        min_head_dim=min_head_dim,
        max_head_dim=max_head_dim,
        switches=(
            ("Q_STAGES", q_stages),
            ("Q_IN_REGISTERS", in_registers),
            ("PING_PONG", True),
            ("OVERLAP", True),
            ("STORE_BY_TMA", True),
        ),
    )


_FA3_WIDE = _fa3_config(192, 128, 3, q_stages=2, min_head_dim=8, max_head_dim=64)
_FA3_SQUARE = _fa3_config(128, 128, 3, q_stages=1, min_head_dim=8, max_head_dim=128)
_FA3_LONG = _fa3_config(192, 80, 2, q_stages=2, min_head_dim=72, max_head_dim=128)
_FA3_DEEP = _fa3_config(128, 80, 2, q_stages=1, min_head_dim=136, max_head_dim=256)


def _choose_fa3(problem: Problem, fitting: tuple[TileConfig, ...]) -> TileConfig:
    """Measured on an H200 (records): long sequences gain from wide query blocks, which read K and V less often
    and skip by the warpgroup; causal ones only when they are longer still, as their items are more uneven."""
    if problem.seqlen_k >= (8192 if problem.causal else 2048) and _FA3_LONG in fitting:
        return _FA3_LONG
    return fitting[0]


FA3_FORWARD = KernelSpec(
    name="fa3_forward",
    algorithm="fa3",
    title="FlashAttention-3 forward: TMA, WGMMA, warp specialisation",
    paper="Shah et al. 2024, FlashAttention-3, Algorithms 1 and 2",
    source="fa3_forward.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(_FA3_WIDE, _FA3_SQUARE, _FA3_LONG, _FA3_DEEP),
    shared_memory=_fa3_shared_memory,
    launches=_fa3_launches,
    skip_masked_tiles=True,
    min_capability=90,
    max_capability=90,
    tensor_map_rows=lambda config: (64, config.block_kv, config.block_kv, 16),
    choose=_choose_fa3,
)
