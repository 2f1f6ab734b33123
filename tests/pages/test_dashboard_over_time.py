"""History: one kernel over dates; power beside times."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from card_support import write_lines
from dashboard_page_support import compiler_back, elsewhere, open_page, words  # noqa: F401 - fixtures among them
from dashboard_support import ENVIRONMENT, write_evidence

from cufa.dashboard.model import evidence
from cufa.measure import cards
from cufa.measure.power import REASONS, Sample, summarise

SHIPPED = cards.RECORDS_DIR


LATER = "2026-02-02T03:04:05+00:00"


def write_another_day(file: Path, factor: float, day: str = LATER, commit: str = "0123456789abcdef") -> None:
    """The same rows at the end of the file, of another day and version, slower or faster."""
    again = [{"what": "session", **ENVIRONMENT, "recorded": day, "commit": commit}]
    for row in cards.read_lines(file):
        if "what" not in row and row["recorded"] == ENVIRONMENT["recorded"]:
            times = {name: round(row[name] * factor) for name in ("p10_ns", "p50_ns", "p90_ns")}
            samples = [round(n * factor) for n in row["samples_ns"]]
            again.append({**row, **times, "samples_ns": samples, "recorded": day})
    write_lines(file, [*cards.read_lines(file), *again])


def test_one_kernel_over_time(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    once = words(open_page("history"))
    assert "Measured once on Made-up GPU, on 2026-01-02" in once
    write_another_day(file, 0.5)
    app = open_page("history")
    said = words(app)
    assert (
        "Measured 2 times on Made-up GPU, 2026-01-02 to 2026-02-02, in 2 versions: the last is 2.00×" in said
    )
    figure = next(e.proto for e in app.get("plotly_chart") if e.proto.alt.startswith("By date: "))
    assert "version 0123456789" in figure.alt
    assert app.selectbox(key="history.series").value in figure.alt
    file.unlink()
    write_another_day(write_evidence(elsewhere / "records"), 1.0)
    assert "no significant difference between first and last" in words(open_page("history"))


def test_earlier_rows_are_the_beginning_of_the_line(elsewhere: Path) -> None:
    """A damaged file is told."""
    file = write_evidence(elsewhere / "records")
    write_another_day(file, 2.0, "2025-12-02T03:04:05+00:00", "fedcba9876543210")
    app = open_page("history")
    assert "Measured 2 times on Made-up GPU, 2025-12-02 to 2026-01-02" in words(app)
    figure = next(e.proto for e in app.get("plotly_chart") if e.proto.alt.startswith("By date: "))
    assert "version fedcba9876" in figure.alt
    assert len(evidence.past()) == len(evidence.measurements())
    file.write_text(file.read_text() + "{}")
    assert "cannot be read" in words(open_page("history"))


def test_the_past_that_ships_is_of_what_is_recorded_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "RECORDS_DIR", SHIPPED)
    recorded = {(m.machine, m.label, m.problem, m.regime) for m in evidence.measurements()}
    shipped = evidence.past()
    assert shipped
    assert all((m.machine, m.label, m.problem, m.regime) in recorded for m in shipped)
    assert [m.recorded for m in shipped if m.machine == "NVIDIA H200"] == sorted(
        m.recorded for m in shipped if m.machine == "NVIDIA H200"
    )


def test_a_problem_of_two_suites_is_one_point(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    lines = cards.read_lines(file)
    write_lines(file, [*lines, *({**x, "suite": "awkward"} for x in lines if x.get("suite") == "forward")])
    assert "Measured once on Made-up GPU, on 2026-01-02" in words(open_page("history"))


def test_a_later_day_is_the_measurement_and_has_its_own_version(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    write_another_day(file, 1.0)
    assert {m.commit for m in evidence.measurements()} == {"0123456789abcdef"}
    assert "0123456789abcdef" not in {m.commit for m in evidence.past()}


def test_throttling_is_the_share_of_samples() -> None:
    reasons = [("power limit",), ("power limit", "thermal limit"), (), ("power limit",)]
    samples = [Sample(0.1 * n, 60.0 * n, 600.0, 1500.0, r) for n, r in enumerate(reasons)]
    found = summarise(samples, 1e-3)
    assert found.throttled == {"power limit": 0.75, "thermal limit": 0.25}
    assert set(found.throttled) <= set(REASONS)
    assert summarise(samples[2:3] * 4, 1e-3).throttled == {}
