"""The page History under AppTest: differences, filters, downloads."""

from __future__ import annotations

import csv
import html
import io
import json
from pathlib import Path

import pytest
from card_support import write_lines
from dashboard_measured_support import named
from dashboard_page_support import SHIPPED, has, open_page, parameters, words
from dashboard_support import DEVICE, ENVIRONMENT, case_records, write_evidence

from cufa.dashboard.charts import difference, samples
from cufa.dashboard.model import evidence, export, measured_rows
from cufa.dashboard.views import history_view
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store
from cufa.measure import cards
from cufa.measure.power import REASONS, Sample, summarise
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES
from cufa.measure.timing import Ratio, Timing, speedup


def test_two_measurements_and_their_interval(with_runs: Store) -> None:
    found = [m for run in with_runs.all() for m in measured_rows.of_run(run)]
    fa1, fa2 = (next(m for m in found if m.label == x and m.problem.seqlen_k == 1024) for x in ("fa1", "fa2"))
    app = open_page("history", a=fa1.id, b=fa2.id)
    assert not app.warning
    expected, _ = difference.in_words(speedup(fa1.timing, fa2.timing), "fa1", "fa2")
    assert html.escape(expected) in words(app)
    app.selectbox(key="history.b").set_value(fa1.id).run()
    assert "the same measurement" in words(app)
    other = next(m for m in found if m.problem.seqlen_k == 64)
    app.selectbox(key="history.b").set_value(other.id).run()
    assert f"Different problems: A is {fa1.problem}; B is {other.problem}." in app.warning[0].value
    alone = next(m for m in found if m.regime is Regime.SUSTAINED)
    app.selectbox(key="history.b").set_value(alone.id).run()
    assert "are not compared" in words(app)
    assert not app.exception


def test_each_problem_is_named_once() -> None:
    """Rows of one case, of which the case names the problem of the first."""
    rows = [m for card in cards.load_all(SHIPPED).values() for m in measured_rows.of_card(card)]
    rows = [m for m in rows if m.label in ("bfloat16", "e4m3 per head")]
    a = rows[0]
    b = next(m for m in rows if m.row.case == a.row.case and m.label != a.label)
    other = next(m for m in rows if m.row.case != a.row.case and m.label != a.label)
    assert str(a.problem) in a.row.case != str(a.problem)
    assert history_view.comparability(a, b)[0] == f"Different problems: A is {a.problem}; B is {b.problem}."
    words_of_b = f"{other.row.case}: {other.problem}"
    assert (
        history_view.comparability(a, other)[0]
        == f"Different problems: A is {a.row.case}; B is {words_of_b}."
    )


def test_two_runs_are_compared_where_they_meet(with_runs: Store) -> None:
    a, b = named(with_runs, "lengths"), named(with_runs, "again")
    app = open_page("history", compare="runs", rb=b.id)
    assert "B: " in words(app)
    assert app.selectbox(key="history.ra").value == a.id  # the run that shares measurements with B
    pairs = history_view.pair_up(measured_rows.of_run(a), measured_rows.of_run(b))
    assert {name.partition(",")[0] for name, _ in pairs} == {"fa1", "fa2"}


