"""Covering sets: everything that can meet does, in few rows, and always in the same ones."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cufa.build.covering import covering

FACTORS = ("a", "b", "c", "d")
ALL_PAIRS = list(itertools.combinations(FACTORS, 2))


def product(**values):
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def covered(rows, pairs):
    """The values that occur, and the two values of a pair of factors that meet in a row."""
    alone = {item for row in rows for item in row.items()}
    return alone | {(a, row[a], b, row[b]) for row in rows for a, b in pairs if a in row and b in row}


@given(
    st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(FACTORS, st.integers(0, 3))), max_size=40),
    st.sets(st.sampled_from(ALL_PAIRS)),
)
def test_all_that_some_row_holds_is_held_by_a_chosen_one(rows, pairs):
    """Rows may lack factors, and some values never meet."""
    chosen = covering(rows, pairs)
    assert chosen == sorted(set(chosen))
    assert covered([rows[i] for i in chosen], pairs) == covered(rows, pairs)


def test_a_product_takes_little_more_than_its_two_largest_factors():
    rows = product(arch=range(6), head_dim=range(3), mask=range(3), element=range(2), cap=range(2))
    chosen = covering(rows, list(itertools.combinations(rows[0], 2)))
    assert 6 * 3 <= len(chosen) <= 6 * 3 + 4
    assert len(rows) == 216


def test_without_pairs_every_value_occurs_once():
    rows = product(arch=range(6), mask=range(3))
    chosen = [rows[i] for i in covering(rows, [])]
    assert len(chosen) == 6
    assert {row["mask"] for row in chosen} == {0, 1, 2}
