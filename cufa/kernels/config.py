"""Values that describe a build and its launches: tile configs, shared memory, launches, boxes of tensor maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from ..problem.problem import MAX_HEAD_DIM, Problem


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
    """Fields of the family that the printed form includes."""

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.block_q}×{self.block_kv}{self.warps_text}{stages}"

    @property
    def head_rows(self) -> int:
        """Queries of one head in a tile: all of its rows, unless heads share it."""
        return self.block_q

    def query_items(self, problem: Problem) -> int:
        """Query blocks of all heads; heads that share a tile count once."""
        packed = self.block_q // self.head_rows
        return problem.query_blocks(self.head_rows) * (problem.heads // packed)

    def slot_bytes(self, v_dim: int) -> int:
        """A partial result in the workspace: rows of O, m, l and two words of padding, in float32."""
        return self.block_q * (v_dim + 4) * 4

    @property
    def blocks_of_item(self) -> int:
        """Thread blocks of a cluster that share one work item."""
        return 1

    @property
    def plain_only(self) -> bool:
        """The tiles serve only dense band masks without soft cap, sink and fixed order of additions."""
        return False

    def serves_cache(self, head_dim: int) -> bool:
        """Whether a forward kernel can be built with these tiles for keys in a cache."""
        return True

    @property
    def rows_served(self) -> tuple[int, ...]:
        """The values of ``block_q`` that the kernel can be built for; empty: not limited."""
        return ()

    @property
    def warps_text(self) -> str:
        return f", {self.num_warps} warps" if self.num_warps else ""

    def fits(self, head_dim: int, v_dim: int = 0) -> bool:
        """``v_dim``: head dim of v and out; 0: ``head_dim``."""
        return self.min_head_dim <= max(head_dim, v_dim) <= self.max_head_dim

    @property
    def own(self) -> dict[str, int | bool]:
        """The fields that the kernel's family adds, without fields that have their default."""
        common = {field.name for field in dataclasses.fields(TileConfig)}
        added = (field for field in dataclasses.fields(self) if field.name not in common)
        values = ((field, getattr(self, field.name)) for field in added)
        return {field.name: value for field, value in values if value != field.default}

    def constants(self, head_dim: int, v_dim: int = 0) -> dict[str, int | bool]:
        """Choices of the kernel's config.cuh that follow from the tiles and the head dim."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["min_head_dim"], fields["max_head_dim"]
        return {name.upper(): value for name, value in fields.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """A config from the output of ``dataclasses.asdict``. Raises TypeError for unknown and for missing fields."""
        return cls(**content)


@dataclasses.dataclass(frozen=True)
class SplitConfig(TileConfig):
    """Tiles of a forward kernel that can share out the keys of a query block over thread blocks."""

    split_keys: bool = False
    """Partial results are merged by a second launch."""
    packed_heads: int = 1
    """Query heads of one key/value head that share a tile, where keys are split."""
    page_box: int = 0
    """Keys in a cache: keys of one page that are copied at once. 0: keys lie in an array."""

    @property
    def head_rows(self) -> int:
        return self.block_q // self.packed_heads

    @property
    def warps_text(self) -> str:
        packed = f" of {self.packed_heads} heads" if self.packed_heads > 1 else ""
        return (
            packed
            + super().warps_text
            + (", keys split" if self.split_keys else "")
            + (f", keys copied by {self.page_box}" if self.page_box else "")
        )

    def in_splits(self) -> tuple[Self, ...]:
        """The same tiles with keys split: with one head per tile, and with 2 heads of 64 rows (128-row tiles), 4 heads
        of 16 (64-row tiles) or 2 heads of 16 (32-row tiles). A head has the rows of whole warps."""
        heads = 2 if self.block_q == 128 else min(4, self.block_q // 16)
        return tuple(
            dataclasses.replace(self, split_keys=True, packed_heads=n) for n in dict.fromkeys((1, heads))
        )


@dataclasses.dataclass(frozen=True)
class Split:
    """How the keys of a work item are split over thread blocks, whose partial results are merged."""

    kind: str
    """"fixed": ``count`` splits of each sequence; "balanced": at most ``count`` shares of all tiles."""
    count: int
    least: int = 1
    """"balanced", if only the device knows the lengths: the fewest shares, unless there are fewer tiles."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan."""

    entry: str
    """extern "C" name in the source file."""
    grid: tuple[int, int, int]
    num_threads: int
    shared_memory: int
    """Dynamic shared memory, bytes."""
    dependent: bool = False
    """Programmatic dependent launch: its blocks may become resident before the previous launch ends, and wait for
    that launch themselves (sm_90)."""
    persistent: bool = False
    """Persistent blocks: the planner launches no more than the GPU runs at once."""
    cluster: int = 1
    """Blocks of a thread block cluster, along the first axis of the grid (sm_90)."""

    def __str__(self) -> str:
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        memory = f"{self.shared_memory:,} B shared"
        return f"{self.entry} grid {self.grid}, {self.num_threads} threads, {memory}{clusters}"


@dataclasses.dataclass(frozen=True)
class Box:
    """The box of a tensor map: how many rows of one head a copy moves, 128 bytes of each."""

    rows: int
    promotion: int = 256
    """Fewest bytes that a request brings to the L2 cache; 0: the requested bytes only."""


# --- Shared memory ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One part of a thread block's shared memory. Its offset is in ``struct SharedMemory`` of the kernel."""

    name: str
    size: int
    """Bytes; 0 in builds without this buffer."""
    align: int = 16
    """The offset is a multiple of this many bytes; dynamic shared memory begins at a multiple of 1024."""
    over: str | None = None
    """An earlier buffer at whose offset this one begins: they share memory, as do the buffers after the earlier one as
    far as this one extends. None: after all earlier buffers."""


def bytes_of(buffers: Sequence[Buffer]) -> int:
    """Dynamic shared memory that holds the buffers: the choice SMEM_BYTES of config.cuh."""
    offsets: dict[str, int] = {}
    end = 0
    for x in buffers:
        offset = offsets[x.over] if x.over else align_up(end, x.align)
        offsets[x.name] = offset
        end = max(end, offset + x.size)
    return end


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tile_pitch(columns: int, itemsize: int, pad_to: int) -> int:
    """Bytes between rows of a tile whose products read multiples of ``pad_to`` bytes: an odd number of 16-byte units,
    to avoid bank conflicts (``mma/copy.cuh``)."""
    return (align_up(columns * itemsize, pad_to) // 16 | 1) * 16


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
