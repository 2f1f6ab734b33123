"""Covering arrays: few rows of a product of choices that hold every pair of values at least once.

One choice, or two together, break nearly every bad build. A set in which every two values meet therefore finds what the
whole product would. It grows with the product of the two largest factors, not of all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Hashable]
"""One candidate: its value of each factor, by the factor's name."""


def covering(rows: Sequence[Row], pairs: Collection[tuple[str, str]]) -> list[int]:
    """Indices of few rows that hold every value of every factor, and every two values of the two factors of each of
    ``pairs``, if any row holds them. Ascending, and always the same for the same rows.

    Greedy: each step takes the row with the most missing values and pairs, the first if several have as many.
    """
    held, demanded = _numbered(rows, pairs)
    missing = np.ones(demanded, bool)
    missing[0] = False
    adds = np.count_nonzero(held, axis=0)
    chosen = []
    while adds.any():
        best = int(adds.argmax())
        chosen.append(best)
        for column in held[missing[held[:, best]]]:
            adds -= column == column[best]
        missing[held[:, best]] = False
    return sorted(chosen)


def _numbered(rows: Sequence[Row], pairs: Collection[tuple[str, str]]) -> tuple[np.ndarray[Any, Any], int]:
    """Numbers of the demands that each row covers, (demands, rows), and one more than the largest. 0: the row has
    no value of the factor, or of one of two factors."""
    values = {name: _codes(rows, name) for name in {name: None for row in rows for name in row}}
    columns, largest = [], 0
    for one, other in [*((name, None) for name in values), *pairs]:
        if one not in values or (other is not None and other not in values):
            continue
        code = values[one]
        if other is not None:
            code = np.where(
                (code > 0) & (values[other] > 0), code * (values[other].max() + 1) + values[other], 0
            )
        columns.append(np.where(code > 0, code + largest, 0))
        largest = max(largest, int(columns[-1].max()))
    return np.array(columns, np.int32).reshape(len(columns), len(rows)), largest + 1


def _codes(rows: Sequence[Row], name: str) -> np.ndarray[Any, Any]:
    """The value of one factor in each row, in numbers from 1; 0 where a row has none."""
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(row[name], len(numbers) + 1) if name in row else 0 for row in rows]
    return np.array(codes, np.int32)
