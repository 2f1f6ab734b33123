"""fa3_forward_fp8: FlashAttention-3 on Hopper for e4m3 inputs with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...gpu.architectures import Device
from ...problem.float8 import KEY_TILES
from ...problem.problem import Problem
from ...schedule.order import Order, persistent
from ...schedule.schedule import Schedule
from ..base import ForwardKernel
from ..config import Box, Buffer, Launch, Split, SplitConfig, align_up
from .fa3 import Fa3Config, ring_buffers
from .float8 import Float8Kernel, transposed_shape

_ATOM = 128
"""Bytes of a row of a tile that lie together; columns are padded to a multiple."""
LONG = 65536
"""From this many keys on, products with V are summed tile by tile in float32: the tensor core's own sums keep about 14
bits."""

_MOST_SMS = 144
"""Most SMs of a Hopper GPU: as many thread blocks have float32 sums in the workspace."""


def _configs() -> tuple[Fa3Config, ...]:
    """One key tile for each range of head dims, as rounded weights depend on it. Three consumers where registers
    suffice."""
    least = (16, *(largest + 16 for largest in KEY_TILES))
    return tuple(
        Fa3Config(
            block_q=192 if largest <= 64 else 128,
            block_kv=keys,
            num_warps=16 if largest <= 64 else 12,
            num_stages=4 if largest <= 64 else 3,
            min_head_dim=smallest,
            max_head_dim=largest,
            q_stages=1,
            q_in_registers=False,
            ping_pong=True,
            store_by_tma=False,
        )
        for smallest, (largest, keys) in zip(least, KEY_TILES.items(), strict=False)
    )


def _split_configs() -> tuple[Fa3Config, ...]:
    """The same tiles of keys: borders of splits are borders of tiles. Two consumers, with rows of one head or a head of
    their own."""
    tiles = [dataclasses.replace(x, block_q=128, num_warps=12, split_keys=True) for x in _configs()]
    return tuple(dataclasses.replace(x, packed_heads=n) for x in tiles for n in (1, 2))


#: FLOP/s of one SM by the largest head dim of the tiles (cuda_src/forward/fa3_fp8/NOTES.md, 16k full, 132 SMs).
_SM_FLOPS = {64: 4.7e12, 128: 7.5e12, 256: 8.4e12}


class Fa3ForwardFp8(Float8Kernel, ForwardKernel):
    name = "fa3_forward_fp8"
    algorithm = "fa3"
    title = "FlashAttention-3 forward in e4m3: TMA, 8-bit WGMMA, warp specialisation"
    paper = "Shah et al. 2024, FlashAttention-3, section 3.3"
    source = "forward/fa3_fp8/kernel.cu"
    entry = "fa3_forward_fp8"
    min_capability = max_capability = 90
    configs = _configs()
    split_configs = _split_configs()
    workspace_holds = "transposed values, sums; of each split of a query block O, and m and l of its rows"

    def shared_memory(self, config: Fa3Config, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """Q of each consumer warpgroup, the K and V rings (V transposed), a full and an empty barrier for each buffer,
        item descriptors."""
        consumers = config.num_warps // 4 - 1
        row, columns = align_up(head_dim, _ATOM), align_up(config.block_kv, _ATOM)
        tiles = {
            "Q": (config.block_q * row, consumers),
            "K": (config.num_stages * config.block_kv * row, config.num_stages),
            "V": (config.num_stages * head_dim * columns, config.num_stages),
        }
        return (*ring_buffers(tiles), Buffer("ITEMS", 4 * 64))

    def launches(
        self, problem: Problem, config: Fa3Config, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        """Persistent blocks that share out query blocks and heads; an earlier launch transposes values in rows. If keys
        are split: one block per split, and a merge."""
        items = config.query_items(problem)
        attention = Launch(self.entry, (items, 1, 1), config.num_warps * 32, shared_memory, persistent=True)
        attention, *merge = self.with_other_launches(
            problem, config, attention, split, "fa3_fp8_combine", True
        )
        return (*self.with_transposition(problem, attention), *merge)

    def workspace(self, problem: Problem, config: SplitConfig, split: Split | None = None) -> int:
        blocks = min(config.query_items(problem), _MOST_SMS)
        sums = 4 * blocks * config.block_q * problem.head_dim if _added_tiles(problem) > 1 else 0
        parts = ForwardKernel.workspace(self, problem, config, split)
        return super().workspace(problem, config, split) + sums + parts

    def maps_of_workspace(self, problem: Problem) -> Mapping[str, tuple[int, ...]]:
        return {"v": transposed_shape(problem)} if problem.values_in_rows else {}

    def boxes(self, config: Fa3Config) -> dict[str, Box]:
        """Q of a consumer, a tile of K, 16 rows of transposed V, O (stored without the copy engine)."""
        return {"q": Box(64), "k": Box(config.block_kv), "v": Box(16), "out": Box(16)}

    def own_constants(self, problem: Problem) -> dict[str, int | bool]:
        return {**super().own_constants(problem), "ADDED_TILES": _added_tiles(problem)}

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        tiles, by = _added_tiles(problem), "by length" if problem.accumulate == "auto" else "as asked for"
        what = {0: "on the tensor cores, in about 14 bits", 1: "after each tile, in float32"}
        name = {0: "'row'", 1: "'tile'"}.get(tiles, str(tiles))
        where = what.get(tiles, f"on the tensor cores for {tiles} tiles, then in float32")
        return (f"products with V are added {where} (accumulate={name}, {by})",)

    def flops(self, config: Fa3Config) -> float:
        return _SM_FLOPS[config.max_head_dim]

    def order(self, problem: Problem, schedule: Schedule, device: Device, config: Fa3Config) -> Order:
        return persistent(problem, schedule, device)


def _added_tiles(problem: Problem) -> int:
    """Tiles that tensor cores add before float32 does; 0: all of a row."""
    by_length = "tile" if problem.seqlen_k >= LONG else "row"
    choice = by_length if problem.accumulate == "auto" else problem.accumulate
    if choice in ("row", "tile"):
        return int(choice == "tile")
    # With more columns, or a soft cap, registers do not suffice; one tile is as exact.
    return int(choice) if problem.head_dim <= 128 and problem.softcap is None else 1
