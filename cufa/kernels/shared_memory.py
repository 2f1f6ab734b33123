"""A kernel's dynamic shared memory as one list of buffers: sizes, offsets, and the total for planner and source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One part of a thread block's shared memory. The source knows it as ``<NAME>_OFFSET`` and ``<NAME>_BYTES``."""

    name: str
    size: int
    """Bytes; 0 where a build does without it."""
    align: int = 16
    """Bytes of which its offset is a multiple; dynamic shared memory itself begins at a multiple of 1024."""
    over: str | None = None
    """A buffer before it at whose offset it begins: it takes that one's place, and the place of those behind that one
    as far as it reaches. None: behind all that come before it."""


def layout(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """The offset of each buffer, by name, and the bytes of all.

    Raises ValueError for a name that is used twice, an ``over`` that names no buffer before it, and a place that is
    not aligned.
    """
    offsets: dict[str, int] = {}
    end = 0
    for x in buffers:
        if x.name in offsets:
            raise ValueError(f"two buffers are called {x.name!r}: give each a name of its own")
        if x.over is None:
            offset = end = align_up(end, x.align)
        elif x.over not in offsets:
            raise ValueError(f"buffer {x.name!r} lies over {x.over!r}, which does not come before it")
        else:
            offset = offsets[x.over]
        if offset % x.align:
            raise ValueError(
                f"buffer {x.name!r} lies over {x.over!r} at offset {offset}: no multiple of its align={x.align}"
            )
        offsets[x.name] = offset
        end = max(end, offset + x.size)
    return offsets, end


def constants(buffers: Sequence[Buffer]) -> dict[str, int | bool]:
    """What the source is given."""
    offsets, total = layout(buffers)
    found: dict[str, int | bool] = {"SMEM_BYTES": total}
    for x in buffers:
        found |= {f"{x.name}_OFFSET": offsets[x.name], f"{x.name}_BYTES": x.size}
    return found


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tile_pitch(columns: int, itemsize: int, pad_to: int) -> int:
    """Bytes from row to row of a tile whose products read multiples of ``pad_to`` bytes: an odd number of 16-byte
    units, as ``mma/copy.cuh`` says why."""
    return (align_up(columns * itemsize, pad_to) // 16 | 1) * 16