def test_filters_and_downloads(with_runs: Store, elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("history", **{"from": "recorded"})
    assert set(app.dataframe[0].value["from"]) == {"recorded"}
    app = open_page("history", kernels="fa2")
    assert {k.split()[0] for k in app.dataframe[0].value["kernel"]} == {"fa2"}
    app = open_page("history", op="decode", regime="sustained")
    assert not app.warning
    assert all("cached" in x or "×" in x for x in app.dataframe[0].value["problem"])
    assert set(app.dataframe[0].value["regime"]) == {"sustained"}
    assert "energy per call" in app.dataframe[0].value
    assert [x.label for x in app.get("download_button")[:2]] == [
        f"Python file that repeats {x}" for x in "AB"
    ]
    app = open_page("history", masks="window (63 0)")
    assert set(app.dataframe[0].value["mask"]) == {"window (63, 0)"}
    assert len(app.get("download_button")) == 3


def test_exports_hold_every_sample(with_runs: Store, tmp_path: Path) -> None:
    found = [m for run in with_runs.all() for m in measured_rows.of_run(run)]
    table = list(csv.DictReader(io.StringIO(export.csv_text(found))))
    assert [float(line["p50_s"]) for line in table] == [m.timing.p50 for m in found]
    lines = [json.loads(line) for line in export.json_lines(found).splitlines()]
    assert [len(line["samples_ns"]) for line in lines] == [len(m.timing.samples) for m in found]
    assert {line["operation"] for line in table} == {"forward", "decode"}
    assert {line["mask"] for line in table} == {"causal", "window (63, 0)"}
    assert {line["regime"] for line in table} == {"in turns", "sustained"}
    report = export.html_report(found)
    assert report.count("<tbody>") >= 4
    assert 'src="http' not in report
    assert "href=" not in report.split("</script>")[-1]
    assert found[0].machine in report


@pytest.mark.parametrize(
    ("ratio", "words_", "tone", "symbol"),
    [
        (Ratio(1.5, 1.4, 1.6), "B is 1.50× (1.40–1.60) faster than A.", "good", "triangle-right"),
        (Ratio(0.5, 0.4, 0.8), "B is 2.00× (1.25–2.50) slower than A.", "warn", "triangle-left"),
        (Ratio(1.0, 0.9, 1.1), "No significant difference", "", "circle"),
    ],
)
def test_a_difference_in_words(ratio: Ratio, words_: str, tone: str, symbol: str) -> None:
    text, found = difference.in_words(ratio)
    assert text.startswith(words_)
    assert found == tone
    assert difference.verdict_symbol(ratio) == symbol


def test_every_sample_is_drawn() -> None:
    from cufa.dashboard.theme import LIGHT

    timing = Timing(tuple(1e-3 * (1 + n / 100) for n in range(200)))
    figure = samples.samples_figure([("fa2", timing), ("fa1", timing)], LIGHT)
    assert [len(trace.x) for trace in figure.data] == [200, 200]
    assert list(figure.data[0].x) == pytest.approx([1e3 * t for t in timing.samples])
    assert "(ms)" in figure.layout.xaxis.title.text
    with_outlier = [("fa2", Timing((*timing.samples, 1.0)))]
    assert samples.beyond([("fa2", timing)]) < 15  # of the slowest tenth
    assert samples.beyond(with_outlier) >= 1
    low, high = samples.samples_figure(with_outlier, LIGHT, zoomed=True).layout.xaxis.range
    assert 0 < low <= 1
    assert high < 4
    assert "median 2 ms" in samples.describe([("fa2", Timing((2e-3,)))])


def test_two_runs_that_share_nothing_are_two_runs_and_it_says_what_each_timed(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(elsewhere / "runs")
    cases = list(SUITES["forward"].cases(DEVICE))
    for number in (0, 5):
        run_id = store.submit(Job(f"job {number}", "cuda:0", (cases[number],), 0.5))
        record = {
            "schema": 2,
            "rows": case_records(cases[number]),
            "environment": {"device": "GPU", "arch": "sm_90"},
        }
        (store.folder(run_id) / "record.json").write_text(json.dumps(record))
        store.finish(run_id, Status.DONE)
    app = open_page("history", compare="runs")
    chosen_runs = {app.selectbox(key=f"history.{name}").value for name in ("ra", "rb")}
    assert chosen_runs == set(store.ids())
    assert len(app.selectbox(key="history.ra").options) == 1  # B is not an option
    said = words(app)
    has(said, "No kernel, shape and regime in common: A timed fa3 and fa2 on ", "No two runs have one")


def test_history_begins_with_two_that_were_timed_side_by_side(with_runs: Store, elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("history")
    link = parameters(app)
    assert link["a"].startswith("made-up-gpu.")
    assert link["b"].startswith("made-up-gpu.")
    assert "Not the same" not in str([w.value for w in app.warning])
    newest = app.dataframe[0].value
    assert "(CPU)" in newest["machine"][0]  # the table begins with the newest run in any case


def test_a_link_to_a_row_that_is_gone_says_how_many_there_are_not_which(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("history", a="made-up-gpu.gone.7")
    (warning,) = app.warning
    rows = len(app.selectbox(key="history.a").options)
    assert f"'made-up-gpu.gone.7', which is not one of the {rows:,} options; showing " in warning.value
    assert len(warning.value) < 200


LATER = "2026-02-02T03:04:05+00:00"


def write_another_day(file: Path, factor: float, day: str = LATER, commit: str = "0123456789abcdef") -> None:
    """Append the same rows with other times, another day and another version."""
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
    """A damaged file gives a message."""
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
    recorded = {(m.machine, m.row.case, m.regime) for m in evidence.measurements()}
    shipped = evidence.past()
    assert shipped
    assert all((m.machine, m.row.case, m.regime) in recorded for m in shipped)
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
