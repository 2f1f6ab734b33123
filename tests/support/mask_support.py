"""Masks that tests draw, and what each tile of one is, from every score."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cufa.problem.mask import CAUSAL, FULL, Band, Mask

_SIDE = st.one_of(st.none(), st.integers(0, 4), st.integers(0, 90))
_DIAGONAL = st.one_of(st.sampled_from(["bottom-right", "top-left"]), st.integers(-90, 90))

#: Any band: bounded on both sides, on one or on none, however its diagonal lies.
BANDS: st.SearchStrategy[Mask] = st.one_of(
    st.sampled_from([FULL, CAUSAL]), st.builds(Band, _SIDE, _SIDE, _DIAGONAL)
)


def tiles_of(seen: np.ndarray, block_rows: int, block_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(some score seen, all of a whole tile's columns seen) of every tile; rows past the end do not count."""
    rows, columns = (-(-n // b) for n, b in zip(seen.shape, (block_rows, block_columns), strict=True))
    some, clear = np.zeros((rows, columns), bool), np.zeros((rows, columns), bool)
    for i, j in np.ndindex(some.shape):
        tile = seen[i * block_rows : (i + 1) * block_rows, j * block_columns : (j + 1) * block_columns]
        some[i, j], clear[i, j] = tile.any(), tile.all() and tile.shape[1] == block_columns
    return some, clear
