"""fa3_forward_fp8: FlashAttention-3 on Hopper for e4m3 inputs with scales.

Not in the registry: calls make no transposed values on a GPU, so that no call could reach it. The executor runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...gpu.architectures import Device
from ...problem.float8 import KEY_TILES
from ...problem.problem import Problem
from ...schedule.order import Order, persistent
from ...schedule.schedule import Schedule
from ..base import Kernel
from ..config import Box, Buffer, Launch, Split, TileConfig, align_up

_ATOM = 128
"""Bytes of a row of a tile that lie together; columns are padded to a multiple."""
LONG = 16384
"""From this many keys on, products with V are summed tile by tile in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config(TileConfig):
    """Tiles of e4m3: 64 query rows for each consumer warpgroup, and a producer."""

    two_levels: bool
    """P V of each tile is added to O in float32: the tensor core's own sums keep about 14 bits."""

    @property
    def warps_text(self) -> str:
        return super().warps_text + (", tiles summed in float32" if self.two_levels else "")


def _configs(two_levels: bool) -> tuple[Fp8Config, ...]:
    """One key tile for each range of head dims, as rounded weights depend on it. Three consumers where registers
    suffice."""
    least = (16, *(largest + 16 for largest in KEY_TILES))
    return tuple(
        Fp8Config(
            block_q=192 if largest <= 64 else 128,
            block_kv=keys,
            num_warps=16 if largest <= 64 else 12,
            num_stages=4 if largest <= 64 else 3,
            min_head_dim=smallest,
            max_head_dim=largest,
            two_levels=two_levels,
        )
        for smallest, (largest, keys) in zip(least, KEY_TILES.items(), strict=False)
    )


class Fa3ForwardFp8(Kernel):
    name = "fa3_forward_fp8"
    algorithm = "fa3"
    title = "FlashAttention-3 forward in e4m3: TMA, 8-bit WGMMA, warp specialisation"
    paper = "Shah et al. 2024, FlashAttention-3, section 3.3"
    source = "forward/fa3_fp8/kernel.cu"
    entry = "fa3_forward_fp8"
    dtypes = ("float8_e4m3",)
    out_dtypes = ("float16", "bfloat16")
    scales: Mapping[str, tuple[str, ...]] = {
        "q": ("tensor", "head", "block"),
        "k": ("tensor", "head", "block"),
        "v": ("tensor", "head"),
    }
    options = ("padded", "packed")
    head_dim_multiple = 16
    min_capability = max_capability = 90
    skip_masked_tiles = True
    configs = (*_configs(two_levels=False), *_configs(two_levels=True))

    def shared_memory(self, config: Fp8Config, head_dim: int) -> tuple[Buffer, ...]:
        """Q of each consumer warpgroup, the K and V rings (V transposed), a full and an empty barrier for each buffer,
        item descriptors."""
        consumers = config.num_warps // 4 - 1
        row, columns = align_up(head_dim, _ATOM), align_up(config.block_kv, _ATOM)
        tiles = {
            "Q": (config.block_q * row, consumers),
            "K": (config.num_stages * config.block_kv * row, config.num_stages),
            "V": (config.num_stages * head_dim * columns, config.num_stages),
        }
        return (
            *(Buffer(name, size, align=1024) for name, (size, _) in tiles.items()),
            *(
                Buffer(f"{name}_{state}", 8 * count, align=8)
                for name, (_, count) in tiles.items()
                for state in ("FULL", "EMPTY")
            ),
            Buffer("ITEMS", 4 * 48),
        )

    def launches(
        self, problem: Problem, config: Fp8Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """Persistent blocks that share out query blocks and heads."""
        items = config.query_items(problem)
        return (Launch(self.entry, (items, 1, 1), config.num_warps * 32, shared_memory, persistent=True),)

    def boxes(self, config: Fp8Config) -> dict[str, Box]:
        """Q of a consumer, a tile of K, 16 rows of transposed V, O (stored without the copy engine)."""
        return {"q": Box(64), "k": Box(config.block_kv), "v": Box(16), "out": Box(16)}

    def choose(self, problem: Problem, fitting: tuple[Fp8Config, ...], device: Device) -> Fp8Config:
        return next(x for x in fitting if x.two_levels == (problem.seqlen_k >= LONG))

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        modes = dict(zip("QKV", problem.scales or ("head",) * 3, strict=True))
        found: dict[str, int | bool] = {
            f"{name}_SCALE": ("tensor", "head", "block", "token").index(mode) for name, mode in modes.items()
        }
        return {**found, "BFLOAT16": problem.out_element.name == "bfloat16"}

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fp8Config) -> Order:
        return persistent(problem, schedule, device)
