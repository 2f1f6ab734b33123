"""The pages Run, Compare, History and Doctor under AppTest, with runs made by a real worker on the CPU."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from dashboard_support import DEVICE, case_records, write_evidence
from streamlit.testing.v1 import AppTest
from test_dashboard_pages import elsewhere, open_page, parameters, words  # noqa: F401 - a fixture

from cufa.bench.cases import Case, contenders
from cufa.bench.decode_cases import make_decode
from cufa.bench.regimes import Regime
from cufa.bench.suites import SUITES, make
from cufa.bench.timing import Ratio, Timing, speedup
from cufa.core.mask import CAUSAL, Band
from cufa.core.operation import OPERATIONS
from cufa.dashboard.charts import difference, samples
from cufa.dashboard.model import devices, doctor, export, gpu, measurements, presets, published
from cufa.dashboard.views import history_view, run_controls
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store
from cufa.doctor import Check
from cufa.doctor import Status as CheckStatus
from cufa.planner import make_plan


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with finished runs: three lengths, one of them again, and one under a window beside decoding, each
    kernel alone."""
    store = Store(tmp_path_factory.mktemp("measured"))
    cases = tuple(
        Case(make(2, 4, n, 64, "float32", CAUSAL), contenders("fa1", "fa2")) for n in (64, 512, 1024)
    )
    window = Case(make(2, 4, 256, 64, "float32", Band(63, 0)), contenders("fa2"))
    decode = Case(make_decode(2, 4, 2, 512, head_dim=64, dtype="float32"), contenders("auto", "balanced"))
    for job in (
        Job("alone", "cpu", (window, decode), 0.02, Regime.SUSTAINED),
        Job("lengths", "cpu", cases, 0.02),
        Job("again", "cpu", cases[1:2], 0.02),
    ):
        client.submit(store, job)
    wait(store)
    assert [run.status for run in store.all()] == [Status.DONE] * 3
    yield store.root
    pid = client.worker_pid(store, "cpu")
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def with_runs(measured: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Store:  # noqa: F811
    monkeypatch.setenv("CUFA_RUNS_DIR", str(measured))
    return Store(measured)


def named(store: Store, title: str) -> Run:
    return next(run for run in store.all() if run.job.title == title)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the driver shows; nothing can run on it."""
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)


def wait(store: Store) -> None:
    deadline = time.monotonic() + 120
    while store.active():
        assert time.monotonic() < deadline, store.active()
        client.refresh(store)
        time.sleep(0.1)


def start(app: AppTest) -> Run:
    """Press Start and wait for the end."""
    app.button(key="run.start").click().run()
    assert not app.exception
    store = Store(Path(os.environ["CUFA_RUNS_DIR"]))
    wait(store)
    app.run()
    return store.all()[0]


# --- Run -------------------------------------------------------------------------------------------------


def test_a_cpu_run_from_the_button_to_its_result(measured: Path, with_runs: Store) -> None:
    app = open_page("run", sq="64", sk="64", seconds="0.2")
    before = len(with_runs.ids())
    run = start(app)
    assert run.status is Status.DONE
    assert len(with_runs.ids()) == before + 1
    assert parameters(app)["run"] == run.id
    said = words(app)
    assert "measured on CPU</span>" in said
    assert "(CPU)" in said
    labels = [m.label for m in app.metric]
    assert any("median" in x for x in labels)
    assert any("float64" in x for x in labels)
    table = app.dataframe[0].value
    assert list(table["kernel"]) == ["naive", "fa1", "fa2"]
    assert all(float(error) < 1e-5 for error in table["error"])
    assert any("because" in block.value for block in app.code)
    (figure,) = (json.loads(e.proto.spec) for e in app.get("plotly_chart"))
    assert [trace["name"] for trace in figure["data"]] == ["naive", "fa1", "fa2"]
    # A reload, or a second browser, finds the same by its link.
    again = open_page("run", run=run.id)
    assert not again.warning
    assert again.selectbox(key="run.run").value == run.id


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if presets.presets(name)])
def test_any_operation_starts_from_its_presets(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(
        client, "submit", lambda store, job: asked.append(job) or "20260101T000000.000000-abcdef"
    )
    link = {"mask": "window", "left": "50", "softcap": "20"}
    link |= {} if operation == "forward" else {"op": operation}
    app = open_page("run", **link)
    assert not app.warning
    app.segmented_control(key="run.regime").set_value("sustained").run()
    assert app.selectbox(key="run.seconds").value == "3"
    app.button(key="run.start").click().run()
    assert not app.exception
    (job,) = asked
    assert (job.regime, job.seconds) == (Regime.SUSTAINED, 3.0)
    problem = job.cases[0].problem
    assert (problem.operation, str(problem.mask), problem.softcap) == (operation, "window (50, 0)", 20.0)
    assert make_plan(problem, None)


def test_an_empty_history_is_said() -> None:
    assert "press Start" in words(open_page("run"))
    assert "Nothing is measured yet" in words(open_page("history"))
    assert "Nothing is measured yet" in words(open_page("compare"))


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("run", "run", "20200101T000000.000000-000000"),
        ("run", "run", "../../etc/passwd"),
        ("run", "on", "cuda:0"),
        ("run", "kernels", "fa2,fa9"),
        ("run", "preset", "suite-forward"),
        ("run", "tiles", "1x1"),
        ("run", "d", "-8"),
        ("run", "seconds", "1e9"),
        ("run", "also", "3"),
        ("run", "regime", "asleep"),
        ("run", "op", "backward"),
        ("run", "mask", "lattice"),
        ("compare", "table", "none"),
        ("doctor", "show", "none"),
    ],
)
def test_a_bad_value_falls_back_and_says_so(name: str, parameter: str, value: str) -> None:
    app = open_page(name, **{parameter: value})
    (warning,) = app.warning
    assert repr(value) in warning.value
    assert parameters(app) == {}


def test_a_preset_sets_the_whole_shape_and_a_link_carries_it() -> None:
    app = open_page("run")
    app.number_input(key="run.batch").set_value(7).run()
    app.selectbox(key="run.preset").set_value("llama-8b").run()
    assert parameters(app) == {"preset": "llama-8b"}
    assert app.number_input(key="run.batch").value == 1
    assert app.selectbox(key="run.kv").value == "8"
    app.number_input(key="run.sq").set_value(300).run()
    link = parameters(app)
    assert link == {"preset": "llama-8b", "sq": "300"}
    other = open_page("run", **link)
    assert other.number_input(key="run.sq").value == 300
    assert other.number_input(key="run.heads").value == 32


def test_nothing_starts_without_a_kernel() -> None:
    app = open_page("run", kernels="")
    assert app.button(key="run.start").disabled
    assert "at least one kernel" in words(app)


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", "/proc/nowhere/runs")
    app = open_page("run")
    app.button(key="run.start").click().run()
    assert not app.exception
    assert "Runs cannot be saved in `/proc/nowhere/runs`" in app.error[0].value
    assert "CUFA_RUNS_DIR" in app.error[0].value
    monkeypatch.setattr(doctor, "_doctor", list)
    assert "cannot be written" in words(open_page("doctor"))


@pytest.mark.usefixtures("with_gpu")
def test_with_a_gpu_its_kernels_tiles_and_suites_are_on_offer() -> None:
    app = open_page("run")
    assert app.selectbox(key="run.on").value == "cuda:0"
    assert "suite forward" in " ".join(app.selectbox(key="run.preset").options)
    assert app.number_input(key="run.d").value == 128
    tiles = app.selectbox(key="run.tiles").options
    assert any("warps" in x for x in tiles)
    app.selectbox(key="run.tiles").set_value("every").run()
    assert int(words(app).split(" timings, in turns:")[0].split()[-1]) > 2
    app.selectbox(key="run.preset").set_value("suite-fa1-blocks").run()
    assert not app.exception
    app.selectbox(key="run.on").set_value("cpu").run()  # the suite is none of the CPU's
    assert not app.exception


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_that_cannot_be_used_fails_the_run_and_the_page_goes_on() -> None:
    app = open_page("run")
    run = start(app)
    assert run.status is Status.FAILED
    said = words(app)
    assert "failed</span>" in said
    assert "No timing was finished." in said
    assert "Traceback" in app.code[0].value


def test_a_run_over_caches_shows_rates_beside_a_plain_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "decoded"))
    store = Store(tmp_path / "decoded")
    cases = tuple(SUITES["decode"].cases(DEVICE))[:2]
    run_id = store.submit(Job("suite decode", "cuda:0", cases, 0.5))
    environment = {"device": "Made-up GPU", "arch": "sm_90"}
    record: dict[str, Any] = {"schema": 2, "skipped": [], "failed": [], "environment": environment}
    record["rows"] = [row for case in cases for row in case_records(case)]
    (store.folder(run_id) / "record.json").write_text(json.dumps(record))
    store.finish(run_id, Status.DONE)
    app = open_page("run")
    assert not app.warning
    said = words(app)
    assert "flash_decode reaches 91% of a plain read" in said
    assert "TB/s in turns" in said
    assert list(app.dataframe[0].value["kernel"]) == ["flash_decode", "torch flash", "torch cudnn"]
    assert "This very problem" in words(open_page("decode"))  # the second case is the page's own
    assert store.read(run_id).timings == 8


def test_runs_of_the_first_schema_are_still_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "old"))
    store = Store(tmp_path / "old")
    run_id = store.submit(
        Job("old", "cpu", (Case(make(1, 2, 64, 64, "float32", CAUSAL), contenders("fa2")),), 0.5)
    )
    problem = {
        "batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 64, "dtype": "float32",
        "causal": True, "scale": 0.125, "precision": "float32", "alignment": 16, "positive_strides": True,
    }  # fmt: skip
    times = {"samples_ns": [1000] * 3, "p10_ns": 1000, "p50_ns": 1000, "p90_ns": 1000, "tflops": 0.1}
    row = {"label": "fa2", "kernel": "fa2_forward", "problem": problem, "gbytes_per_s": 1.0, **times}
    row |= {"of_ceiling": 0.5, "ceiling": "memory", "max_error": 1e-6}
    record = {"schema": 1, "rows": [row], "skipped": [], "environment": {"device": "Old CPU"}}
    (store.folder(run_id) / "record.json").write_text(json.dumps(record))
    store.finish(run_id, Status.DONE)
    (m,) = measurements.of_run(store.read(run_id))
    assert (str(m.problem.mask), m.regime) == ("causal", Regime.IN_TURNS)
    assert "Old CPU" in words(open_page("run"))


def test_a_crash_is_shown_as_what_it_is(
    with_runs: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "crashed"))
    store = Store(tmp_path / "crashed")
    source = named(with_runs, "again")
    run_id = store.submit(source.job)
    (store.folder(run_id) / "started.json").write_text("{}")  # and nobody holds its lock
    (store.folder(run_id) / "log.txt").write_text("Fatal Python error: Segmentation fault")
    events = [{"event": "about", "record": {**source.record, "rows": []}}]
    events += [{"event": "row", "record": row} for row in source.rows[:1]]
    (store.folder(run_id) / "progress.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    app = open_page("run")
    said = words(app)
    assert "crashed</span>" in said
    assert "The worker process died" in said
    assert "1 of 2 timings were finished" in said
    assert "Segmentation fault" in app.code[0].value
    assert "1 run did not finish" in str([e.label for e in open_page("history").expander])


def test_presets_are_the_recorded_shapes_and_plan_everywhere() -> None:
    shapes = presets.presets()
    forward = {case.problem for case in SUITES["forward"].cases(None)}
    assert forward <= {p.problem for p in shapes.values()}
    for name in OPERATIONS:
        for number, preset in enumerate(presets.presets(name).values()):
            assert preset.problem.operation == name
            make_plan(preset.problem, None)
            if number or preset.problem.dtype != "float32":  # the first is for a CPU
                make_plan(preset.problem, DEVICE)
    assert "suite-decode" in presets.suites(DEVICE, "decode")
    assert "suite-forward" in presets.suites(DEVICE)
    assert "suite-forward" not in presets.suites(None)


def test_the_time_of_a_cpu_job_is_guessed_from_its_work() -> None:
    job = Job("x", "cpu", (Case(make(1, 8, 4096, 64, "float32"), contenders("fa2")),), 0.1)
    assert run_controls.seconds_expected(job, None) is None
    slow, fast = run_controls.seconds_expected(job, 1e10), run_controls.seconds_expected(job, 1e12)
    assert slow is not None
    assert fast is not None
    assert slow > 30 * fast / 10


# --- Compare ---------------------------------------------------------------------------------------------


def test_own_runs_by_length_and_speedup(with_runs: Store) -> None:
    app = open_page("compare", base="fa1", show="fa1,fa2")
    said = words(app)
    assert "measured on CPU</span>" in said
    assert "Speed-up over fa1" in [h.value for h in app.header]
    figures = [json.loads(e.proto.spec) for e in app.get("plotly_chart")]
    assert {t["name"] for t in figures[0]["data"]} == {"fa1", "fa2"}
    assert [t["name"] for t in figures[1]["data"]] == ["fa2"]
    app.multiselect(key="compare.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_regimes_are_never_mixed(elsewhere: Path) -> None:  # noqa: F811
    write_evidence(elsewhere / "records")
    app = open_page("compare")
    assert "fastest in turns" in words(app)
    app.segmented_control(key="compare.regime").set_value("sustained").run()
    assert not app.exception
    assert "fastest sustained" in words(app)
    assert "energy" in str(app.segmented_control(key="compare.metric").options)
    app.segmented_control(key="compare.metric").set_value("joules").run()
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    assert "TFLOP per joule" in json.dumps(figure["layout"])
    table = app.dataframe[0].value
    assert set(table["power"]) == {"600 W"}
    families = app.selectbox(key="compare.shapes").options
    assert any(name.startswith("Decode:") for name in families)
    app.selectbox(key="compare.shapes").set_value(next(x for x in families if x.startswith("Decode:"))).run()
    assert "TB/s at" in words(app)


def test_recorded_evidence_names_machine_and_date(elsewhere: Path) -> None:  # noqa: F811
    write_evidence(elsewhere / "records")
    app = open_page("compare")
    said = words(app)
    assert "recorded</span>" in said
    assert "Made-up GPU, 2026-01-02" in said
    assert "published: 1.70×" in said  # the known table, beside the recorded FA1 → FA2 at 4,096
    for metric in ("time", "gbytes"):
        assert not open_page("compare", metric=metric).warning


@pytest.mark.parametrize("table", ["versions", "blocks", "traffic"])
def test_a_known_table_is_measured_by_its_button(
    table: str, with_runs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(
        client, "submit", lambda store, job: asked.append(job) or "20260101T000000.000000-abcdef"
    )
    app = open_page("compare", table=table)
    assert "published" in words(app).lower()
    app.button(key=f"known.{table}").click().run()
    assert not app.exception
    (job,) = asked
    assert job.device == "cpu"
    for case in job.cases:
        for contender in case.contenders:
            assert contender.plan(case.problem, None)


def test_the_known_tables_run_on_a_gpu_too() -> None:
    tables = (published.version_cases, published.block_cases, published.traffic_cases)
    for cases in tables:
        plans = [c.plan(case.problem, DEVICE) for case in cases(DEVICE) for c in case.contenders]
        assert plans
        assert {p.problem.head_dim for p in plans} == {64}
    lengths = [case.problem.seqlen_k for case in published.version_cases(DEVICE)]
    assert lengths == [x.seqlen for x in published.VERSIONS]


def test_published_figures_hang_together() -> None:
    for x in published.VERSIONS:
        assert x.fa1_ms / x.fa2_ms == pytest.approx(x.speedup, rel=0.02)


# --- History ---------------------------------------------------------------------------------------------


def test_two_measurements_and_their_interval(with_runs: Store) -> None:
    found = [m for run in with_runs.all() for m in measurements.of_run(run)]
    fa1, fa2 = (next(m for m in found if m.label == x and m.problem.seqlen_k == 1024) for x in ("fa1", "fa2"))
    app = open_page("history", a=fa1.id, b=fa2.id)
    assert not app.warning
    expected, _ = difference.in_words(speedup(fa1.timing, fa2.timing), "fa1", "fa2")
    assert html.escape(expected) in words(app)
    app.selectbox(key="history.b").set_value(fa1.id).run()
    assert "the same measurement" in words(app)
    other = next(m for m in found if m.problem.seqlen_k == 64)
    app.selectbox(key="history.b").set_value(other.id).run()
    assert "Not the same problem" in app.warning[0].value
    alone = next(m for m in found if m.regime is Regime.SUSTAINED)
    app.selectbox(key="history.b").set_value(alone.id).run()
    assert "are not compared" in words(app)
    assert not app.exception


def test_two_runs_are_compared_where_they_meet(with_runs: Store) -> None:
    a, b = named(with_runs, "lengths"), named(with_runs, "again")
    app = open_page("history", compare="runs", rb=b.id)
    assert "In B " in words(app)
    assert app.selectbox(key="history.ra").value == a.id  # what it can be compared with
    pairs = history_view.pair_up(measurements.of_run(a), measurements.of_run(b))
    assert {name.partition(",")[0] for name, _ in pairs} == {"fa1", "fa2"}


def test_filters_and_downloads(with_runs: Store, elsewhere: Path) -> None:  # noqa: F811
    write_evidence(elsewhere / "records")
    app = open_page("history", **{"from": "recorded"})
    assert set(app.dataframe[0].value["from"]) == {"recorded evidence"}
    app = open_page("history", kernels="fa2")
    assert {k.split()[0] for k in app.dataframe[0].value["kernel"]} == {"fa2"}
    app = open_page("history", op="decode", regime="sustained")
    assert not app.warning
    assert all("cached" in x or "×" in x for x in app.dataframe[0].value["problem"])
    assert set(app.dataframe[0].value["regime"]) == {"sustained"}
    assert "energy per call" in app.dataframe[0].value
    app = open_page("history", masks="window (63 0)")
    assert set(app.dataframe[0].value["mask"]) == {"window (63, 0)"}
    assert len(app.get("download_button")) == 3


def test_exports_hold_every_sample(with_runs: Store, tmp_path: Path) -> None:
    found = [m for run in with_runs.all() for m in measurements.of_run(run)]
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


# --- Figures and words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "words_", "tone", "symbol"),
    [
        (Ratio(1.5, 1.4, 1.6), "B is 1.50× (1.40–1.60) faster than A.", "good", "triangle-right"),
        (Ratio(0.5, 0.4, 0.8), "B is 2.00× (1.25–2.50) slower than A.", "warn", "triangle-left"),
        (Ratio(1.0, 0.9, 1.1), "No difference", "", "circle"),
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


# --- Doctor ------------------------------------------------------------------------------------------------


def test_the_doctor_says_what_the_command_says(elsewhere: Path) -> None:  # noqa: F811
    app = open_page("doctor")
    said = words(app)
    for name in ("python", "kernel sources", "first call", "runs"):
        assert f">{name}</div>" in said
    assert "against float64" in said


def test_problems_come_first_with_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = [
        Check("python", CheckStatus.OK, "3"),
        Check("nvrtc", CheckStatus.PROBLEM, "too <old>", "pip install `x`"),
    ]
    monkeypatch.setattr(doctor, "_doctor", lambda: made_up)
    said = words(open_page("doctor", show="open"))
    assert "1 to fix: nvrtc." in said
    assert "too &lt;old&gt;" in said
    assert "<code>x</code>" in said
    assert ">python</div>" not in said


def test_a_doctor_that_dies_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    (check,) = doctor._doctor()
    assert check.status is CheckStatus.PROBLEM
    assert "exit code 1" in check.detail
