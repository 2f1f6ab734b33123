"""fa2_forward: FlashAttention-2 for float16 and bfloat16."""

from __future__ import annotations

import dataclasses

from ...gpu.architectures import Device
from ...problem.problem import BAND_KINDS, MASK_KINDS, Problem
from ...schedule.order import Order, query_blocks
from ...schedule.schedule import Schedule
from ..base import ForwardKernel
from ..config import Buffer, Launch, Split, SplitConfig, tile_pitch


@dataclasses.dataclass(frozen=True)
class Fa2Config(SplitConfig):
    """Tiles of FlashAttention-2."""

    column_warps: int = 1
    """Warps that share query rows and split the columns of S and O."""

    in_text = ("column_warps",)

    def serves_cache(self, head_dim: int) -> bool:
        """Looking up pages takes registers."""
        return self.block_kv <= 64 and (self.block_q == 64 or (head_dim <= 64 and self.block_kv == 64))

    @property
    def warps_text(self) -> str:
        return super().warps_text + (" in pairs" if self.column_warps == 2 else "")


_CONFIGS = (
    # Head dims 120 and 216 are left out: they would spill a few registers.
    Fa2Config(128, 64, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=112),
    Fa2Config(128, 64, num_warps=4, num_stages=2, blocks_per_sm=2, min_head_dim=128, max_head_dim=128),
    Fa2Config(128, 64, num_warps=8, num_stages=2, min_head_dim=136, max_head_dim=208, column_warps=2),
    Fa2Config(128, 64, num_warps=8, num_stages=2, min_head_dim=224, column_warps=2),
    # Half the rows: for few queries, and where shared memory is small (sm_86, sm_89, sm_120).
    Fa2Config(128, 32, num_warps=4, num_stages=2, blocks_per_sm=2, max_head_dim=128),
    # If each block has an SM for itself: see Fa2Forward.choose. From head dim 80 on, sm_100 would spill under masks
    # with two runs of rows per key; 128 rows would spill at head dims from 32 to 64 already.
    Fa2Config(64, 128, num_warps=4, num_stages=2, max_head_dim=64),
    Fa2Config(64, 64, num_warps=4, num_stages=2, blocks_per_sm=2),
    Fa2Config(64, 32, num_warps=4, num_stages=2, blocks_per_sm=2),
)


class Fa2Forward(ForwardKernel):
    name = "fa2_forward"
    algorithm = "fa2"
    title = "FlashAttention-2 forward, 16-bit tensor cores"
    paper = "Dao 2023, FlashAttention-2, Algorithm 1"
    source = "forward/fa2/kernel.cu"
    entry = "fa2_forward"
    dtypes = ("float16", "bfloat16")
    masks: tuple[str, ...] = MASK_KINDS
    options: tuple[str, ...] = (
        "padded", "packed", "cache", "tree", "invariant", "alibi", "sink", "score", "dropout",
    )  # fmt: skip
    options_with_irregular_masks = ("padded", "packed", "cache", "alibi", "sink", "score", "dropout")
    any_v_dim = True
    skip_masked_tiles = True
    configs = _CONFIGS
    # Left out: paired warps at head dims 136 to 208, which would spill. Tiles of 128 keys, which pay only if each block
    # has an SM for itself.
    split_configs: tuple[Fa2Config, ...] = tuple(
        x
        for config in _CONFIGS
        if config.min_head_dim != 136 and config.block_kv <= 64
        for x in config.in_splits()
    )

    def shared_memory(self, config: Fa2Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q (later O); stages, each a tile of K and one of V; if pairs of warps exchange them, P and row maxima."""
        pitch, v_pitch, p_pitch = (
            tile_pitch(n, itemsize=2, pad_to=32) for n in (head_dim, v_dim or head_dim, config.block_kv)
        )
        exchanged = config.block_q if config.column_warps == 2 else 0
        return (
            Buffer("Q", config.block_q * max(pitch, v_pitch)),
            Buffer("STAGES", config.num_stages * config.block_kv * (pitch + v_pitch)),
            Buffer("P", exchanged * p_pitch),
            Buffer("M", exchanged * 2 * 4),
        )

    def launches(
        self, problem: Problem, config: Fa2Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """One block per query block and head. If keys are split: one per split, and a merge. If the mask has runs of
        rows per key: first their reduction over each key block."""
        blocks = config.query_items(problem)
        launch = Launch("fa2_forward", (blocks, 1, 1), config.num_warps * 32, shared_memory)
        return self.with_other_launches(problem, config, launch, split, "fa2_combine")

    def source_of(self, config: Fa2Config) -> str:
        return "forward/fa2/cached.cu" if config.page_box else self.source

    def over_cache(self, config: Fa2Config, problem: Problem) -> Fa2Config:
        return dataclasses.replace(config, page_box=1) if problem.lengths.in_cache else config

    def choose(self, problem: Problem, fitting: tuple[Fa2Config, ...], device: Device) -> Fa2Config:
        """The first that fits; 64 query rows per block if 128 would leave SMs idle or rows empty. Over a cache always
        the first, so that the bits of a sequence do not depend on other sequences.

        Measured on an H200: if blocks are equally long, 64 rows win until blocks of 128 rows cover half of the SMs; if
        later rows see more, until blocks of 128 rows fill one wave. If each block of 64 rows has
        an SM for itself, tiles of 128 keys took 0.83 to 0.87 of the time at head dim 64 (H100, 1 × 8 × 512 and 1,024).
        """
        if problem.lengths.in_cache:
            return fitting[0]
        blocks = problem.query_blocks(128) * problem.heads
        wave = 2 * device.num_sms if max(problem.head_dim, problem.v_dim) <= 128 else device.num_sms
        alone = problem.query_blocks(64) * problem.heads <= device.num_sms
        narrow = [config for config in fitting if config.block_q == 64 and (alone or config.block_kv <= 64)]
        if narrow and blocks <= (wave if problem.later_rows_see_more else device.num_sms // 2):
            return narrow[0]
        if narrow and problem.seqlen_q <= 64:
            return narrow[-1]
        return fitting[0]

    def flops(self, config: Fa2Config) -> float:
        """cufa/records: 390 TFLOP/s on 132 SMs at head dim 128. Warps with 16 rows read shared memory twice as often as
        warps with 32 (0.78 to 0.84); tiles of 32 keys need more barriers (0.94)."""
        return 2.9e12 * (1.0 if config.block_q == 128 else 0.82) * (1.0 if config.block_kv > 32 else 0.94)

    def tile_latency(self, config: Fa2Config, head_dim: int) -> float:
        """One tile of 64 keys, four warps, 64 or 128 rows: 1.1 to 1.2 µs at head dim 64, 1.5 to 1.6 at 128 (H100,
        2026-11-25, 1 × 8 × 512 to 2048, a thread block for each SM)."""
        if head_dim > 128:
            return 0.0  # not measured
        return (0.65e-6 + 7.7e-9 * head_dim) * (config.block_kv + 64) / 128

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa2Config) -> Order:
        return query_blocks(problem, schedule)


class Fa2NoSkip(Fa2Forward):
    """The ablation: the same source; masked tiles are computed, and the mask hides their scores."""

    name = "fa2_noskip"
    algorithm = "fa2_noskip"
    title = "FlashAttention-2 forward without skipping of masked tiles"
    masks = BAND_KINDS
    options = ("padded", "packed", "alibi", "sink")
    skip_masked_tiles = False
    split_configs = ()
    ablation = True
