"""fa2_backward: gradients for GPUs from sm_80 on."""

from __future__ import annotations

import dataclasses
import math

from ...gpu.architectures import Device
from ...problem.problem import MASK_KINDS, Problem
from ...schedule import key_order
from ...schedule.order import Order, makespan
from ...schedule.schedule import Schedule
from ..base import Kernel
from ..config import Buffer, Launch, Split, TileConfig, align_up, ceil_div, tile_pitch

STRIP = 16
"""Query rows that a warp of the prepare and convert passes takes: the rows of one accumulator of mma.sync."""

PASS_WARPS = 4


@dataclasses.dataclass(frozen=True)
class BackwardConfig(TileConfig):
    """Tiles of the backward: a thread block keeps its keys and visits query tiles."""

    warp_keys: int = 32
    """Keys of a warp; warps that get no keys of their own split queries and columns with one another."""

    @property
    def shared_keys(self) -> bool:
        """Several warps have the same keys, and exchange P through shared memory."""
        return self.num_warps * self.warp_keys > self.block_kv


def _strips(problem: Problem) -> int:
    return problem.query_blocks(STRIP) * problem.heads


def listed_tickets(problem: Problem, config: TileConfig) -> tuple[int, int]:
    """``ListedTickets`` of backward/common/listed_tickets.cuh: (query tiles of all heads of the mask, bytes). (0, 0) if
    the addition order follows from the band."""
    if not key_order.has_listed_tickets(problem):
        return 0, 0
    heads, sizes = problem.batch, {x: n for x, n in problem.mask_params.items() if isinstance(n, int)}
    if problem.mask_kind != "sets":
        heads = heads if problem.lengths.ragged else sizes["sequences"]
        heads *= min(sizes["heads"], problem.kv_heads)
    tiles = heads * ceil_div(problem.seqlen_q, config.block_q)
    return tiles, align_up(4 * tiles * ceil_div(problem.seqlen_k, config.block_kv), 16)


_SUM_BYTES = 80  # SUM_BYTES of backward/common/exact_sums.cuh


def before_mask(problem: Problem, config: TileConfig, used: int) -> int:
    """Bytes of the workspace before the mask's part: ``used``; in a fixed order also exact sums for the gradients of
    arrays, and tickets."""
    score, (_, listed) = problem.score, listed_tickets(problem, config)
    sums = 0
    if problem.deterministic and score is not None:
        elements = sum(math.prod(score.shapes[score.place_of(name)]) for name in score.gradients)
        sums = elements * _SUM_BYTES
    return align_up(used, 16) + sums + listed if sums + listed else used


def reasons_of_order(problem: Problem) -> tuple[str, ...]:
    """For a printed plan."""
    if not (problem.deterministic and problem.score is not None and problem.score.gradients):
        return ()
    return (f"gradients of arrays: exact sums, {_SUM_BYTES} bytes of workspace for each element",)


def gradient_elements(problem: Problem) -> dict[str, bool]:
    """The choices of every backward kernel about the elements of its results."""
    return {f"FLOAT32_{x.upper()}": x[:2] in problem.float32_gradients for x in ("dq", "dkv")}


def prepare_launches(name: str, problem: Problem, config: TileConfig, blocks: int) -> tuple[Launch, ...]:
    """The prepare pass; and, if it lists tickets, its second launch, in a grid of two layers."""
    threads, (tiles, _) = PASS_WARPS * 32, listed_tickets(problem, config)
    prepare = Launch(name, (blocks, 1, 1), threads, 0)
    return (prepare, *[Launch(name, (ceil_div(tiles, 2 * PASS_WARPS), 2, 1), threads, 0)] * (tiles > 0))


def _tiling(config: BackwardConfig) -> tuple[int, ...]:
    return config.block_q, config.num_warps, config.num_stages, config.warp_keys, config.block_kv


#: Time of a tile with half of the keys, in whole tiles (H200, head dim 128: 0.57 where all SMs are busy, 0.67 where few
#: are). Second: time of a block besides its tiles, in whole tiles.
_HALF_TILE, _BLOCK_COST = 0.67, 2.0


def _span(problem: Problem, config: BackwardConfig, whole: BackwardConfig, num_sms: int) -> float:
    """When the last block ends, in tiles of ``whole``."""
    schedule = Schedule.of(problem, config.block_q, config.block_kv, skip_masked_tiles=True)
    blocks = key_order.key_blocks(problem, schedule)
    tile = 1.0 if config == whole else _HALF_TILE
    costs = blocks.tiles(schedule) * problem.group_size * tile + _BLOCK_COST
    return makespan(blocks, costs, num_sms * config.blocks_per_sm)


