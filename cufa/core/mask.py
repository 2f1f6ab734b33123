"""Which scores exist: the one definition of every mask.

A mask says for each query row which keys it sees. :meth:`Mask.visible` is the definition, in NumPy; reference,
CPU path, benchmark checks, dashboard and property tests use it. :meth:`Mask.key_tiles` and its transpose
:meth:`Mask.query_tiles` say which tiles of the score matrix are visited and which of them need no mask; the
device side of that rule is ``cuda_src/tiles/mask.cuh``.

Masks are small, hashable and printable, know no sequence length, and survive a round trip through JSON. Users
make them with :mod:`cufa.masks`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Edges = tuple[int | None, int | None]

DIAGONALS = ("bottom-right", "top-left")


@dataclasses.dataclass(frozen=True)
class TileRanges:
    """Tiles of each block of rows, as arrays of one entry per block: those from ``first`` up to ``end`` hold a
    score that some row sees, and those from ``clear_first`` up to ``clear_end`` hold no other."""

    first: Ints
    end: Ints
    clear_first: Ints
    clear_end: Ints

    @property
    def count(self) -> Ints:
        return self.end - self.first

    @property
    def clear(self) -> Ints:
        return self.clear_end - self.clear_first


class Mask:
    """Base of all masks. A family defines :meth:`visible` and the tile ranges that follow from it."""

    families: ClassVar[dict[str, type[Mask]]] = {}

    def __init_subclass__(cls) -> None:
        Mask.families[cls.__name__.lower()] = cls

    def visible(self, rows: npt.ArrayLike, keys: npt.ArrayLike, seqlen_q: int, seqlen_k: int) -> Bools:
        """Which of ``keys`` each of ``rows`` sees, (rows, keys), in a score matrix of (seqlen_q, seqlen_k)."""
        raise self._missing("visible")

    def key_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> TileRanges:
        """Key tiles of each query block."""
        raise self._missing("key_tiles")

    def query_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> TileRanges:
        """The transpose: query tiles of each key block."""
        raise self._missing("query_tiles")

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        """Scores of one head that the mask lets through."""
        raise self._missing("visible_scores")

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        """(first, last) of a mask that is a band: row i sees keys i + first … i + last, None is unbounded."""
        raise self._missing("edges")

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"masks of class {type(self).__name__} define no {method}(): pass one made by cufa.masks"
        )

    def dense(self, seqlen_q: int, seqlen_k: int) -> Bools:
        """The boolean matrix, (seqlen_q, seqlen_k): True where a query sees a key."""
        return self.visible(np.arange(seqlen_q), np.arange(seqlen_k), seqlen_q, seqlen_k)

    def __str__(self) -> str:
        """As pages, tables and records print it: here the name and what differs from the defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = [f"{x.name} {getattr(self, x.name)}" for x in fields if getattr(self, x.name) != x.default]
        return " ".join([type(self).__name__.lower(), *values])

    def as_json(self) -> dict[str, Any]:
        return {"family": type(self).__name__.lower(), **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(record: dict[str, Any]) -> Mask:
        fields = {name: value for name, value in record.items() if name != "family"}
        return Mask.families[record["family"]](**fields)


@dataclasses.dataclass(frozen=True)
class Band(Mask):
    """Query i sees the keys from ``i + diagonal - left`` to ``i + diagonal + right``, both included; None is
    unbounded. The diagonal is ``"bottom-right"`` (seqlen_k - seqlen_q: the last query's own key is the last),
    ``"top-left"`` (0) or a number."""

    left: int | None = None
    right: int | None = None
    diagonal: str | int = "bottom-right"

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        shift = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(self.diagonal, self.diagonal)  # type: ignore[arg-type]
        assert isinstance(shift, int)
        return (
            None if self.left is None else shift - self.left,
            None if self.right is None else shift + self.right,
        )

    def visible(self, rows: npt.ArrayLike, keys: npt.ArrayLike, seqlen_q: int, seqlen_k: int) -> Bools:
        row, key = np.asarray(rows)[:, None], np.asarray(keys)[None, :]
        first, last = self.edges(seqlen_q, seqlen_k)
        seen = (key >= 0) & (key < seqlen_k) & (row >= 0) & (row < seqlen_q)
        if first is not None:
            seen &= key >= row + first
        if last is not None:
            seen &= key <= row + last
        return seen

    def key_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> TileRanges:
        return _band_tiles(self.edges(seqlen_q, seqlen_k), block_q, block_kv, seqlen_q, seqlen_k)

    def query_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> TileRanges:
        first, last = self.edges(seqlen_q, seqlen_k)
        # Key j is seen by rows j - last … j - first.
        swapped = None if last is None else -last, None if first is None else -first
        return _band_tiles(swapped, block_kv, block_q, seqlen_k, seqlen_q)

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        first, last = self.edges(seqlen_q, seqlen_k)
        up_to_last = _keys_up_to(last, seqlen_q, seqlen_k)
        return up_to_last - (0 if first is None else _keys_up_to(first - 1, seqlen_q, seqlen_k))

    def __str__(self) -> str:
        if type(self) is not Band:  # a band of other edges has a name of its own
            return super().__str__()
        if self.left is None and self.right is None:
            return "full"
        name = "causal" if (self.left, self.right) == (None, 0) else f"window ({self.left}, {self.right})"
        if self.diagonal == "bottom-right":
            return name
        return (
            f"{name} {self.diagonal}"
            if isinstance(self.diagonal, str)
            else f"{name} diagonal {self.diagonal}"
        )


FULL = Band()
CAUSAL = Band(right=0)


def reduced(edges: Edges, seqlen_q: int, seqlen_k: int) -> Edges:
    """The edges without a bound that hides nothing: a window that covers everything is planned as if absent."""
    first, last = edges
    if first is not None and first + seqlen_q - 1 <= 0:
        first = None
    if last is not None and last >= seqlen_k - 1:
        last = None
    return first, last


def _keys_up_to(last: int | None, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs of row i and key j ≤ i + last: the sum over rows of clamp(i + 1 + last, 0, seqlen_k)."""
    if last is None:
        return seqlen_q * seqlen_k
    rows_before = min(max(-last, 0), seqlen_q)  # rows that see none: i + 1 + last ≤ 0 up to i = -last - 1
    rows_until_all = min(max(seqlen_k - 1 - last, rows_before), seqlen_q)  # from here on a row sees all
    growing = rows_until_all - rows_before
    smallest = rows_before + 1 + last
    return growing * (2 * smallest + growing - 1) // 2 + (seqlen_q - rows_until_all) * seqlen_k


def _band_tiles(edges: Edges, block_rows: int, block_columns: int, rows: int, columns: int) -> TileRanges:
    """Column tiles of each row block under a band."""
    first, last = edges
    row_first = np.arange(-(-rows // block_rows), dtype=np.int64) * block_rows
    row_last = np.minimum(row_first + block_rows, rows) - 1
    nothing = np.zeros_like(row_first)
    # Columns that some row sees, and those that every row sees; inclusive.
    low = nothing if first is None else np.maximum(row_first + first, 0)
    high = nothing + columns - 1 if last is None else np.minimum(row_last + last, columns - 1)
    clear_low = nothing if first is None else np.maximum(row_last + first, 0)
    clear_high = nothing + columns - 1 if last is None else np.minimum(row_first + last, columns - 1)
    empty = low > high
    tile_first = np.where(empty, 0, low // block_columns)
    tile_end = np.where(empty, 0, high // block_columns + 1)
    clear_first = -(-clear_low // block_columns)
    clear_end = (clear_high + 1) // block_columns
    none = empty | (clear_first >= clear_end)
    # Where no tile is clear, all count as masked on the right: the segments of the kernels' walk stay one rule.
    return TileRanges(
        tile_first, tile_end, np.where(none, tile_first, clear_first), np.where(none, tile_first, clear_end)
    )
