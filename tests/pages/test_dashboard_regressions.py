"""Two cards or days on Compare; History, "Regressions": rows of two versions, ranked, host-bound rows apart."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from dashboard_page_support import has, open_page, words
from dashboard_support import write_evidence

from cufa.dashboard.model import evidence, regressions
from cufa.dashboard.model.measurements import Measurement


def again(
    m: Measurement, factor: float, commit: str = "b" * 12, day: str = "2026-02-01", **changes: Any
) -> Measurement:
    """The same row at another commit, ``factor`` times as slow."""
    times = {name: m.row.json[name] * factor for name in ("p10_ns", "p50_ns", "p90_ns", "low_ns", "high_ns")}
    row = dataclasses.replace(m.row, json={**m.row.json, **times, **changes})
    environment = {**m.environment, "commit": commit}
    return dataclasses.replace(
        m, row=row, recorded=f"{day}T00:00:00+00:00", environment=environment, source=commit
    )


@pytest.fixture
def rows(shipped: Path) -> list[Measurement]:
    """FlashAttention-2 and a peer, of one commit and suite."""
    card = next(e for e in evidence.load() if e.device == "NVIDIA H200")
    found = [m for m in card.rows if m.suite == "forward" and m.label in ("fa2", "torch flash")]
    return [again(m, 1.0, "a" * 12, "2026-01-01") for m in found]


def test_slower_rows_are_found_and_ranked(rows: list[Measurement]) -> None:
    factors = {"fa2": 1.1, "torch flash": 1.01}
    later = [again(m, factors[m.label]) for m in rows]
    changed = regressions.changes([*rows, *later], "a" * 12, "b" * 12)
    assert len(changed) == len(rows)
    ranked = regressions.groups(changed)
    assert {group.name.partition(",")[0] for group in ranked} == {"fa2_forward"}
    assert all(x.is_regression for group in ranked for x in group.changes)
    assert ranked[0].mean == pytest.approx(0.1) and ranked[0].weight == pytest.approx(
        0.0953 * len(ranked[0].changes), rel=1e-3
    )
    assert regressions.drift(changed) == pytest.approx(0.01), "other libraries are the control"


def test_the_same_times_are_no_regression(rows: list[Measurement]) -> None:
    changed = regressions.changes([*rows, *(again(m, 1.0) for m in rows)], regressions.BEFORE, "b" * 12)
    assert changed and not any(x.is_regression for x in changed)


def test_host_bound_rows_count_for_nothing(rows: list[Measurement]) -> None:
    later = [again(m, 2.0, load={"host_bound": True}) for m in rows if m.kernel]
    (group, *_) = regressions.groups(regressions.changes([*rows, *later], "a" * 12, "b" * 12))
    assert not group.counted and group.weight == 0 and group.mean == 0
    assert all(x.host_bound and not x.is_regression for x in group.changes)


def test_against_the_measurement_before(rows: list[Measurement]) -> None:
    """Of three versions, the newest earlier one; never a later one."""
    middle = [again(m, 1.5, "c" * 12, "2026-01-15") for m in rows]
    later = [again(m, 3.0) for m in rows]
    changed = regressions.changes([*rows, *middle, *later], regressions.BEFORE, "b" * 12)
    assert {regressions.version(x.before) for x in changed} == {"c" * 12}
    changed = regressions.changes([*rows, *middle, *later], regressions.BEFORE, "c" * 12)
    assert {regressions.version(x.before) for x in changed} == {"a" * 12}


def test_commits_between_are_of_this_checkout() -> None:
    assert regressions.commits_between("no", "commit") == ()


def test_the_page_of_recorded_sessions(shipped: Path) -> None:
    app = open_page("history", regressions="1", rm="NVIDIA H200")
    has(
        words(app),
        "Regressions",
        "are slower,",
        "regimes are never mixed",
        "Control: other libraries",
        "| fa3_",
    )


def test_one_version_is_not_compared(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    has(words(open_page("history", regressions="1")), "No machine has measurements of two versions")
    has(words(open_page("compare")), "No kernel was measured on two cards or days.")


def test_earlier_sessions_that_cannot_be_read_are_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged() -> None:
        raise ValueError("a file is damaged")

    monkeypatch.setattr(evidence, "past", damaged)
    write_evidence(elsewhere / "records")
    for name in ("compare", "history"):
        has(words(open_page(name)), "Earlier measurements cannot be read: a file is damaged")


def test_two_cards_stand_in_one_figure(shipped: Path) -> None:
    """The times of both in words, and never two regimes."""
    app = open_page("compare")
    said = words(app)
    has(said, "Two cards, or two days")
    verdict = re.search(
        r"NVIDIA [^.;]* takes ([0-9.]+)× the time of (NVIDIA [^.;]*) over \d+ common problems", said
    )
    assert verdict and 0.5 < float(verdict[1]) < 2
    (choice,) = (x for x in app.selectbox if x.label == "Kernel, shapes and regime")
    assert all(x.endswith(("in turns", "sustained")) for x in choice.options)
