"""Masks of any shape: one bit for each score.

Kernels read the bits of a tile. A pass before the kernel finds, for each tile, whether some score and whether every
score is visible: ``cuda_src/shared/bit_mask.cuh``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .integers import Integers
from .mask_family import Edges, Mask
from .tile_classes import Bools, Ints

WORD = 32
"""Scores in a word of bits."""

_ROWS_AT_ONCE = 256  # rows that are unpacked at a time


@dataclasses.dataclass(frozen=True, repr=False)
class Bits(Mask):
    """Query i sees key j where bit ``j % 32`` of ``by_row[..., i, j // 32]`` is set. Bits past the end are 0."""

    by_row: Integers
    """int32 (batch or 1, kv_heads or 1, seqlen_q, words)."""
    keys: int
    """seqlen_k."""
    own_diagonal: bool = False
    """Each sequence has its own δ, from its lengths; else all have that of the whole matrix."""

    def __post_init__(self) -> None:
        words = self.by_row.shape[-1]
        if words != -(-self.keys // WORD):
            raise ValueError(f"by_row has {words:,} words of {WORD} keys for {self.keys:,} keys")

    @staticmethod
    def of(seen: Any) -> Bits:
        """The mask of NumPy booleans, (batch or 1, kv_heads or 1, seqlen_q, seqlen_k)."""
        return Bits(Integers(packed(seen)), seen.shape[-1])

    transposed_on_gpu: ClassVar[Callable[..., Any]]
    """(words by row, keys) to words by key: :func:`cufa.run.cuda.mask_bits.transposed`."""

    @functools.cached_property
    def by_key(self) -> Integers:
        """int32 (batch or 1, kv_heads or 1, seqlen_k, words): the same bits for kernels that keep a block of keys."""
        words = self.by_row.array
        if self.by_row.on_gpu:
            return Integers(type(self).transposed_on_gpu(words, self.keys))
        bits = np.unpackbits(words.view(np.uint8).reshape(-1), bitorder="little")
        seen = bits.reshape(*words.shape[:3], WORD * words.shape[3])[..., : self.keys]
        return Integers(packed(seen.swapaxes(2, 3)))

    @property
    def matrix(self) -> tuple[int, int]:
        return self.by_row.shape[2], self.keys

    def at(self, batch: int, head: int) -> Bits:
        if self.spread == (1, 1):
            return self
        batches, heads = self.spread
        b, h = (batch if batches > 1 else 0), (head if heads > 1 else 0)
        return dataclasses.replace(self, by_row=Integers(self.by_row.values[b : b + 1, h : h + 1]))

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """δ: in shorter sequences, too, row i and key j mean bit (i, j)."""
        rows, keys = (seqlen_q, seqlen_k) if self.own_diagonal else self.matrix
        return keys - rows

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        return None, None

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        row, key = np.clip(row, 0, seqlen_q - 1), np.clip(key, 0, seqlen_k - 1)
        words: npt.NDArray[np.int32] = self.by_row.values[0, 0][row, key // WORD]
        return (words >> (key % WORD).astype(np.int32) & 1).astype(bool)

    # --- Which matrices there are -------------------------------------------------------------------------

    @property
    def spread(self) -> tuple[int, int]:
        batch, heads, *_ = self.by_row.shape
        return batch, heads

    @property
    def known(self) -> bool:
        return self.by_row.known

    @property
    def outline(self) -> Mask:
        from .mask import Band

        return (
            self if self.known else Band(diagonal="bottom-right" if self.own_diagonal else self.shift(0, 0))
        )

    def as_json(self) -> dict[str, Any]:
        """JSON; ``own_diagonal`` where it is True."""
        return {name: x for name, x in super().as_json().items() if name != "own_diagonal" or x}

    def on_host(self) -> Bits:
        return dataclasses.replace(self, by_row=self.by_row.on_host())

    # --- What kernels must do for it ----------------------------------------------------------------------

    @property
    def irregular_kind(self) -> str:
        return "bits"

    def params(self, seqlen_q: int, seqlen_k: int, by_key: bool = False) -> dict[str, int | Integers]:
        bits = self.by_key if by_key else self.by_row
        sequences, heads, _, words = bits.shape
        return {"runs": bits, "sequences": sequences, "heads": heads, "keys": words}

    def classes_in_advance(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Words of the classes of :data:`WORD` tiles side by side, for each group of rows
        (:func:`rows_of_a_class`)."""
        sequences, heads = self.spread
        rows, blocks = -(-seqlen_q // rows_of_a_class(block_q)), -(-seqlen_k // block_kv)
        return sequences * heads * rows * -(-blocks // WORD)

    workspace_holds = "whether some and whether every score of a tile is visible"

    def workspace_bytes(self, seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int) -> int:
        """Two words for each word of classes, along rows or along keys."""
        sequences, heads = self.spread
        rows, blocks = -(-seqlen_q // rows_of_a_class(block_q)), -(-seqlen_k // block_kv)
        return 8 * sequences * heads * max(rows * -(-blocks // WORD), blocks * -(-rows // WORD))

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        """Both answers are exact."""
        some, every = (np.zeros((len(q_first), len(k_first)), bool) for _ in range(2))
        starts = k_first - k_first[0]
        for block, (first, end) in enumerate(zip(q_first, q_end, strict=True)):
            seen = self._rows(int(first), int(end))[:, k_first[0] : k_end[-1]]
            some[block] = np.logical_or.reduceat(seen.any(axis=0), starts)
            every[block] = np.logical_and.reduceat(seen.all(axis=0), starts)
        return some, every

    def visible_per_key(
        self, seqlen_q: int, seqlen_k: int, first_row: int = 0, end_row: int | None = None
    ) -> Ints:
        end = seqlen_q if end_row is None else min(end_row, seqlen_q)
        count = np.zeros(seqlen_k, np.int64)
        for first in range(max(first_row, 0), end, _ROWS_AT_ONCE):
            count += self._rows(first, min(first + _ROWS_AT_ONCE, end))[:, :seqlen_k].sum(axis=0)
        return count

    def _rows(self, first: int, end: int) -> Bools:
        """Rows of the first sequence and head, bool (rows, whole words of keys)."""
        words = self.by_row.values[0, 0, first:end]
        return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(bool)

    def __str__(self) -> str:
        where = ", on a GPU" if self.by_row.on_gpu else ""
        return "bits of {:,} × {:,} scores".format(*self.matrix) + where


def rows_of_a_class(block_q: int) -> int:
    """Query rows that share a tile class: 64, the rows of a consumer warpgroup, or a whole tile."""
    return 64 if block_q % 64 == 0 else block_q


def packed(seen: Any) -> npt.NDArray[np.int32]:
    """int32 (..., words): bit n of a word is element n of 32 along the last axis."""
    missing = -seen.shape[-1] % WORD
    if missing:
        seen = np.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, missing)])
    bits = np.packbits(np.ascontiguousarray(seen).reshape(-1), bitorder="little")
    return bits.view(np.int32).reshape(*seen.shape[:-1], seen.shape[-1] // WORD)
