"""Masks that tests draw, and what each tile of one is, from every score."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cufa.plan.planner import Plan
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


def assert_visited(plan: Plan, seen: np.ndarray, records: np.ndarray) -> None:
    """The tiles that each block visits, by the schedule and by the kernel's records, are those with a visible score
    (all of them where none is skipped); the clear ones are whole, and every row sees every key."""
    schedule = plan.schedule
    sides = (schedule.block_q, schedule.block_kv)
    some, clear = tiles_of(seen.T, *sides[::-1]) if schedule.by_keys else tiles_of(seen, *sides)
    visited = some if schedule.skip_masked_tiles else np.ones_like(some)
    np.testing.assert_array_equal(schedule.classes > 0, visited)
    tile = np.arange(some.shape[1])
    for record in records:
        for of_block, first, count in (
            (visited, "first_tile", "tiles_visited"),
            (clear, "first_clear", "tiles_clear"),
        ):
            inside = (tile >= record[first]) & (tile < int(record[first]) + int(record[count]))
            np.testing.assert_array_equal(inside, of_block[record["q_block"]])