class Fa2Backward(Kernel):
    name = "fa2_backward"
    algorithm = "fa2"
    title = "FlashAttention-2 backward, 16-bit tensor cores"
    paper = "Dao 2023, FlashAttention-2, Algorithm 2"
    source = "backward/fa2/kernel.cu"
    entry = "fa2_backward"
    operation = "backward"
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    masks = MASK_KINDS
    options: tuple[str, ...] = (
        "padded", "packed", "alibi", "sink", "deterministic", "score", "gradients", "dropout", "float32 gradients",
    )  # fmt: skip
    options_with_irregular_masks: tuple[str, ...] = options
    any_v_dim = True
    skip_masked_tiles = True
    configs: tuple[BackwardConfig, ...] = (
        # An SM with 228 KiB: the next query tile is copied while one is computed.
        BackwardConfig(64, 128, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=64),
        BackwardConfig(64, 128, num_warps=8, num_stages=2, min_head_dim=72, max_head_dim=128),
        BackwardConfig(64, 64, num_warps=8, num_stages=2, min_head_dim=72),
        # 164 KiB: one query tile.
        BackwardConfig(64, 128, num_warps=4, blocks_per_sm=2, max_head_dim=64),
        BackwardConfig(64, 128, num_warps=8, min_head_dim=72, max_head_dim=128),
        BackwardConfig(64, 64, num_warps=8, min_head_dim=136),
        # 100 KiB (sm_86, sm_89, sm_120): one query tile.
        BackwardConfig(64, 128, num_warps=8, max_head_dim=64),
        BackwardConfig(64, 64, num_warps=8, min_head_dim=72, max_head_dim=128),
        BackwardConfig(32, 32, num_warps=4, min_head_dim=136, warp_keys=16),
    )
    workspace_holds = "dQ in float32, which all key blocks add to, and lse and delta of each query"

    def shared_memory(self, config: BackwardConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """K and V (later dK and dV); stages of Q, dO, LSE and delta; P^T if warps exchange it; stages of dS^T."""
        pitch, v_pitch, s_pitch = (
            tile_pitch(n, itemsize=2, pad_to=32) for n in (head_dim, v_dim or head_dim, config.block_q)
        )
        queries = config.num_stages * config.block_q
        return (
            Buffer("K", config.block_kv * pitch),
            Buffer("V", config.block_kv * v_pitch),
            Buffer("Q", queries * pitch),
            Buffer("DO", queries * v_pitch),
            Buffer("ROWS", queries * 8),
            Buffer("P", config.block_kv * s_pitch if config.shared_keys else 0),
            Buffer("DS", config.num_stages * config.block_kv * s_pitch),
        )

    def launches(
        self, problem: Problem, config: BackwardConfig, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per key block and key/value head, between two passes over the queries."""
        passes = ceil_div(_strips(problem), PASS_WARPS)
        key_blocks = problem.key_blocks(config.block_kv) * problem.kv_heads
        return (
            *prepare_launches(f"{self.name}_prepare", problem, config, passes),
            Launch(self.name, (key_blocks, 1, 1), config.num_warps * 32, shared_memory),
            Launch(f"{self.name}_convert", (passes, 1, 1), PASS_WARPS * 32, 0),
        )

    def workspace(self, problem: Problem, config: BackwardConfig, split: Split | None = None) -> int:
        """``BackwardWorkspace`` of backward/common/workspace.cuh: dQ in float32, in whole strips; LSE and delta of each
        query; where the order is fixed, a counter for each query tile; with a sink, a float for each strip."""
        batch, _, rows, _ = problem.shapes[0]
        counters = problem.query_blocks(config.block_q) * problem.heads if problem.deterministic else 0
        numbers = batch * problem.heads * rows * 8 + (counters + problem.sink * _strips(problem)) * 4
        return before_mask(problem, config, _strips(problem) * STRIP * problem.head_dim * 4 + numbers)

    def choose(self, problem: Problem, fitting: tuple[BackwardConfig, ...], device: Device) -> BackwardConfig:
        """The first config of which an SM holds ``blocks_per_sm`` blocks; or the same with half of the keys, if few
        blocks of unequal length would leave SMs idle."""
        arch = device.arch
        resident = [
            config
            for config in fitting
            if config.blocks_per_sm
            * (self.shared_bytes(config, problem.head_dim, problem.v_dim) + arch.reserved_shared_memory)
            <= arch.shared_memory
        ]
        chosen = resident[0] if resident else fitting[0]
        halves = [x for x in resident if _tiling(x) == (*_tiling(chosen)[:-1], chosen.block_kv // 2)]
        blocks = problem.key_blocks(chosen.block_kv) * problem.kv_heads
        if not halves or chosen.num_stages == 1 or blocks > 2 * device.num_sms or problem.lengths.ragged:
            return chosen
        return min(chosen, halves[0], key=lambda config: _span(problem, config, chosen, device.num_sms))

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        return reasons_of_order(problem)

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: BackwardConfig) -> Order:
        return key_order.key_blocks(problem, schedule)

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        fixed = {"WHOLE_TILES": False, "PERSISTENT": False}
        return {"DETERMINISTIC": problem.deterministic, **fixed, **gradient_elements(problem)}
