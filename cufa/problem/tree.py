"""Trees of new tokens: what each token sees of the others. Device side: ``cuda_src/shared/tree.cuh``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: What ``tree=`` may be: parents (batch, tokens) int32, or booleans (batch, tokens, tokens).
TREE_KINDS = ("", "parents", "matrix")


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
    """Raises ValueError for a parent that does not come before its child, and for a row of booleans that names a later
    token or not its own."""
    tokens = tree.shape[1]
    if tree.ndim == 2:
        wrong = np.argwhere((tree < -1) | (tree >= np.arange(tokens)))
        if len(wrong):
            b, token = wrong[0].tolist()
            raise ValueError(
                f"tree[{b}, {token}] is {tree[b, token]}: a parent is a token before its child, 0 to {token - 1}, or "
                "-1 for a root"
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
