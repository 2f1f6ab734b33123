"""History: one kernel over dates; power beside times."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from dashboard_page_support import compiler_back, elsewhere, open_page, words  # noqa: F401 - fixtures among them
from dashboard_support import write_evidence

from cufa.dashboard.model import evidence
from cufa.measure import past, records
from cufa.measure.power import REASONS, Sample, summarise

SHIPPED = records.RECORDS_DIR


def write_another_day(file: Path, factor: float) -> None:
    """The same evidence a month later, of another version, slower or faster."""
    record = json.loads(file.read_text())
    record["environment"] |= {"recorded": "2026-02-02T03:04:05+00:00", "commit": "0123456789abcdef"}
    for suite in record["suites"].values():
        for row in suite["rows"]:
            for name in ("p10_ns", "p50_ns", "p90_ns"):
                row[name] = round(row[name] * factor)
            row["samples_ns"] = [round(n * factor) for n in row["samples_ns"]]
    file.with_name("later.json").write_text(json.dumps(record))


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
    write_another_day(file, 1.0)
    assert "first and last show no difference" in words(open_page("history"))


def test_earlier_evidence_is_the_beginning_of_the_line(elsewhere: Path) -> None:
    """Its percentiles are those of all samples; what is filtered out has no past; a damaged file is told."""
    file = write_evidence(elsewhere / "records")
    now = json.loads(file.read_text())
    before = past.compact(now)
    before["environment"] = {
        **now["environment"],
        "recorded": "2025-12-02T03:04:05+00:00",
        "commit": "fedcba9876543210",
    }
    ours = [row for name in before["suites"] for row in now["suites"][name]["rows"] if "kernel" in row]
    kept = [row for suite in before["suites"].values() for row in suite["rows"]]
    assert len(kept) == len(ours) > 2
    for row, whole in zip(kept, ours, strict=True):
        for q in (10, 50, 90):
            assert round(np.percentile(row["samples_ns"], q)) == round(np.percentile(whole["samples_ns"], q))
    folder = elsewhere / "records" / past.FOLDER
    folder.mkdir()
    (folder / file.name).write_text(json.dumps({"records": [before]}))
    app = open_page("history")
    assert "Measured 2 times on Made-up GPU, 2025-12-02 to 2026-01-02" in words(app)
    figure = next(e.proto for e in app.get("plotly_chart") if e.proto.alt.startswith("By date: "))
    assert "version fedcba9876" in figure.alt
    (folder / file.name).write_text('{"records": [{}]}')
    assert "Earlier evidence cannot be read" in "".join(w.value for w in open_page("history").warning)


def test_the_past_that_ships_is_of_what_is_recorded_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_DIR", SHIPPED)
    recorded = {(m.machine, m.label, m.problem, m.regime) for m in evidence.measurements()}
    shipped = evidence.past()
    assert shipped
    again = sum((m.machine, m.label, m.problem, m.regime) in recorded for m in shipped)
    assert again > len(shipped) / 2
    assert all(len(m.timing.samples) == 11 for m in shipped)


def test_a_problem_of_two_suites_of_one_record_is_one_point(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    record = json.loads(file.read_text())
    record["suites"]["awkward"] = record["suites"]["forward"]
    file.write_text(json.dumps(record))
    assert "Measured once on Made-up GPU, on 2026-01-02" in words(open_page("history"))


def test_a_later_day_has_its_own_version(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    write_another_day(file, 1.0)
    found = [m for m in evidence.measurements() if m.label == "fa2"]
    versions = {m.commit for m in found if m.problem == found[0].problem}
    assert len(versions) == 2
    assert "0123456789abcdef" in versions


def test_throttling_is_the_share_of_samples() -> None:
    reasons = [("power limit",), ("power limit", "thermal limit"), (), ("power limit",)]
    samples = [Sample(0.1 * n, 60.0 * n, 600.0, 1500.0, r) for n, r in enumerate(reasons)]
    found = summarise(samples, 1e-3)
    assert found.throttled == {"power limit": 0.75, "thermal limit": 0.25}
    assert set(found.throttled) <= set(REASONS)
    assert summarise(samples[2:3] * 4, 1e-3).throttled == {}
