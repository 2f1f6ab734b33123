"""Trees of new tokens: what each token sees of the others. Device side: ``cuda_src/shared/tree.cuh``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from .integers import Integers
from .mask import FULL
from .mask_family import Edges, Mask
from .tile_classes import Bools, Ints

#: What ``tree=`` may be: parents (batch, tokens) int32, or booleans (batch, tokens, tokens).
TREE_KINDS = ("", "parents", "matrix")
MAX_TREE = 64
"""Most tokens of a tree: kernels keep what a token sees in 64 bits."""


def ancestors(tree: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether token i sees token j, (batch, tokens, tokens). Token i sees itself and its ancestors (parents), or the
    tokens of its row (booleans)."""
    tokens = tree.shape[1]
    if tree.ndim == 3:
        found: npt.NDArray[np.bool_] = np.tril(tree != 0) | np.eye(tokens, dtype=bool)
        return found
    seen = np.broadcast_to(np.eye(tokens, dtype=bool), (len(tree), tokens, tokens)).copy()
    for token in range(1, tokens):
        parent = tree[:, token]
        known = (parent >= 0) & (parent < token)
        seen[:, token] |= seen[np.arange(len(tree)), np.where(known, parent, 0)] & known[:, None]
    return seen


def check_tree(tree: npt.NDArray[Any]) -> None:
    """Raises ValueError unless every parent comes before its child. Each row of booleans must be True for its own token
    and False for later tokens."""
    tokens = tree.shape[1]
    if tree.ndim == 2:
        wrong = np.argwhere((tree < -1) | (tree >= np.arange(tokens)))
        if len(wrong):
            b, token = wrong[0].tolist()
            raise ValueError(
                f"tree[{b}, {token}] is {tree[b, token]}: a parent is a token before its child, or -1 for a root"
            )
        return
    own = np.eye(tokens, dtype=bool)
    wrong = np.argwhere(np.triu(tree != 0, 1) | (own & (tree == 0)))
    if len(wrong):
        b, i, j = wrong[0].tolist()
        raise ValueError(
            f"tree[{b}, {i}, {j}] is {bool(tree[b, i, j])}: a token sees itself and may see tokens before it, never "
            "later ones"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Tree(Mask):
    """The mask of trees whose tokens are the last keys of their sequence. A new token sees all keys before the new
    tokens, and the new tokens that ``seen`` names."""

    seen: Integers
    """int32: :func:`ancestors`; on a GPU the caller's array, parents or booleans."""

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
