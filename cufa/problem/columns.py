"""Masks that hide each key from one or two runs of rows: FlashMask's form (Wang et al., 2024, arXiv 2410.01359), within
a band.

Kernels and this file classify a tile by the least and the greatest begin and end of the runs in a key block. A tile is
skipped if one run covers its rows for every key, and clear if no run touches it. A visited tile may hold no visible
score; a skipped tile never holds one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .integers import INT32, Integers
from .mask import Band, Mask, scores_in_band
from .mask_family import PAD, Edges, broadcast_count, rows_in, shift_of
from .tile_classes import Bools, Ints, TileRanges

#: Begin and end of a run that is unbounded on that side.
FROM_THE_START, TO_THE_END = int(INT32.min), int(INT32.max)

_RUN_BYTES, _EXTREMES_BYTES = 8, 16  # per key, and per key block: cuda_src/shared/irregular_mask.cuh


@dataclasses.dataclass(frozen=True, repr=False)
class Columns(Mask):
    """``band`` with hidden runs of rows: key j is hidden from rows with ``lo[j] <= i + δ < hi[j]``; from no row if
    ``lo >= hi``."""

    band: Band
    intervals: Integers
    """int32 (2 or 4, batch or 1, kv_heads or 1, seqlen_k): lo, hi of one run, or of two. The array may have more keys
    than a call."""
    rows: str | int = "top-left"
    """δ in the form of a band's diagonal. "top-left": runs count rows from 0. "bottom-right": runs count positions
    among the keys, so that the last query has the position of the last key."""
    title: str = ""
    """The name that the builder gave the mask."""

    def at(self, batch: int, head: int) -> Columns:
        if self.spread == (1, 1):
            return self
        values = self.intervals.values
        (batches, heads), band = values.shape[1:3], self.band.at(batch, head)
        b, h = (batch if batches > 1 else 0), (head if heads > 1 else 0)
        return dataclasses.replace(self, band=band, intervals=Integers(values[:, b : b + 1, h : h + 1]))

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        return self.band.shift(seqlen_q, seqlen_k)

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        seen = self.band._visible(row, key, seqlen_q, seqlen_k)
        place, key = row + shift_of(self.rows, seqlen_q, seqlen_k), np.clip(key, 0, seqlen_k - 1)
        for lo, hi in self._runs(seqlen_k):
            seen &= ~((lo[key] <= place) & (place < hi[key]))
        return seen

    def _runs(self, seqlen_k: int) -> list[tuple[Ints, Ints]]:
        """(lo, hi) of each key, for the first sequence and head."""
        values = self._values(seqlen_k).astype(np.int64)
        return list(zip(values[::2], values[1::2], strict=True))

    def _values(self, seqlen_k: int) -> npt.NDArray[np.int32]:
        """(2 or 4, seqlen_k): the numbers of the first sequence and head."""
        length = self.intervals.shape[-1]
        if length < seqlen_k:
            raise ValueError(f"the mask has numbers for {length:,} keys, not for {seqlen_k:,}: {self}")
        return self.intervals.values[:, 0, 0, :seqlen_k]

    def _extremes(self, first: Ints, end: int) -> Iterator[tuple[Ints, ...]]:
        """Least lo, greatest lo, least hi and greatest hi of each key block, for each run. ``first`` are the first
        keys of the blocks, ``end`` is the end of the last. An empty run covers no tile and touches none."""
        values, starts = self._values(end), self.intervals.starts
        starts = starts[: np.searchsorted(starts, end)]
        # A key has the values of the last start at or before it.
        before = np.searchsorted(starts, first)
        keys, places = np.insert(starts, before, first), before + np.arange(len(first))
        for lo, hi in zip(values[::2], values[1::2], strict=True):
            lo, hi = lo[keys].astype(np.int64), hi[keys].astype(np.int64)
            nothing = lo >= hi
            lo, hi = np.where(nothing, TO_THE_END, lo), np.where(nothing, FROM_THE_START, hi)
            yield tuple(f.reduceat(x, places) for x in (lo, hi) for f in (np.minimum, np.maximum))

    def _extremes_of_tiles(self, block_kv: int, seqlen_k: int) -> list[tuple[Ints, ...]]:
        """:meth:`_extremes` of all key blocks. Cached, because planners compare tilings."""
        kept: dict[tuple[int, int], list[tuple[Ints, ...]]] = self.__dict__.setdefault("_kept_extremes", {})
        if (block_kv, seqlen_k) not in kept:
            kept[block_kv, seqlen_k] = list(self._extremes(np.arange(0, seqlen_k, block_kv), seqlen_k))
        return kept[block_kv, seqlen_k]

    @property
    def num_intervals(self) -> int:
        return self.intervals.shape[0] // 2

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        return self.band.edges(seqlen_q, seqlen_k)

    # --- Which matrices there are -------------------------------------------------------------------------

    @property
    def matrix(self) -> tuple[int, int] | None:
        return self.band.matrix

    @property
    def spread(self) -> tuple[int, int]:
        _, batch, heads, _ = self.intervals.shape
        return broadcast_count(batch, self.band.spread[0]), heads

    def misfit(
        self, batch: int, kv_heads: int, seqlen_q: int | None = None, seqlen_k: int | None = None,
        packed: bool = False,
    ) -> str | None:  # fmt: skip
        length = self.intervals.shape[-1]
        if seqlen_k is None:
            return "has numbers for each key, which calls with a cache do not take: use a band"
        if packed and length < seqlen_k:
            return f"has numbers for {length:,} keys but a packed sequence has up to {seqlen_k:,}{PAD}"
        if not packed and length != seqlen_k:
            return f"has numbers for {length:,} keys but k has {seqlen_k:,}: make it for {seqlen_k:,}"
        sizes = batch, kv_heads, seqlen_q, seqlen_k, packed
        return self.band.misfit(*sizes) or super().misfit(*sizes)

    @property
    def known(self) -> bool:
        return self.intervals.known and self.band.known

    @property
    def outline(self) -> Mask:
        return self if self.known else self.band.outline

    def on_host(self) -> Columns:
        return dataclasses.replace(self, band=self.band.on_host(), intervals=self.intervals.on_host())

    # --- What kernels must do for it ----------------------------------------------------------------------

    @property
    def irregular_kind(self) -> str:
        return "columns" if self.num_intervals == 1 else "columns2"

    def params(self, seqlen_q: int, seqlen_k: int, by_key: bool = False) -> dict[str, int | Integers]:
        _, sequences, heads, keys = self.intervals.shape
        shift = shift_of(self.rows, seqlen_q, seqlen_k)
        return {
            "runs": self.intervals,
            "sequences": sequences,
            "heads": heads,
            "keys": keys,
            "run_shift": shift,
        }

    workspace_holds = (
        "the runs of rows in which each key is hidden, and their least and greatest ends per key block"
    )

    def classes_in_advance(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Runs of each key block."""
        _, sequences, heads, _ = self.intervals.shape
        return sequences * heads * self.num_intervals * -(-seqlen_k // block_kv)

    def workspace_bytes(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Bytes of the runs of whole key blocks, and of the least and greatest ends in each key block."""
        blocks = self.classes_in_advance(seqlen_q, seqlen_k, block_q, block_kv)
        return blocks * (block_kv * _RUN_BYTES + _EXTREMES_BYTES)

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        some, every = self.band.rectangles(q_first, q_end, k_first, k_end, seqlen_q, seqlen_k)
        shift = shift_of(self.rows, seqlen_q, seqlen_k)
        top, end = q_first[:, None] + shift, q_end[:, None] + shift
        for least_lo, greatest_lo, least_hi, greatest_hi in self._extremes(k_first, int(k_end[-1])):
            some &= ~((top >= greatest_lo) & (end <= least_hi))
            every &= ~((top < greatest_hi) & (end > least_lo))
        return some, every

    def visits(self, block_q: int, block_kv: int, seqlen_q: int, seqlen_k: int) -> Ints:
        if self.band.irregular_kind:
            return super().visits(block_q, block_kv, seqlen_q, seqlen_k)
        seen = self.band.query_tiles(block_q, block_kv, seqlen_q, seqlen_k)
        assert isinstance(seen, TileRanges)
        # A key tile is visited by the query blocks first … end - 1, minus the query blocks that a run of rows covers.
        ranges, shift = [(1, seen.first, seen.end)], shift_of(self.rows, seqlen_q, seqlen_k)
        for _, greatest_lo, least_hi, _ in self._extremes_of_tiles(block_kv, seqlen_k):
            begin, end = -((shift - greatest_lo) // block_q), least_hi - shift
            end = np.where(end < seqlen_q, end // block_q, seen.end)
            ranges.append((-1, np.maximum(begin, seen.first), np.minimum(end, seen.end)))
        if len(ranges) == 3:  # query blocks that both runs cover are subtracted twice
            (_, begin, end), (_, begin2, end2) = ranges[1:]
            ranges.append((1, np.maximum(begin, begin2), np.minimum(end, end2)))
        steps = np.zeros(-(-seqlen_q // block_q) + 1, np.int64)
        for count, begin, end in ranges:
            holds = begin < end
            for places, step in ((begin, count), (end, -count)):
                steps += step * np.bincount(places[holds], minlength=len(steps))
        return np.cumsum(steps)[:-1]

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        if self.band.irregular_kind:
            return super().visible_scores(seqlen_q, seqlen_k)
        values, starts = self._values(seqlen_k), self.intervals.starts
        starts = starts[: np.searchsorted(starts, seqlen_k)]
        keys, edges = (starts, np.append(starts[1:], seqlen_k)), self.band.edges(seqlen_q, seqlen_k)
        runs = values[:, starts].astype(np.int64) - shift_of(self.rows, seqlen_q, seqlen_k)
        hidden = [(-1, lo, hi) for lo, hi in zip(runs[::2], runs[1::2], strict=True)]
        if len(hidden) == 2:  # scores that both runs hide are subtracted twice
            (_, lo, hi), (_, lo2, hi2) = hidden
            hidden.append((1, np.maximum(lo, lo2), np.minimum(hi, hi2)))
        seen = self.band.visible_scores(seqlen_q, seqlen_k)
        for count, lo, hi in hidden:
            top = np.clip(lo, 0, seqlen_q)
            seen += count * int(scores_in_band(edges, (top, np.clip(hi, top, seqlen_q)), keys).sum())
        return seen

    def visible_per_key(
        self, seqlen_q: int, seqlen_k: int, first_row: int = 0, end_row: int | None = None
    ) -> Ints:
        shift = shift_of(self.rows, seqlen_q, seqlen_k)
        hidden = [(lo - shift, hi - shift) for lo, hi in self._runs(seqlen_k)]
        rows = first_row, seqlen_q if end_row is None else end_row
        return rows_in(self.band.seen_rows(seqlen_q, seqlen_k), hidden, rows)

    def __str__(self) -> str:
        where = ", on a GPU" if self.intervals.on_gpu else ""
        title = self.title or f"{self.band}, columns of {self.intervals.shape[-1]:,} keys"
        return f"{title}{where}"


@dataclasses.dataclass(frozen=True, repr=False)
class Chunks(Mask):
    """Causal within chunks of ``size`` keys (Llama 4), for any length: :meth:`for_kernels` computes the runs."""

    size: int
    diagonal: str | int = "bottom-right"

    def for_kernels(self, seqlen_q: int, seqlen_k: int) -> Columns:
        return _chunk_columns(self.size, self.diagonal, seqlen_k)

    def params(self, seqlen_q: int, seqlen_k: int, by_key: bool = False) -> dict[str, int | Integers]:
        return {"chunk": min(self.size, int(INT32.max))}  # of decode kernels

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        return shift_of(self.diagonal, seqlen_q, seqlen_k)

    @property
    def irregular_kind(self) -> str:
        return "columns"

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        return None, self.shift(seqlen_q, seqlen_k)

    def __str__(self) -> str:
        where = "" if self.diagonal == "bottom-right" else f" diagonal {self.diagonal}"
        return f"causal chunks of {self.size}{where}"


@functools.lru_cache(maxsize=16)
def _chunk_columns(size: int, diagonal: str | int, seqlen_k: int) -> Columns:
    end = np.minimum((np.arange(seqlen_k) // size + 1) * size, TO_THE_END)
    intervals = np.stack([end, np.full_like(end, TO_THE_END)])[:, None, None]
    return Columns(Band(right=0, diagonal=diagonal), Integers(intervals), diagonal)


def columns_of(band: Band, runs: list[Any], rows: str | int, title: str, xp: Any = np) -> Columns:
    """The mask from lo, hi of each run: arrays (seqlen_k,), (batch, seqlen_k) or (batch, kv_heads, seqlen_k), or
    ints."""
    spread = xp.broadcast_arrays(*(xp.asarray(run) for run in runs))
    *outer, seqlen_k = spread[0].shape
    shape = *outer, *(1,) * (2 - len(outer)), seqlen_k
    stacked = xp.stack(spread).astype(xp.int32).reshape(len(runs), *shape)
    return Columns(band, Integers(stacked), rows, title)
