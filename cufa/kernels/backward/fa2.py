"""fa2_backward: gradients for GPUs from sm_80 on."""

from __future__ import annotations

import dataclasses

from ...gpu.architectures import Device
from ...plan.operation import Split
from ...problem.lengths import LENGTH_KINDS
from ...problem.problem import MASK_KINDS, Problem
from ...schedule import key_order
from ...schedule.order import makespan
from ...schedule.schedule import Schedule
from ..base import KernelSpec, Launch, ceil_div
from ..config import TileConfig
from ..shared_memory import Buffer, tile_pitch

STRIP = 16
"""Query rows that a warp of the passes before and after takes: those of one accumulator of mma.sync."""

PASS_WARPS = 4


@dataclasses.dataclass(frozen=True)
class BackwardConfig(TileConfig):
    """Tiles of the backward: a thread block keeps its keys and visits query tiles."""

    warp_keys: int = 32
    """Keys of a warp; warps beyond those that share out the keys split queries and columns with one another."""

    @property
    def shared_keys(self) -> bool:
        """Several warps have the same keys, and exchange P through shared memory."""
        return self.num_warps * self.warp_keys > self.block_kv


def _backward_shared_memory(config: BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V (later dK and dV); stages of Q, dO and two numbers per row; P^T where warps exchange it, and stages of
    dS^T."""
    pitch, s_pitch = (tile_pitch(n, itemsize=2, pad_to=32) for n in (head_dim, config.block_q))
    queries = config.num_stages * config.block_q
    return (
        Buffer("K", config.block_kv * pitch),
        Buffer("V", config.block_kv * pitch),
        Buffer("Q", queries * pitch),
        Buffer("DO", queries * pitch),
        Buffer("ROWS", queries * 8),
        Buffer("P", config.block_kv * s_pitch if config.shared_keys else 0),
        Buffer("DS", config.num_stages * config.block_kv * s_pitch),
    )


def _strips(problem: Problem) -> int:
    return problem.query_blocks(STRIP) * problem.heads


def _backward_launches(
    problem: Problem, config: BackwardConfig, shared_memory: int, split: Split | None = None
) -> tuple[Launch, ...]:
    """One block per key block and key/value head, between two passes over the queries."""
    name = "fa2_backward_f32" if problem.dtype == "float32" else "fa2_backward"
    passes = (ceil_div(_strips(problem), PASS_WARPS), 1, 1)
    key_blocks = problem.key_blocks(config.block_kv) * problem.kv_heads
    return (
        Launch(f"{name}_prepare", passes, PASS_WARPS * 32, 0),
        Launch(name, (key_blocks, 1, 1), config.num_warps * 32, shared_memory),
        Launch(f"{name}_convert", passes, PASS_WARPS * 32, 0),
    )


def _backward_workspace(problem: Problem, config: BackwardConfig, split: Split | None = None) -> int:
    """``BackwardWorkspace`` of backward_workspace.cuh: dQ in float32, in whole strips; LSE and delta of each query;
    where the order is fixed, a counter for each query tile; with a sink, a number for each strip."""
    batch, _, rows, _ = problem.shapes[0]
    counters = problem.query_blocks(config.block_q) * problem.heads if problem.deterministic else 0
    numbers = batch * problem.heads * rows * 8 + (counters + problem.sink * _strips(problem)) * 4
    return _strips(problem) * STRIP * problem.head_dim * 4 + numbers


def _f32_shared_memory(config: BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K, V, Q, dO and two numbers per row; P^T and then dS^T; the largest dS of each warp. What is split into pairs
    has room in each row's gap for its unit."""
    pitch, s_pitch = (tile_pitch(n, itemsize=4, pad_to=64) for n in (head_dim, config.block_q))
    return (
        Buffer("K", config.block_kv * pitch),
        Buffer("V", config.block_kv * pitch),
        Buffer("Q", config.block_q * pitch),
        Buffer("DO", config.block_q * pitch),
        Buffer("ROWS", config.block_q * 8),
        Buffer("S", config.block_kv * s_pitch),
        Buffer("LARGEST", config.num_warps * 4),
    )


def _backward_choose(problem: Problem, fitting: tuple[BackwardConfig, ...], device: Device) -> BackwardConfig:
    """The first of which an SM holds as many blocks as it is built for, or the same with half of the keys where so few
    blocks of unequal length leave SMs idle."""
    arch = device.arch
    spec = FA2_BACKWARD_F32 if problem.dtype == "float32" else FA2_BACKWARD
    held = [
        config
        for config in fitting
        if config.blocks_per_sm * (spec.shared_bytes(config, problem.head_dim) + arch.reserved_shared_memory)
        <= arch.shared_memory
    ]
    chosen = held[0] if held else fitting[0]
    halves = [x for x in held if _tiling(x) == (*_tiling(chosen)[:-1], chosen.block_kv // 2)]
    blocks = problem.key_blocks(chosen.block_kv) * problem.kv_heads
    if not halves or chosen.num_stages == 1 or blocks > 2 * device.num_sms or problem.lengths.ragged:
        return chosen
    return min(chosen, halves[0], key=lambda config: _span(problem, config, chosen, device.num_sms))


def _tiling(config: BackwardConfig) -> tuple[int, ...]:
    return config.block_q, config.num_warps, config.num_stages, config.warp_keys, config.block_kv


#: Of the time of a tile of query rows and keys what one with half of the keys takes (H200, head dim 128: 0.57 where all
#: SMs are busy, 0.67 where few are), and what a block takes besides its tiles.
_HALF_TILE, _BLOCK_COST = 0.67, 2.0


def _span(problem: Problem, config: BackwardConfig, whole: BackwardConfig, num_sms: int) -> float:
    """When the last block ends, in tiles of ``whole``."""
    schedule = Schedule.of(problem, config.block_q, config.block_kv, skip_masked_tiles=True)
    blocks = key_order.key_blocks(problem, schedule)
    tile = 1.0 if config == whole else _HALF_TILE
    costs = blocks.tiles(schedule) * problem.group_size * tile + _BLOCK_COST
    return makespan(blocks, costs, num_sms * config.blocks_per_sm)


FA2_BACKWARD = KernelSpec(
    name="fa2_backward",
    algorithm="fa2",
    title="FlashAttention-2 backward, 16-bit tensor cores",
    paper="Dao 2023, FlashAttention-2, Algorithm 2",
    source="backward/fa2/kernel.cu",
    dtypes=("float16", "bfloat16"),
    precisions=("native",),
    configs=(
        # An SM with 228 KiB: the next query tile is copied while one is computed.
        BackwardConfig(64, 128, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=64),
        BackwardConfig(64, 128, num_warps=8, num_stages=2, min_head_dim=72, max_head_dim=128),
        BackwardConfig(64, 64, num_warps=8, num_stages=2, min_head_dim=72),
        # 164 KiB.
        BackwardConfig(64, 128, num_warps=4, blocks_per_sm=2, max_head_dim=64),
        BackwardConfig(64, 128, num_warps=8, min_head_dim=72, max_head_dim=128),
        BackwardConfig(64, 64, num_warps=8, min_head_dim=136),
        # 100 KiB (sm_86, sm_89, sm_120).
        BackwardConfig(64, 128, num_warps=8, max_head_dim=64),
        BackwardConfig(64, 64, num_warps=8, min_head_dim=72, max_head_dim=128),
        BackwardConfig(32, 32, num_warps=4, min_head_dim=136, warp_keys=16),
    ),
    shared_memory=_backward_shared_memory,
    launches=_backward_launches,
    workspace=_backward_workspace,
    workspace_holds="dQ in float32, which the blocks of all keys add to, and two numbers per query",
    masks=MASK_KINDS,
    skip_masked_tiles=True,
    choose=_backward_choose,
    order=lambda problem, schedule, device, config: key_order.key_blocks(problem, schedule),
    operation="backward",
    further_constants=lambda problem: {
        "DETERMINISTIC": problem.deterministic,
        "WHOLE_TILES": False,
        "PERSISTENT": False,
    },
    lengths=LENGTH_KINDS,
    score_changes=("alibi", "sink"),
)

FA2_BACKWARD_F32 = dataclasses.replace(
    FA2_BACKWARD,
    name="fa2_backward_f32",
    title="FlashAttention-2 backward, float32 as pairs of float16",
    paper="Dao 2023, FlashAttention-2, Algorithm 2; Ootomo and Yokota 2022",
    source="backward/fa2_f32/kernel.cu",
    dtypes=("float32",),
    precisions=("float32", "tf32"),
    configs=(
        # An SM with 228 KiB.
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=3, max_head_dim=64, warp_keys=16),
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=2, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(32, 64, num_warps=8, min_head_dim=136, warp_keys=16),
        # 164 KiB.
        BackwardConfig(32, 64, num_warps=4, blocks_per_sm=2, max_head_dim=64, warp_keys=16),
        BackwardConfig(32, 64, num_warps=8, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(32, 32, num_warps=4, min_head_dim=136, warp_keys=16),
        # 100 KiB (sm_86, sm_89, sm_120).
        BackwardConfig(32, 32, num_warps=4, min_head_dim=72, max_head_dim=128, warp_keys=16),
        BackwardConfig(16, 32, num_warps=4, min_head_dim=136, max_head_dim=240, warp_keys=16),
        BackwardConfig(16, 16, num_warps=2, min_head_dim=248, warp_keys=16),
    ),
    shared_memory=_f32_shared_memory,
    lengths=("dense",),
    score_changes=(),
)
