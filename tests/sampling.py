"""Large products of parameters, sampled by day.

A parametrised test runs few of its cases when it is marked ``@pytest.mark.sampled(...)``: some that are the same every
day, and some that the date draws from the rest. What today's run leaves out another day's finds, and ``make
test-nightly`` runs all of them. The mark's options:

- ``fixed=n``: about n that are the same every day. They hold every value of every parameter, and every two values of
  each of ``pairs=[("spec", "config")]``, of all that have at most n values. Without ``fixed``: as many as hold all.
- ``dated=n`` more, of the date's.
- ``each="name"``: so many of each value of this parameter, by default one fixed and one of the date's: every planted
  bug runs every day, on two of the schedules.
- ``on="gpu"``: only for this backend of a contract (``support/backends.py``); the cases of each backend are a list of
  their own.

Cases marked ``emulate``, and tests in ``test_emulate_*.py``, need no mark: most of them compile a kernel, so each test
of more than two such cases has ``fixed=1, dated=1``, or what its mark says instead. A long list inside of a test is
shortened by :func:`of_today`. Of the tests marked ``@pytest.mark.in_turn`` (long ways through the dashboard, commands
in processes of their own) each runs on one day of five.

One environment variable says which: ``CUFA_TEST_DATE``, a date or "all". It is set once, so that all worker processes
agree, and printed, so that a failure can be repeated on another day.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from cufa.build.covering import covering

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


#: Of tests that execute kernels, where they have more than FEW cases.
EXECUTOR, FEW = {"fixed": 1, "dated": 1}, 2


def of_today(cases: Sequence[T], key: str, *, fixed: int = 1, dated: int = 1) -> list[T]:
    """The first ``fixed`` of ``cases`` and ``dated`` others, drawn by the date and ``key``; all of them nightly."""
    if date() == EVERY_CASE:
        return list(cases)
    return [*cases[:fixed], *_drawn(cases[fixed:], dated, key)]


def fifth_of_today(cases: Sequence[T]) -> list[T]:
    """Every fifth case, at least one; five days in a row have each once."""
    if date() == EVERY_CASE:
        return list(cases)
    day = datetime.date.fromisoformat(date()).toordinal()
    return list(cases[day % max(1, min(5, len(cases))) :: 5])


def chosen(
    rows: Sequence[dict[str, Any]], key: str, *, fixed: int | None = None, dated: int = 1,
    pairs: Iterable[tuple[str, str]] = (), each: str | None = None,
) -> set[int]:  # fmt: skip
    """Indices of the rows of parameters that today's run keeps; the options are those of the mark."""
    everything = range(len(rows))
    if date() == EVERY_CASE:
        return set(everything)
    # In an order that is fixed but mixed, as of rows that cover as much the first is taken: else nearly all would have
    # the first value of what is in no pair.
    mixed = random.Random(key).sample(everything, len(rows))
    named = [{name: _name(value) for name, value in rows[i].items()} for i in mixed]
    if each is None:
        always = [mixed[i] for i in _covering(named, list(pairs), fixed)]
        return {*always, *_drawn([i for i in everything if i not in always], dated, key)}
    alike: dict[str, list[int]] = {}
    for i, row in zip(mixed, named, strict=True):
        alike.setdefault(row[each], []).append(i)
    fixed = 1 if fixed is None else fixed
    kept = (of_today(of, f"{key} {value}", fixed=fixed, dated=dated) for value, of in alike.items())
    return {i for of_value in kept for i in of_value}


def _covering(rows: list[dict[str, str]], pairs: list[tuple[str, str]], fixed: int | None) -> list[int]:
    """Of about ``fixed`` rows those that hold most; of what has more values than that not all can be among them."""
    if fixed is None:
        return covering(rows, pairs)
    names = {name for row in rows for name in row}
    few_of = {name for name in names if len({row.get(name) for row in rows}) <= fixed}
    few = [{name: value for name, value in row.items() if name in few_of} for row in rows]
    found = covering(
        few, [pair for pair in pairs if len({tuple(map(row.get, pair)) for row in few}) <= fixed]
    )
    return found + [i for i in range(len(rows)) if i not in found][: max(0, fixed - len(found))]


def _drawn(cases: Sequence[T], number: int, key: str) -> list[T]:
    return random.Random(f"{date()} {key}").sample(cases, min(number, len(cases)))


def _name(value: Any) -> str:
    """What tells a parameter's values apart: kernels by their names, all else by its text."""
    return str(getattr(value, "name", value))
