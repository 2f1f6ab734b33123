"""The mask of trees of new tokens (:mod:`cufa.problem.tree`), whose queries are the last keys of their sequence."""

from __future__ import annotations

import dataclasses

import numpy as np

from .integers import Integers
from .mask_family import Edges, Mask
from .tile_classes import Bools, Ints

MAX_TREE = 64
"""Most tokens of a tree: kernels keep what a token sees in 64 bits."""


@dataclasses.dataclass(frozen=True, repr=False)
class Tree(Mask):
    """A new token sees all keys before the new tokens, and the new tokens that ``seen`` names."""

    seen: Integers
    """int32: :func:`~cufa.problem.tree.ancestors`; on a GPU the caller's array, parents or booleans."""

    irregular_kind = ""

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        """No edges: kernels hide scores among new tokens by the tree."""
        return None, None

    @property
    def spread(self) -> tuple[int, int]:
        return (self.seen.shape[0] if self.known else 1), 1

    def at(self, batch: int, head: int) -> Mask:
        return Tree(Integers(self.seen.values[batch : batch + 1])) if self.spread[0] > 1 else self

    @property
    def known(self) -> bool:
        return self.seen.known

    @property
    def outline(self) -> Mask:
        from .mask import FULL

        return self if self.known else FULL

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        seen, new = self.seen.values[0] != 0, key - self.shift(seqlen_q, seqlen_k)
        last = len(seen) - 1
        visible: Bools = (new < 0) | seen[np.clip(row, 0, last), np.clip(new, 0, last)]
        return visible

    def rectangles(
        self, q_first: Ints, q_end: Ints, k_first: Ints, k_end: Ints, seqlen_q: int, seqlen_k: int
    ) -> tuple[Bools, Bools]:
        every = np.broadcast_to(k_end <= self.shift(seqlen_q, seqlen_k), (len(q_first), len(k_first)))
        return np.ones(every.shape, bool), every

    def visible_per_key(
        self, seqlen_q: int, seqlen_k: int, first_row: int = 0, end_row: int | None = None
    ) -> Ints:
        rows = np.arange(first_row, seqlen_q if end_row is None else end_row)
        count: Ints = self.visible(rows, np.arange(seqlen_k), seqlen_q, seqlen_k).sum(axis=0, dtype=np.int64)
        return count

    def __str__(self) -> str:
        return f"tree of {self.seen.shape[1]} tokens"
