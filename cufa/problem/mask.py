"""Band masks: bounds around a diagonal, with sets of exempt tokens. The base class of all masks is in
:mod:`cufa.problem.mask_family`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .integers import INT32, Integers
from .mask_family import DIAGONALS, Edges, Mask, broadcast_count, rows_in, shift_of
from .tile_classes import Bools, Ints, TileRanges, Tiles

__all__ = ["CAUSAL", "DIAGONALS", "FULL", "Band", "Mask", "TileRanges", "reduced"]


@dataclasses.dataclass(frozen=True, repr=False)
class Band(Mask):
    """Query i sees the keys from ``i + diagonal - left`` to ``i + diagonal + right``, both included; None is
    unbounded. The diagonal is ``"bottom-right"`` (seqlen_k - seqlen_q: the last query's own key is the last),
    ``"top-left"`` (0) or a number.

    Three sets of tokens are exempt, each given by one count or by one per sequence. Every query sees the first
    ``prefix`` keys. ``left`` does not hide the first ``keep`` keys. Rows with i + diagonal < ``global_tokens`` see
    every key."""

    left: int | None = None
    right: int | None = None
    diagonal: str | int = "bottom-right"
    prefix: int | Integers = 0
    keep: int | Integers = 0
    global_tokens: int | Integers = 0
    matrix: tuple[int, int] | None = None

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        return shift_of(self.diagonal, seqlen_q, seqlen_k)

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        shift = self.shift(seqlen_q, seqlen_k)
        return (
            None if self.left is None else shift - self.left,
            None if self.right is None else shift + self.right,
        )

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        (first, last), (prefix, keep) = self.edges(seqlen_q, seqlen_k), self._first_keys()
        seen = np.ones(np.broadcast_shapes(row.shape, key.shape), bool)
        if first is not None:
            seen &= (key >= row + first) | (key < keep)
        if last is not None:
            seen &= key <= row + last
        return seen | (key < prefix) | (row < self._global_rows(seqlen_q, seqlen_k))

    @property
    def sets(self) -> tuple[int | Integers, ...]:
        return self.prefix, self.keep, self.global_tokens

    @property
    def irregular_kind(self) -> str:
        return "sets" if self.sets != (0, 0, 0) else ""

    @property
    def spread(self) -> tuple[int, int]:
        return broadcast_count(*(x.shape[0] if isinstance(x, Integers) else 1 for x in self.sets)), 1

    def at(self, batch: int, head: int) -> Band:
        if not any(isinstance(x, Integers) for x in self.sets):
            return self
        prefix, keep, global_tokens = (_one(x, batch) for x in self.sets)
        return dataclasses.replace(self, prefix=prefix, keep=keep, global_tokens=global_tokens)

    @property
    def known(self) -> bool:
        return all(x.known for x in self.sets if isinstance(x, Integers))

    @property
    def outline(self) -> Band:
        if self.known:
            return self
        # An exempt set of unknown size may hold every token.
        exempt = not isinstance(self.prefix, int) or not isinstance(self.global_tokens, int)
        left = None if exempt or not isinstance(self.keep, int) else self.left
        return Band(left, None if exempt else self.right, self.diagonal)

    def on_host(self) -> Band:
        prefix, keep, global_tokens = (x.on_host() if isinstance(x, Integers) else x for x in self.sets)
        return dataclasses.replace(self, prefix=prefix, keep=keep, global_tokens=global_tokens)

    def params(self, seqlen_q: int, seqlen_k: int, by_key: bool = False) -> dict[str, int | Integers]:
        found: dict[str, int | Integers] = {}
        for name, x in zip(("prefix", "keep", "global"), self.sets, strict=True):
            number = "global_tokens" if name == "global" else name
            if isinstance(x, Integers):
                found |= {f"{name}_of": x, number: int(x.shape[0] > 1)}  # the step from sequence to sequence
            else:
                found[number] = min(x, int(INT32.max))
        return found

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        """Both answers are exact."""
        first, last = self.edges(seqlen_q, seqlen_k)
        (prefix, keep), exempt = self._first_keys(), self._global_rows(seqlen_q, seqlen_k)
        top, end, left, right = q_first[:, None], q_end[:, None], k_first[None, :], k_end[None, :]
        some = (right > left) & (end > top)
        every = np.ones_like(some)
        # If an exempt set covers part of a rectangle, the rest decides whether all of it is visible.
        low, high = np.maximum(left, prefix), np.maximum(top, exempt)
        if last is not None:
            some = some & (left <= end - 1 + last)
            every = every & (right - 1 <= high + last)
        if first is not None:
            some = some & ((right - 1 >= top + first) | (left < keep))
            every = every & ((np.maximum(low, keep) >= end - 1 + first) | (right <= keep))
        some = some | (left < prefix) | (top < exempt)
        return some, every | (right <= prefix) | (end <= exempt)

    def seen_rows(self, seqlen_q: int, seqlen_k: int) -> list[tuple[Ints, Ints]]:
        """The rows that see each key: two runs, (begin, end) of (seqlen_k,) each, ends excluded."""
        first, last = self.edges(seqlen_q, seqlen_k)
        prefix, keep = self._first_keys()
        key = np.arange(seqlen_k)
        begin = np.zeros_like(key) if last is None else key - last
        end = np.full_like(key, seqlen_q) if first is None else key - first + 1
        end = np.where(key < keep, seqlen_q, end)
        begin, end = np.where(key < prefix, 0, begin), np.where(key < prefix, seqlen_q, end)
        exempt = np.full_like(key, self._global_rows(seqlen_q, seqlen_k))
        return [(begin, end), (np.zeros_like(key), exempt)]

    def _first_keys(self) -> tuple[int, int]:
        return _one(self.prefix, 0), _one(self.keep, 0)

    def _global_rows(self, seqlen_q: int, seqlen_k: int) -> int:
        """Rows before this one see every key."""
        tokens = _one(self.global_tokens, 0)
        return max(tokens - self.shift(seqlen_q, seqlen_k), 0) if tokens else 0

    def key_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Tiles:
        if self.irregular_kind:
            return super().key_tiles(block_q, block_kv, seqlen_q, seqlen_k)
        return _band_tiles(self.edges(seqlen_q, seqlen_k), block_q, block_kv, seqlen_q, seqlen_k)

    def visits(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Ints:
        if not self.irregular_kind:
            return super().visits(block_q, block_kv, seqlen_q, seqlen_k)
        first, last = self.edges(seqlen_q, seqlen_k)
        tiles, up_to_last = (
            _band_tiles(edges, block_q, block_kv, seqlen_q, seqlen_k)
            for edges in ((first, last), (None, last))
        )
        prefix, keep = (-(-min(x, seqlen_k) // block_kv) for x in self._first_keys())
        exempt = -(-self._global_rows(seqlen_q, seqlen_k) // block_q)
        low = np.maximum(prefix, np.minimum(keep, up_to_last.end))  # the first tiles, then the band's tiles
        count = np.where(low < tiles.first, low + tiles.count, np.maximum(low, tiles.end))
        count[:exempt] = -(-seqlen_k // block_kv)
        return count

    def query_tiles(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Tiles:
        if self.irregular_kind:
            return super().query_tiles(block_q, block_kv, seqlen_q, seqlen_k)
        first, last = self.edges(seqlen_q, seqlen_k)
        # Key j is seen by rows j - last … j - first.
        swapped = None if last is None else -last, None if first is None else -first
        return _band_tiles(swapped, block_kv, block_q, seqlen_k, seqlen_q)

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        if self.irregular_kind:
            return super().visible_scores(seqlen_q, seqlen_k)
        return int(scores_in_band(self.edges(seqlen_q, seqlen_k), (0, seqlen_q), (0, seqlen_k)))

    def visible_per_key(
        self, seqlen_q: int, seqlen_k: int, first_row: int = 0, end_row: int | None = None
    ) -> Ints:
        rows = first_row, seqlen_q if end_row is None else end_row
        return rows_in(self.seen_rows(seqlen_q, seqlen_k), [], rows)

    def __str__(self) -> str:
        if type(self) is not Band:  # a subclass prints its own name
            return super().__str__()
        name = "causal" if (self.left, self.right) == (None, 0) else f"window ({self.left}, {self.right})"
        if self.left is None and self.right is None:
            name = "full"
        elif self.diagonal != "bottom-right":
            name += f" {self.diagonal}" if isinstance(self.diagonal, str) else f" diagonal {self.diagonal}"
        words = ("prefix", self.prefix), ("keep", self.keep), ("global", self.global_tokens)
        return " ".join([name, *(f"{word} {_number(x)}" for word, x in words if x != 0)])

    def as_json(self) -> dict[str, Any]:
        """JSON without the empty exempt sets, and without ``matrix`` if it is None."""
        nothing = {"prefix": 0, "keep": 0, "global_tokens": 0, "matrix": None}
        return {name: x for name, x in super().as_json().items() if x != nothing.get(name, ...)}


def _one(number: int | Integers, batch: int) -> int:
    if isinstance(number, int):
        return number
    return int(number.values[batch if len(number.values) > 1 else 0])


def _number(number: int | Integers) -> str:
    if isinstance(number, int):
        return str(number)
    if number.known and len(number.values) <= 4:
        return "/".join(map(str, number.values.tolist()))
    return "on a GPU" if number.on_gpu else "of each sequence"


FULL = Band()
CAUSAL = Band(right=0)


def reduced(edges: Edges, seqlen_q: int, seqlen_k: int) -> Edges:
    """The edges, with None for a bound that hides nothing: a window that covers everything is planned as if absent."""
    first, last = edges
    if first is not None and first + seqlen_q - 1 <= 0:
        first = None
    if last is not None and last >= seqlen_k - 1:
        last = None
    return first, last


def scores_in_band(edges: Edges, rows: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
    """Visible scores of the rectangle of ``rows`` and ``keys``, [begin, end) each: ints, or arrays for many
    rectangles."""
    (top, bottom), (left, right), (first, last) = rows, keys, edges
    sizes, shift = (bottom - top, right - left), top - left
    up_to_last = sizes[0] * sizes[1] if last is None else _keys_up_to(last + shift, *sizes)
    return up_to_last - (0 if first is None else _keys_up_to(first - 1 + shift, *sizes))


def _keys_up_to(last: Any, rows: Any, keys: Any) -> Any:
    """Pairs of row i and key j ≤ i + last: the sum over rows of clamp(i + 1 + last, 0, keys)."""
    rows_before = np.clip(-last, 0, rows)  # rows that see no key: i + 1 + last ≤ 0 up to i = -last - 1
    rows_until_all = np.clip(keys - 1 - last, rows_before, rows)  # from here on a row sees all keys
    growing = rows_until_all - rows_before
    smallest = rows_before + 1 + last
    return growing * (2 * smallest + growing - 1) // 2 + (rows - rows_until_all) * keys


def _band_tiles(edges: Edges, block_rows: int, block_columns: int, rows: int, columns: int) -> TileRanges:
    """Column tiles of each row block under a band."""
    first, last = edges
    row_first = np.arange(-(-rows // block_rows), dtype=np.int64) * block_rows
    row_last = np.minimum(row_first + block_rows, rows) - 1
    nothing = np.zeros_like(row_first)
    # Columns that some row sees, and columns that every row sees; both ends included.
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
    # If no tile is clear, all count as masked tiles on the right, as in the kernels' walk.
    return TileRanges(
        tile_first, tile_end, np.where(none, tile_first, clear_first), np.where(none, tile_first, clear_end)
    )
