"""Tiles of Hopper's backward, and what each keeps in registers and in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from ..config import Buffer, TileConfig, ceil_div

GROUP_KEYS = 64
"""Rows of Sᵀ in one consumer warpgroup."""

ITEM_RECORDS = 3
"""The item at hand; the one after it, which the producer may be at; and the next, which it asks for once the one before
the item at hand is given back."""

ITEM_BYTES = 48

#: Registers that accumulators of consumers and operands that they hold may fill, so that no build spills and no
#: products are serialised (NVRTC 13.0; ``cufa compile`` builds them): where K has one buffer, and where it has two.
_ROOM, _ROOM_LINKED = 208, 204


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fa3BackwardConfig(TileConfig):
    """Tiles of the backward on Hopper: 64 keys for each consumer warpgroup, and a producer. ``num_stages`` are those
    of Q."""

    do_stages: int = 2
    """Buffers of dO."""
    ds_stages: int = 2
    """Buffers of dS."""
    cluster: int = 1
    """Thread blocks that share out the ``block_kv`` keys; of a pair each computes half of the columns of dQ."""
    bulk_add: bool = True
    """dQ is added by the copy engine, from shared memory; else by every thread from its registers."""
    persistent: bool = False
    """As many thread blocks as run at once take one key block after another, and prepare and convert dQ beside their
    tiles; else each is launched for one. Only for problems that ``plain_only`` configs serve."""

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
        """Buffers of K: of two key blocks where thread blocks run on from the last tile of one to the first of the
        next, for which there is room where dQ is not staged."""
        return 2 if self.runs_on and not self.bulk_add else 1

    @property
    def other_columns(self) -> int:
        """Of K, that a block of a pair needs of the other's keys beside its own: two times 64, the first or the last
        of a head."""
        return 128 if self.paired else 0

    @property
    def runs_on(self) -> bool:
        """Whether thread blocks take one key block after another, where the problem lets them."""
        return self.persistent and not self.paired

    def held_steps(self, head_dim: int) -> tuple[int, int]:
        """Of V and of K: k-steps of 16 columns that a warpgroup keeps in registers, as operands of dP and S. As many
        as find room beside dK, dV, S, dS and dQ; none where tiles have 128 rows, which take nearly all."""
        if head_dim <= 64 or self.paired:
            return 0, 0
        taken = head_dim + self.block_q // 2 + self.block_q // 4 + 64 // 2
        room = _ROOM_LINKED if self.k_stages > 1 else _ROOM
        steps, depth = max(room - taken, 0) // 4, ceil_div(head_dim, 16)
        return min(steps, depth), min(max(steps - depth, 0), depth)

    def constants(self, head_dim: int) -> dict[str, int | bool]:
        of_values, of_keys = self.held_steps(head_dim)
        held = {} if self.paired else {"V_STEPS_HELD": of_values, "K_STEPS_HELD": of_keys}
        return super().constants(head_dim) | {"K_STAGES": self.k_stages} | held

    @property
    def plain_only(self) -> bool:
        return self.runs_on

    @property
    def rows_served(self) -> tuple[int, ...]:
        """The rows of one product of dQ, or of one per warpgroup."""
        return tuple(sorted({64, self.block_kv // self.cluster}))

    @property
    def warps_text(self) -> str:
        """That the copy engine adds goes without saying, and where each block has one item, that others run on; of wide
        heads neither is so."""
        if self.paired:
            return f"{super().warps_text} in each of {self.cluster} blocks"
        by_red, each = "" if self.bulk_add else ", dQ by red", "" if self.persistent else ", a block each"
        return super().warps_text + by_red + each


def tile_config(block_q: int, block_kv: int, num_stages: int, **own: Any) -> Fa3BackwardConfig:
    return Fa3BackwardConfig(block_q, block_kv, num_warps=12, num_stages=num_stages, **own)


def listed_tiles(config: Fa3BackwardConfig) -> int:
    """Query tiles that a key block may visit where they need not lie side by side: its list lies in shared memory. None
    where thread blocks run on (``plain_only``)."""
    if config.runs_on:
        return 0
    if config.paired:
        return 2048 if config.ds_stages > 1 else 384
    return 4096


def narrow_shared_memory(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    """K and V; rings of Q, dO and dS, with the two numbers of each row; dQ on its way; barriers."""
    consumers = config.block_kv // GROUP_KEYS
    by_rows = config.block_q == 64 * consumers
    share = 64 if head_dim > 64 else ceil_div(head_dim, 8 * consumers) * 8
    dq_columns = head_dim if by_rows or head_dim <= 8 else share
    dq = Buffer("DQ", consumers * 64 * dq_columns * 4 if config.bulk_add else 0)
    return (*tiles(config, head_dim), dq, *numbers_and_barriers(config, head_dim))


def tiles(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    row = ceil_div(head_dim, 64) * 128
    keys = config.block_kv // config.cluster
    return (
        Buffer("K", config.k_stages * keys * row + GROUP_KEYS * config.other_columns * 2, align=1024),
        Buffer("V", keys * row, align=1024),
        Buffer("Q", config.num_stages * config.block_q * row, align=1024),
        Buffer("DO", config.do_stages * config.block_q * row, align=1024),
        Buffer("DS", config.ds_stages * config.block_q * config.block_kv * 2, align=1024),
    )


def numbers_and_barriers(config: Fa3BackwardConfig, head_dim: int) -> tuple[Buffer, ...]:
    counts = {"K": config.k_stages, "V": 1, "Q": config.num_stages, "DO": config.do_stages}
    counts |= {"DS": config.ds_stages, "DQ": 1}
    return (
        Buffer("LSE", config.num_stages * config.block_q * 4),
        Buffer("DELTA", config.do_stages * config.block_q * 4),
        Buffer("ITEMS", ITEM_RECORDS * ITEM_BYTES),
        Buffer("ITEM_FULL", ITEM_RECORDS * 8, align=8),
        Buffer("ITEM_EMPTY", ITEM_RECORDS * 8, align=8),
        *(
            Buffer(f"{name}_{state}", 8 * count, align=8)
            for name, count in counts.items()
            for state in ("FULL", "EMPTY")
        ),
        Buffer("TAIL_FULL", 2 * 8, align=8),
        Buffer("SEQUENCE", 32, align=16),
        Buffer("LIST", 4 * listed_tiles(config), align=16),
        Buffer("BACKGROUND", 4 * 64 * head_dim if config.runs_on else 0, align=16),
    )
