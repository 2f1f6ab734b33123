"""Large products of parameters, sampled by day.

A test marked ``@pytest.mark.sampled(dated=3, pairs=[("spec", "config")])`` runs few of its cases: a fixed set in which
every value of every parameter occurs, and every two values of each of ``pairs``, and as many ``dated`` ones, which the
date draws from the rest. What today's run leaves out another day's finds, and ``make test-nightly`` runs all of them.

One environment variable says which: ``CUFA_TEST_DATE``, a date or "all". It is set once, so that all worker processes
agree, and printed, so that a failure can be repeated on another day.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from cufa.nvrtc.covering import covering

VARIABLE = "CUFA_TEST_DATE"
EVERY_CASE = "all"

T = TypeVar("T")


def settle_date(every_case: bool) -> str:
    """Keep one date for this process and those that it starts; returns it."""
    if every_case:
        os.environ[VARIABLE] = EVERY_CASE
    return os.environ.setdefault(VARIABLE, datetime.datetime.now(datetime.UTC).date().isoformat())


def date() -> str:
    return settle_date(every_case=False)


def of_today(cases: Sequence[T], key: str, *, fixed: int = 1, dated: int = 1) -> list[T]:
    """The first ``fixed`` of ``cases`` and ``dated`` others, drawn by the date and ``key``; all of them nightly."""
    if date() == EVERY_CASE:
        return list(cases)
    return [*cases[:fixed], *_drawn(cases[fixed:], dated, key)]


def chosen(
    rows: Sequence[dict[str, Any]], key: str, *, dated: int, pairs: Iterable[tuple[str, str]]
) -> set[int]:
    """Indices of the rows of parameters that today's run keeps."""
    everything = range(len(rows))
    if date() == EVERY_CASE:
        return set(everything)
    # In an order that is fixed but mixed, as of rows that cover as much the first is taken: else nearly all would have
    # the first value of what is in no pair.
    mixed = random.Random(key).sample(everything, len(rows))
    named = [{name: _name(value) for name, value in rows[i].items()} for i in mixed]
    fixed = {mixed[i] for i in covering(named, list(pairs))}
    return fixed | set(_drawn([i for i in everything if i not in fixed], dated, key))


def _drawn(cases: Sequence[T], number: int, key: str) -> list[T]:
    return random.Random(f"{date()} {key}").sample(cases, min(number, len(cases)))


def _name(value: Any) -> str:
    """What tells a parameter's values apart: kernels by their names, all else by its text."""
    return str(getattr(value, "name", value))
