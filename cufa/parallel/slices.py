"""A mask seen from a part of the score matrix: the mask of some rows and keys as a mask of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..problem.columns import FROM_THE_START, TO_THE_END, Columns
from ..problem.integers import Integers
from ..problem.mask import FULL, Band, Mask
from ..problem.mask_family import shift_of
from .placement import Range, Segment

_BLOCK = 128
"""Tokens of a block: transfers and calls are trimmed to whole blocks."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """The mask of a score matrix, and the sizes of that matrix."""

    mask: Mask
    seqlen_q: int
    seqlen_k: int
    alibi: bool = False

    @classmethod
    def of(cls, mask: Mask, seqlen_q: int, seqlen_k: int, alibi: bool = False) -> Whole:
        """Chunks and global tokens become runs of rows, because a part of such a mask is not a mask of its kind.
        Raises ValueError for masks that cannot become runs."""
        given = mask
        if not isinstance(mask, (Band, Columns)):
            mask = mask.for_kernels(seqlen_q, seqlen_k)
        if not isinstance(mask, (Band, Columns)):
            raise ValueError(
                f"mask={given}: several ranks take bands, and masks that hide a key from at most two runs of queries; "
                "cufa.flash_attention on one GPU takes this one"
            )
        if isinstance(mask, Band) and not _is_0(mask.global_tokens):
            mask = _runs_of(mask, seqlen_q, seqlen_k)
        if isinstance(mask, Columns) and mask.band.irregular_kind:
            raise ValueError(
                f"mask={mask} has exempt tokens beside runs of rows: several ranks take either, not both"
            )
        return cls(mask, seqlen_q, seqlen_k, alibi)

    @functools.cached_property
    def _each(self) -> list[Mask]:
        batch, heads = self.mask.spread
        return [self.mask.at(b, h) for b in range(batch) for h in range(heads)]

    @property
    def shift(self) -> int:
        return self.mask.shift(self.seqlen_q, self.seqlen_k)

    def rectangle(self, rows: Range, keys: Range) -> tuple[bool, bool]:
        """(May some score be visible, is every score surely visible)."""
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            return False, True
        top, end, left, right = (np.array([x], np.int64) for x in (*rows, *keys))
        classes = [x.rectangles(top, end, left, right, self.seqlen_q, self.seqlen_k) for x in self._each]
        return any(bool(some[0, 0]) for some, _ in classes), all(bool(every[0, 0]) for _, every in classes)

    def trimmed(self, rows: Range, keys: Range) -> tuple[Range, Range]:
        """The rectangle without blocks of rows and of keys at its ends that hold no visible score. Empty ranges if
        there is none."""
        some, every = self.rectangle(rows, keys)
        if not some:
            return (rows[0], rows[0]), (keys[0], keys[0])
        if every:
            return rows, keys
        return self._ends(rows, keys, True), self._ends(rows, keys, False)

    def _ends(self, rows: Range, keys: Range, along_rows: bool) -> Range:
        cut = rows if along_rows else keys
        first = np.arange(cut[0], cut[1], _BLOCK, dtype=np.int64)
        blocks = first, np.minimum(first + _BLOCK, cut[1])
        other = [np.array([x], np.int64) for x in (keys if along_rows else rows)]
        seen = np.zeros(len(first), bool)
        for mask in self._each:
            top, end, left, right = (*blocks, *other) if along_rows else (*other, *blocks)
            seen |= mask.rectangles(top, end, left, right, self.seqlen_q, self.seqlen_k)[0].reshape(-1)
        there = np.flatnonzero(seen)
        if not len(there):
            return cut[0], cut[0]
        return int(blocks[0][there[0]]), int(blocks[1][there[-1]])

    def part(self, rows: Range, keys: Range) -> Mask:
        """The mask of a rectangle. Its rows and keys count from 0."""
        if (rows, keys) == ((0, self.seqlen_q), (0, self.seqlen_k)):
            return self.mask
        return self.joined(
            [Segment(0, 0, rows[0], rows[1] - rows[0])], [Segment(0, 0, keys[0], keys[1] - keys[0])]
        )

    def joined(self, rows: Sequence[Segment], keys: Sequence[Segment], causal: bool = False) -> Mask:
        """The mask of the rows and keys of these segments, put one after another. One segment of rows and one of keys
        keep the band. With more segments, every score must lie inside the band, or ``causal``: row i sees keys to i."""
        mask = self.mask
        band = mask.band if isinstance(mask, Columns) else mask
        assert isinstance(band, Band)
        alone = len(rows) == len(keys) == 1
        key = keys[0].token
        diagonal = self.shift + rows[0].token - key if alone else 0
        _, every = (
            self.rectangle((rows[0].token, rows[-1].end), (key, keys[-1].end)) if alone else (False, False)
        )
        if causal:
            result = Band(right=0, diagonal=0)
        elif not alone or (every and not self.alibi):
            result = FULL
        else:
            result = Band(
                band.left, band.right, diagonal, _less(band.prefix, key), _less(band.keep, key)
            )  # fmt: skip
            if not self.alibi and not result.irregular_kind:
                result = _plain(result, rows[0].length, keys[0].length)
        if not isinstance(mask, Columns) or every:
            return result
        places = np.concatenate([np.arange(x.token, x.end) for x in keys])
        shift = shift_of(mask.rows, self.seqlen_q, self.seqlen_k)
        values = _local_rows(mask.intervals.values[..., places], rows, shift)
        lo, hi = values[::2], values[1::2]
        if not (lo < hi).any():
            return result
        return Columns(result, Integers(values), "top-left", mask.title)

    def of_heads(self, heads: Range, all_heads: int) -> Whole:
        """The mask of some key/value heads."""
        mask = self.mask
        if not isinstance(mask, Columns) or mask.spread[1] == 1 or heads == (0, all_heads):
            return self
        values = mask.intervals.values[:, :, slice(*heads)]
        return dataclasses.replace(self, mask=dataclasses.replace(mask, intervals=Integers(values)))

    def visible(self, rows: Range, keys: Range) -> int:
        """Visible scores of a rectangle and one head; if heads or sequences differ, their average."""
        part = self.part(rows, keys)
        sizes, masks = (rows[1] - rows[0], keys[1] - keys[0]), []
        batch, heads = part.spread
        masks = [part.at(b, h) for b in range(batch) for h in range(heads)]
        return sum(x.visible_scores(*sizes) for x in masks) // len(masks)


def _local_rows(values: Any, rows: Sequence[Segment], shift: int) -> Any:
    """Ends of runs as numbers of local rows before them; the local rows are those of the segments, one after another.
    (Segments are in ascending order, so runs stay runs.)"""
    token = values.astype(np.int64) - shift
    local, total = np.zeros(token.shape, np.int64), 0
    for x in rows:
        local += np.clip(token - x.token, 0, x.length)
        total += x.length
    local = np.where(values == FROM_THE_START, FROM_THE_START, local)
    return np.where((values == TO_THE_END) | (local >= total), TO_THE_END, local).astype(np.int32)


def _plain(band: Band, rows: int, keys: int) -> Band:
    """The band without edges that hide nothing."""
    first, last = band.edges(rows, keys)
    left = None if first is not None and first + rows - 1 <= 0 else band.left
    right = None if last is not None and last >= keys - 1 else band.right
    return FULL if left is None and right is None else dataclasses.replace(band, left=left, right=right)


def _less(count: int | Integers, keys: int) -> int | Integers:
    """How many of the first ``count`` keys lie at ``keys`` or later."""
    if isinstance(count, int):
        return max(count - keys, 0)
    return Integers(np.maximum(count.values - keys, 0))


def _is_0(count: int | Integers) -> bool:
    return isinstance(count, int) and count == 0


def _runs_of(band: Band, seqlen_q: int, seqlen_k: int) -> Columns:
    """A band with exempt tokens, as two runs of rows that each key is hidden from: before and after the rows that see
    it."""
    runs = []
    for b in range(band.spread[0]):
        one = band.at(b, 0)
        (begin, end), (_, exempt) = one.seen_rows(seqlen_q, seqlen_k)
        # Hidden: [exempt, begin) and [max(end, exempt), ...).
        end = np.maximum(end, exempt)
        runs.append(
            np.stack(
                [exempt, begin, np.where(end >= seqlen_q, TO_THE_END, end), np.full_like(end, TO_THE_END)]
            )
        )
    values = np.clip(np.stack(runs, axis=1)[:, :, None], FROM_THE_START, TO_THE_END).astype(np.int32)
    return Columns(Band(diagonal=band.diagonal), Integers(values), "top-left", str(band))
