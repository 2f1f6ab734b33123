"""Tile configs of Hopper's backward, and what each keeps in registers and in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from ..config import Buffer, TileConfig, ceil_div

WARPGROUP_KEYS = 64
"""Rows of Sᵀ in one consumer warpgroup."""

ITEM_STAGES = 3
"""Item descriptors in shared memory: of the previous item, of the current one, and of the next."""

ITEM_BYTES = 48
"""Bytes of an item descriptor."""

#: Registers of a consumer thread for accumulators and held operands, such that no build spills and ptxas serialises no
#: products (NVRTC 13.0; ``cufa compile`` shows it): with one buffer of K, and with two.
_ROOM, _ROOM_LINKED = 208, 204


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fa3BackwardConfig(TileConfig):
    """Tiles of the backward on Hopper: 64 keys for each consumer warpgroup, and a producer. ``num_stages``: stages
    of the ring of Q."""

    do_stages: int = 2
    """Buffers of dO."""
    ds_stages: int = 2
    """Buffers of dS."""
    cluster: int = 1
    """Thread blocks that divide the ``block_kv`` keys; each block of a pair computes half of the columns of dQ."""
    bulk_add: bool = True
    """dQ is added by the copy engine, from shared memory; else by every thread from its registers."""
    persistent: bool = False
    """As many thread blocks as run at once take one key block after another. Meanwhile, their producers prepare and
    convert dQ. Else each block is launched for one key block. Only for problems that ``plain_only`` configs serve. A
    pair of blocks takes one key block."""

    in_text = ("cluster",)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Measurements may name ``early_launches``, a mode of the launches alone: the tiles are the same."""
        return super().from_json({name: x for name, x in content.items() if name != "early_launches"})

    @property
    def paired(self) -> bool:
        """For wide heads, in ``fa3_backward_wide``."""
        return self.cluster > 1

    @property
    def blocks_of_item(self) -> int:
        return self.cluster

    @property
    def k_stages(self) -> int:
        """Buffers of K: two where persistent blocks overlap items, the last tile of one with the first tile of the
        next. Shared memory has room for that where dQ is not staged."""
        return 2 if self.persistent and not self.bulk_add else 1

    def fits(self, head_dim: int, v_dim: int = 0) -> bool:
        """Persistent blocks prepare rows of v as wide as those of q. A pair shares the columns of wide keys."""
        same = v_dim in (0, head_dim)
        return super().fits(head_dim, v_dim) and (
            same or (head_dim > 128 if self.paired else not self.persistent)
        )

    def held_steps(self, head_dim: int, v_dim: int = 0) -> tuple[int, int]:
        """k-steps of 16 columns of V and of K that a warpgroup keeps in registers, as operands of dP and S: as many as
        find room with dK, dV, S, dS and dQ. Tiles of 128 rows leave no room."""
        v_dim = v_dim or head_dim
        if max(head_dim, v_dim) <= 64 or (self.paired and v_dim >= head_dim):
            return 0, 0
        v_steps, k_steps = ceil_div(v_dim, 16), ceil_div(head_dim, 16)
        if self.paired:  # dV, or dK; S, or dP; P, or dS; dQ
            dq_registers = 64 // 2, (ceil_div(head_dim, 64) - 2) * 64 // 4
            free = (
                _ROOM - n // 2 - self.block_q * 3 // 4 - dq
                for n, dq in zip((v_dim, head_dim), dq_registers, strict=True)
            )
            k_room, v_room = (max(x, 0) // 4 for x in free)
            return min(v_room, v_steps), min(k_room, k_steps)
        taken = (head_dim + v_dim) // 2 + self.block_q // 2 + self.block_q // 4 + 64 // 2
        room = _ROOM_LINKED if self.k_stages > 1 else _ROOM
        steps = max(room - taken, 0) // 4
        return min(steps, v_steps), min(max(steps - v_steps, 0), k_steps)

    def constants(self, head_dim: int, v_dim: int = 0) -> dict[str, int | bool]:
        v_steps, k_steps = self.held_steps(head_dim, v_dim)
        held = {"V_STEPS_HELD": v_steps, "K_STEPS_HELD": k_steps}
        return super().constants(head_dim, v_dim) | {"K_STAGES": self.k_stages} | held

    @property
    def plain_only(self) -> bool:
        return self.persistent

    @property
    def rows_served(self) -> tuple[int, ...]:
        """The rows of one product of dQ, or of two, one per warpgroup."""
        return tuple(sorted({64, self.block_kv // self.cluster}))

    @property
    def warps_text(self) -> str:
        """Says if dQ is added by red instead of the copy engine, and if each key block has its own thread block. Wide
        heads have no such choices."""
        if self.paired:
            return f"{super().warps_text} in each of {self.cluster} blocks"
        by_red, each = "" if self.bulk_add else ", dQ by red", "" if self.persistent else ", a block each"
        return super().warps_text + by_red + each


def tile_config(block_q: int, block_kv: int, num_stages: int, **own: Any) -> Fa3BackwardConfig:
    return Fa3BackwardConfig(block_q, block_kv, num_warps=12, num_stages=num_stages, **own)


def listed_tiles(config: Fa3BackwardConfig) -> int:
    """Query tiles that the list of a key block has room for, in shared memory (irregular masks). Persistent blocks have
    no list (``plain_only``)."""
    if config.persistent:
        return 0
    if config.paired:
        return 2048 if config.ds_stages > 1 else 384
    return 4096


def narrow_shared_memory(config: Fa3BackwardConfig, head_dim: int, v_dim: int) -> tuple[Buffer, ...]:
    """K and V; rings of Q, dO and dS, with lse and delta of each row; staged dQ; barriers."""
    consumers = config.block_kv // WARPGROUP_KEYS
    by_rows = config.block_q == 64 * consumers
    share = 64 if head_dim > 64 else ceil_div(head_dim, 8 * consumers) * 8
    dq_columns = head_dim if by_rows or head_dim <= 8 else share
    dq = Buffer("DQ", consumers * 64 * dq_columns * 4 if config.bulk_add else 0)
    return (*tiles(config, head_dim, v_dim), dq, *row_stats_and_barriers(config, head_dim))


def tiles(config: Fa3BackwardConfig, head_dim: int, v_dim: int) -> tuple[Buffer, ...]:
    row, v_row = (ceil_div(n, 64) * 128 for n in (head_dim, v_dim or head_dim))
    keys = config.block_kv // config.cluster
    # A pair also has two atoms of 64 columns of the other block's K.
    other_k = 2 * WARPGROUP_KEYS * 128 if config.paired else 0
    return (
        Buffer("K", config.k_stages * keys * row + other_k, align=1024),
        Buffer("V", keys * v_row, align=1024),
        Buffer("Q", config.num_stages * config.block_q * row, align=1024),
        Buffer("DO", config.do_stages * config.block_q * v_row, align=1024),
        Buffer("DS", config.ds_stages * config.block_q * config.block_kv * 2, align=1024),
    )


def row_stats_and_barriers(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    counts = {"K": config.k_stages, "V": 1, "Q": config.num_stages, "DO": config.do_stages}
    counts |= {"DS": config.ds_stages, "DQ": 1}
    return (
        Buffer("LSE", config.num_stages * config.block_q * 4),
        Buffer("NEG_DELTA", config.do_stages * config.block_q * 4),
        Buffer("ITEMS", ITEM_STAGES * ITEM_BYTES),
        Buffer("ITEM_FULL", ITEM_STAGES * 8, align=8),
        Buffer("ITEM_EMPTY", ITEM_STAGES * 8, align=8),
        *(
            Buffer(f"{name}_{state}", 8 * count, align=8)
            for name, count in counts.items()
            for state in ("FULL", "EMPTY")
        ),
        Buffer("TAIL_FULL", 2 * 8, align=8),
        Buffer("SEQUENCE", 32, align=16),
        Buffer("LIST", 4 * listed_tiles(config), align=16),
        Buffer("BACKGROUND", 4 * 64 * head_dim if config.persistent else 0, align=16),
    )
