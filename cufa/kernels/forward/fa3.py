"""fa3_forward: FlashAttention-3 on Hopper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ...gpu.architectures import Device
from ...problem.problem import MASK_KINDS, MAX_HEAD_DIM, Problem
from ...schedule.order import ALIKE, ITEM_COST, Order, persistent
from ...schedule.schedule import Schedule
from ..base import ForwardKernel
from ..config import Box, Buffer, Launch, Split, SplitConfig, align_up, ceil_div
from .fa2 import Fa2Forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fa3Config(SplitConfig):
    """Tiles of FlashAttention-3: 64 query rows for each consumer warpgroup, and a producer."""

    q_stages: int
    """Buffers of Q for each consumer. With two, Q of the next work item is loaded while Q of the current one is in
    use."""
    q_in_registers: bool
    ping_pong: bool
    """Consumers issue their products in alternating ping-pong slots."""
    store_by_tma: bool
    """O is stored by TMA from the buffer of its Q, if that buffer is free."""
    max_v_dim: int = MAX_HEAD_DIM
    """Larger head dims of v do not fit."""

    def fits(self, head_dim: int, v_dim: int = 0) -> bool:
        return super().fits(head_dim, v_dim) and (v_dim or head_dim) <= self.max_v_dim

    def serves_cache(self, head_dim: int) -> bool:
        """Tiles of one number of keys, so that the bits of a sequence do not depend on other sequences."""
        return self.block_kv == (128 if head_dim <= 128 else 112 if head_dim <= 192 else 80)

    @property
    def warps_text(self) -> str:
        """Says so if two or more consumers do not use ping-pong slots."""
        return super().warps_text + ("" if self.ping_pong or self.block_q <= 64 else ", without ping-pong")


def _fa3_config(
    block_q: int, block_kv: int, num_stages: int, *, q_stages: int, min_head_dim: int, max_head_dim: int,
    ping_pong: bool = True, max_v_dim: int = MAX_HEAD_DIM,
) -> Fa3Config:  # fmt: skip
    """A producer and block_q / 64 consumer warpgroups. One Q buffer goes with Q kept in registers, or with
    tiles that leave no room for two."""
    return Fa3Config(
        block_q, block_kv, num_warps=4 * (block_q // 64 + 1), num_stages=num_stages,
        min_head_dim=min_head_dim, max_head_dim=max_head_dim, q_stages=q_stages,
        q_in_registers=q_stages == 1 and max_head_dim <= 128, ping_pong=ping_pong and block_q > 64,
        store_by_tma=True, max_v_dim=max_v_dim,
    )  # fmt: skip


_LONG, _SHORT = 8192, 1024

#: Tilings, and the time each takes for a score when all SMs are busy (H200, relative to the best of its head
#: dims): with items of equal length; with items of every length; with items from 8k keys on, where wide items are
#: no longer too uneven; with items of up to 1k keys, where waiting for a ping-pong slot is no longer hidden.
_SLOWNESS = {
    _fa3_config(192, 128, 3, q_stages=2, min_head_dim=8, max_head_dim=64): (1.0, 1.0, 1.0, 1.0),
    _fa3_config(256, 64, 4, q_stages=2, min_head_dim=8, max_head_dim=64): (1.02, 1.0, 1.0, 1.0),
    _fa3_config(256, 64, 4, q_stages=2, min_head_dim=8, max_head_dim=64, ping_pong=False): (
        1.09,
        1.0,
        1.03,
        0.97,
    ),
    _fa3_config(128, 128, 4, q_stages=1, min_head_dim=8, max_head_dim=64): (1.18, 1.12, 1.25, 1.12),
    _fa3_config(64, 128, 4, q_stages=1, min_head_dim=8, max_head_dim=64): (1.57, 1.5, 1.5, 1.5),
    _fa3_config(128, 128, 3, q_stages=1, min_head_dim=72, max_head_dim=128): (1.0, 1.0, 1.0, 1.0),
    _fa3_config(192, 96, 2, q_stages=2, min_head_dim=72, max_head_dim=96): (0.92, 1.0, 0.93, 1.08),
    _fa3_config(192, 64, 3, q_stages=2, min_head_dim=104, max_head_dim=128): (0.94, 1.1, 0.94, 1.14),
    _fa3_config(64, 128, 3, q_stages=1, min_head_dim=72, max_head_dim=128): (1.4, 1.4, 1.4, 1.4),
    _fa3_config(128, 112, 2, q_stages=1, min_head_dim=136, max_head_dim=192): (1.0, 1.0, 1.0, 1.0),
    _fa3_config(128, 80, 2, q_stages=1, min_head_dim=200, max_head_dim=256): (1.0, 1.0, 1.0, 1.0),
    _fa3_config(64, 80, 2, q_stages=2, min_head_dim=136, max_head_dim=256): (1.4, 1.4, 1.4, 1.4),
    # For values narrower than keys.
    _fa3_config(128, 128, 2, q_stages=1, min_head_dim=136, max_head_dim=192, max_v_dim=128): (0.88,) * 4,
    _fa3_config(192, 128, 2, q_stages=2, min_head_dim=72, max_head_dim=128, max_v_dim=64): (0.85,) * 4,
}


_CONFIGS = tuple(x for x in _SLOWNESS if x.max_v_dim == MAX_HEAD_DIM)


_MEASURED_ROUNDS = {64, *range(104, 129)}
"""Head dims at which calls of more than 64 causal queries over many keys were measured in rounds (NOTES.md)."""


def _has_equal_items(problem: Problem) -> bool:
    """Without a causal mask, and if causal queries are few beside their keys."""
    if not problem.later_rows_see_more:
        return True
    if problem.seqlen_q > 64 and problem.head_dim not in _MEASURED_ROUNDS:
        return False
    visits = Schedule.of(problem, 64, 64, skip_masked_tiles=True).visits
    return bool(visits.max() <= ALIKE * visits.min())


def _expected_time(problem: Problem, config: Fa3Config, num_sms: int, equal_items: bool) -> float:
    """Time of a call, in scores of one SM. A config of tests or experiments counts as the best."""
    heads = problem.batch * problem.heads
    equal, uneven, long, short = _SLOWNESS.get(config, (1.0, 1.0, 1.0, 1.0))
    blocks = Schedule.of(problem, config.block_q, config.block_kv, skip_masked_tiles=True)
    longest = (int(blocks.visits.max()) + ITEM_COST) * config.block_q
    if equal_items:  # rounds of whole tiles: rows past the last query take their time, too
        return longest * -(-blocks.num_q_blocks * heads // num_sms) * config.block_kv * equal
    # Blocks share out items of every length; each warpgroup of 64 rows skips tiles by itself.
    groups = Schedule.of(problem, 64, config.block_kv, skip_masked_tiles=True)
    visited = float(groups.visits.mean()) * groups.num_q_blocks
    work = visited * 64 + blocks.num_q_blocks * ITEM_COST * config.block_q
    slowness = long if problem.seqlen_k >= _LONG else short if problem.seqlen_k <= _SHORT else uneven
    return max(longest, work * heads / num_sms) * config.block_kv * slowness


_SM_FLOPS = {64: 4.2e12, 128: 5.5e12, 256: 6e12}
"""FLOP/s of one SM by the largest head dim of the tiles: cufa/records of 2026-11-22, 4k full, 132 SMs. (2026-11-24:
4.47e12, 5.79e12 and 5.93e12.)"""


def _entry_bytes(config: Fa3Config) -> int:
    """ENTRY_BYTES of cuda_src/forward/fa3/memory.cuh: with keys in a cache also the place of each box."""
    return 16 + (align_up(8 * config.block_kv // config.page_box, 16) if config.page_box else 0)


def ring_buffers(tiles: Mapping[str, tuple[int, int]]) -> tuple[Buffer, ...]:
    """Tiles by name, with their bytes and the number of their buffers; then a full and an empty mbarrier for each
    buffer."""
    barriers = [(f"{name}_{state}", n) for name, (_, n) in tiles.items() for state in ("FULL", "EMPTY")]
    return (
        *(Buffer(name, size, align=1024) for name, (size, _) in tiles.items()),
        *(Buffer(name, 8 * n, align=8) for name, n in barriers),
    )


def _split_configs() -> tuple[Fa3Config, ...]:
    """One item a block: O goes straight from registers to the workspace."""
    tiles = [dataclasses.replace(x, store_by_tma=False) for x in _CONFIGS if x.block_q <= 128]
    return tuple(x for config in tiles for x in config.in_splits())


class Fa3Forward(ForwardKernel):
    name = "fa3_forward"
    algorithm = "fa3"
    title = "FlashAttention-3 forward: TMA, WGMMA, warp specialisation"
    paper = "Shah et al. 2024, FlashAttention-3, Algorithms 1 and 2"
    source = "forward/fa3/kernel.cu"
    entry = "fa3_forward"
    dtypes = ("float16", "bfloat16")
    masks = MASK_KINDS
    options = (*Fa2Forward.options, "running")
    options_with_irregular_masks = (*Fa2Forward.options_with_irregular_masks, "running")
    folds_score_scale = True
    any_v_dim = True
    page_multiple = 8
    min_capability = max_capability = 90
    skip_masked_tiles = True
    configs = _CONFIGS
    v_configs = tuple(x for x in _SLOWNESS if x not in _CONFIGS)
    split_configs = _split_configs()
    reads_block_order = True

    def shared_memory(self, config: Fa3Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q of each consumer warpgroup, the K and V rings, a full and an empty barrier for each buffer, item
        descriptors. For listed tiles: which tile is in each buffer of K, the list, and a barrier for the end of a
        sequence. For keys in a cache: beside each buffer of K, what 64 tokens of a tree see of each other."""
        row, v_row = (ceil_div(n, 64) * 128 for n in (head_dim, v_dim or head_dim))
        consumers, keys = config.num_warps // 4 - 1, config.num_stages * config.block_kv
        tiles = {
            "Q": (config.q_stages * config.block_q * row, config.q_stages * consumers),
            "K": (keys * row, config.num_stages),
            "V": (keys * v_row, config.num_stages),
        }
        return (
            *ring_buffers(tiles),
            Buffer("ITEMS", 8 * 48),
            Buffer("TILES", 8 * config.num_stages),
            Buffer("LIST", 4 * _entry_bytes(config)),
            Buffer("LIST_FULL", 4 * 8, align=8),
            Buffer("LIST_EMPTY", 4 * 8, align=8),
            Buffer("TAIL_FULL", 8, align=8),
            Buffer("TREE", 512 * config.num_stages if config.page_box else 0, align=8),
        )

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        return {"RUNNING": problem.running is not None}

    def launches(
        self, problem: Problem, config: Fa3Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """Persistent blocks that share out query blocks and heads. If keys are split: one block per split, and a merge.
        If the mask has runs of rows per key: first their reduction over each key block."""
        items = config.query_items(problem)
        launch = Launch("fa3_forward", (items, 1, 1), config.num_warps * 32, shared_memory, persistent=True)
        return self.with_other_launches(problem, config, launch, split, "fa3_combine", dependent=True)

    def counters(self, problem: Problem, config: Fa3Config, workspace: int) -> int:
        return int(problem.tiles_are_listed)

    def boxes(self, config: Fa3Config) -> dict[str, Box]:
        """Q of a consumer, or the consumer's rows of one head; tiles of K and V; O of a warp."""
        return {
            "q": Box(min(64, config.head_rows)),
            "k": Box(config.page_box or config.block_kv),
            "v": Box(config.page_box or config.block_kv),
            "out": Box(16),
        }

    def source_of(self, config: Fa3Config) -> str:
        return "forward/fa3/cached.cu" if config.page_box else self.source

    def over_cache(self, config: Fa3Config, problem: Problem) -> Fa3Config:
        if not problem.lengths.in_cache:
            return config
        return dataclasses.replace(config, page_box=math.gcd(problem.cache.page_size, config.block_kv))

    def choose(self, problem: Problem, fitting: tuple[Fa3Config, ...], device: Device) -> Fa3Config:
        """The tiling whose last block is expected to end first. Wide query blocks read K and V less often; with
        few of them SMs stay idle, or the last round is nearly empty."""
        if problem.dropped and problem.mask_kind == "causal" and not problem.tiles_are_listed:
            # As measured: 128 × 128 takes 0.94 to 0.96 of the time of 192 × 64, where that would be chosen (NOTES.md).
            fitting = tuple(x for x in fitting if (x.block_q, x.block_kv) != (192, 64))
        equal = _has_equal_items(problem)
        return min(fitting, key=lambda config: _expected_time(problem, config, device.num_sms, equal))

    def flops(self, config: Fa3Config) -> float:
        whole = dataclasses.replace(config, page_box=0, split_keys=False, packed_heads=1, store_by_tma=True)
        return _SM_FLOPS.get(config.max_head_dim, 5e12) / _SLOWNESS.get(whole, (1.0,))[0]

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa3Config) -> Order:
        return persistent(problem, schedule, device)
