"""The page Doctor under AppTest."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")


from dashboard_page_support import chosen, elsewhere, open_page, parameters, words  # noqa: F401 - a fixture

from cufa.dashboard.model import doctor
from cufa.doctor import Check
from cufa.doctor import Status as CheckStatus


def test_the_doctor_says_what_the_command_says(elsewhere: Path) -> None:
    app = open_page("doctor")
    said = words(app)
    for name in ("python", "kernel sources", "first call", "runs"):
        assert f"**{name}** |" in said
    assert "against float64" in said


def test_problems_come_first_with_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = [
        Check("python", CheckStatus.OK, "3"),
        Check("nvrtc", CheckStatus.PROBLEM, "too <old>", "pip install `x`"),
    ]
    monkeypatch.setattr(doctor, "_doctor", lambda: made_up)
    said = words(open_page("doctor", show="open"))
    assert "1 to fix: nvrtc." in said
    assert "too <old>" in said
    assert "`x`" in said
    assert "**python**" not in said


def test_a_doctor_that_dies_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    (check,) = doctor._doctor()
    assert check.status is CheckStatus.PROBLEM
    assert "exit code 1" in check.detail
