"""Samples of large products: what every day has, what the date adds, what a nightly run has."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import sampling

pytest_plugins = ["pytester"]

ROWS = [
    {"kernel": kernel, "width": width, "causal": causal}
    for kernel, width, causal in itertools.product("abcdef", range(8), (False, True))
]
DAYS = [f"2026-11-{day:02}" for day in range(1, 31)]


def chosen(monkeypatch, date, **options):
    monkeypatch.setenv(sampling.VARIABLE, date)
    options = {"dated": 3, "pairs": [("kernel", "causal")], **options}
    return sampling.chosen(ROWS, "a test", **options)


@pytest.mark.parametrize("date", DAYS[:3])
def test_every_value_and_the_pairs_asked_for_are_there_every_day(monkeypatch, date):
    rows = [ROWS[i] for i in chosen(monkeypatch, date)]
    for name in ROWS[0]:
        assert {row[name] for row in rows} == {row[name] for row in ROWS}
    assert len({(row["kernel"], row["causal"]) for row in rows}) == 12
    assert len(rows) < len(ROWS) / 4


def test_the_date_adds_as_many_as_asked_for_and_repeats_them(monkeypatch):
    by_day = [chosen(monkeypatch, day) for day in DAYS]
    fixed = chosen(monkeypatch, DAYS[0], dated=0)
    assert all(len(day - fixed) == 3 and fixed <= day for day in by_day)
    assert len(set().union(*by_day)) > len(ROWS) / 2, "another day draws others"
    assert chosen(monkeypatch, DAYS[0]) == by_day[0]


def test_a_nightly_run_has_every_case(monkeypatch):
    assert chosen(monkeypatch, sampling.EVERY_CASE) == set(range(len(ROWS)))
    assert sampling.of_today(range(9), "key") == list(range(9))


def test_a_list_keeps_its_first_and_the_dates_draw_all_others(monkeypatch):
    seen = set()
    for day in DAYS:
        monkeypatch.setenv(sampling.VARIABLE, day)
        first, *others = sampling.of_today(range(9), "key", fixed=1, dated=2)
        assert first == 0 and len(set(others)) == 2
        seen.update(others)
    assert seen == set(range(1, 9))


def test_five_days_have_each_once(monkeypatch):
    def of(day, cases):
        monkeypatch.setenv(sampling.VARIABLE, day)
        return sampling.fifth_of_today(cases)

    assert sorted(x for day in DAYS[:5] for x in of(day, range(17))) == [*range(17)]
    assert all(len(of(day, range(3))) == 1 for day in DAYS)


def test_values_without_a_name_are_told_apart_by_their_text(monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, DAYS[0])
    rows = [{"value": value} for value in ([1], [2], {"a": 1}, KeyError)]
    assert sampling.chosen(rows, "key", dated=0, pairs=()) == {0, 1, 2, 3}


def test_about_as_many_are_fixed_as_asked_for(monkeypatch):
    for fixed in (2, 6, 9, 20):
        rows = [ROWS[i] for i in chosen(monkeypatch, DAYS[0], dated=0, fixed=fixed)]
        assert len(rows) in range(fixed, fixed + 4)
        assert {row["causal"] for row in rows} == {False, True}
        if fixed >= 6:
            assert {row["kernel"] for row in rows} == set("abcdef")
        if fixed >= 12:
            assert len({(row["kernel"], row["causal"]) for row in rows}) == 12
        assert rows == [ROWS[i] for i in chosen(monkeypatch, DAYS[1], dated=0, fixed=fixed)]


def test_so_many_of_each_value(monkeypatch):
    seen = set()
    for day in DAYS:
        rows = [ROWS[i] for i in chosen(monkeypatch, day, each="kernel", dated=1, pairs=())]
        assert [row["kernel"] for row in rows].count("c") == 2 and len(rows) == 12
        seen.update((row["width"], row["causal"]) for row in rows if row["kernel"] == "c")
    assert len(seen) > 12, "another day draws others"


def test_what_a_run_of_the_tests_keeps(pytester, monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, DAYS[0])
    pytester.makeconftest(Path(sampling.__file__).with_name("conftest.py").read_text())
    test = """
import pytest

@pytest.mark.parametrize("x", range(40))
def test_many(x): pass

@pytest.mark.parametrize("x", range(3))
def test_few(x): pass

@pytest.mark.sampled(each="x")
@pytest.mark.parametrize("y", range(5))
@pytest.mark.parametrize("x", range(10))
def test_each(x, y): pass
"""
    in_turn = "import pytest" + "".join(
        f"""
@pytest.mark.in_turn
def test_{name}(): pass
"""
        for name in "abcde"
    )
    pytester.makepyfile(
        test_emulate_this=test,
        test_that=test.replace("sampled(each", "sampled(dated=3, each"),
        test_turns=in_turn,
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = pytester.runpytest_subprocess("--collect-only", "-q", "-p", "no:cacheprovider")
    names = [line.split("[")[0] for line in done.outlines if "::" in line]
    assert sum(name.startswith("test_turns.py") for name in names) == 1
    names = [name for name in names if not name.startswith("test_turns.py")]
    counts = {name: names.count(name) for name in names}
    assert counts == {
        "test_emulate_this.py::test_many": 2,
        "test_emulate_this.py::test_few": 2,
        "test_emulate_this.py::test_each": 20,
        "test_that.py::test_many": 40,
        "test_that.py::test_few": 3,
        "test_that.py::test_each": 40,
    }
