"""Covering arrays: few rows of a product of choices that hold every pair of values at least once.

What breaks a build is nearly always one choice, or two that meet, so a set in which every two meet finds what the
whole product would, and grows with the largest two factors instead of with the product of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

Row = Mapping[str, Hashable]
"""One candidate: its value of each factor, by the factor's name."""


def covering(rows: Sequence[Row], pairs: Collection[tuple[str, str]]) -> list[int]:
    """Indices of few rows that together hold every value of every factor, and every two values of the factors
    of each of ``pairs``, that some row holds. In ascending order, and always the same for the same rows.

    Greedy: each time the row that holds most of what is missing, the first of several.
    """
    held = [frozenset(demands(row, pairs)) for row in rows]
    missing = set().union(*held)
    chosen = []
    # What a row adds only falls, so an entry that is still in front with its true value is the best.
    heap = [(-len(of_row), index) for index, of_row in enumerate(held)]
    heapq.heapify(heap)
    while missing:
        index = heapq.heappop(heap)[1]
        entry = -len(held[index] & missing), index
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        chosen.append(index)
        missing -= held[index]
    return sorted(chosen)


def demands(row: Row, pairs: Collection[tuple[str, str]]) -> Iterator[Hashable]:
    """What a row covers: its values, and those that meet in it. A factor that a row lacks meets none."""
    yield from row.items()
    for one, other in pairs:
        if one in row and other in row:
            yield one, row[one], other, row[other]
