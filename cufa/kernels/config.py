"""Tile configs: the compile-time choices of a build that the problem does not fix. Each family of kernels adds fields
in a subclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ..problem.problem import MAX_HEAD_DIM


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compile-time tiling of a kernel."""

    block_q: int
    block_kv: int
    num_warps: int
    """0 on a CPU."""
    num_stages: int = 1
    """Key/value tiles in flight in shared memory."""
    blocks_per_sm: int = 1
    """Thread blocks per SM that the register allocator aims for (``__launch_bounds__``)."""
    min_head_dim: int = 8
    max_head_dim: int = MAX_HEAD_DIM
    """Larger head dims spill or do not fit: not built."""

    in_text: ClassVar[tuple[str, ...]] = ()
    """Fields of the family that the text tells."""

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.block_q}×{self.block_kv}{self.warps_text}{stages}"

    @property
    def head_rows(self) -> int:
        """Queries of one head in a tile: all of its rows, unless heads share it."""
        return self.block_q

    @property
    def blocks_of_item(self) -> int:
        """Thread blocks of a cluster that share one work item."""
        return 1

    @property
    def plain_only(self) -> bool:
        """The tiles serve dense band masks alone, without softcap, sink or a fixed order of additions."""
        return False

    @property
    def rows_served(self) -> tuple[int, ...]:
        """The values of ``block_q`` that the kernel can be built for; empty: not limited."""
        return ()

    @property
    def warps_text(self) -> str:
        return f", {self.num_warps} warps" if self.num_warps else ""

    def fits(self, head_dim: int) -> bool:
        return self.min_head_dim <= head_dim <= self.max_head_dim

    @property
    def own(self) -> dict[str, int | bool]:
        """The fields that the kernel's family adds, but those that are as by default."""
        common = {field.name for field in dataclasses.fields(TileConfig)}
        added = (field for field in dataclasses.fields(self) if field.name not in common)
        values = ((field, getattr(self, field.name)) for field in added)
        return {field.name: value for field, value in values if value != field.default}

    def constants(self, head_dim: int) -> dict[str, int | bool]:
        """What is generated in front of the kernel's source, for a head of so many columns."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["min_head_dim"], fields["max_head_dim"]
        return {name.upper(): value for name, value in fields.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """What ``dataclasses.asdict`` made of one. Raises TypeError for unknown and for missing fields."""
        return cls(**content)


@dataclasses.dataclass(frozen=True)
class SplitConfig(TileConfig):
    """Tiles of a forward kernel that can share out the keys of a query block over thread blocks."""

    split_keys: bool = False
    """Partial results are merged by a second launch."""
    packed_heads: int = 1
    """Query heads of one key/value head that share a tile, where keys are split."""

    @property
    def head_rows(self) -> int:
        return self.block_q // self.packed_heads

    @property
    def warps_text(self) -> str:
        packed = f" of {self.packed_heads} heads" if self.packed_heads > 1 else ""
        return packed + super().warps_text + (", keys split" if self.split_keys else "")
