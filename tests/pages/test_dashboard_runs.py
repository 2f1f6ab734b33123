"""The page Run under AppTest, with runs made by a real worker on the CPU."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from dashboard_measured_support import named, start
from dashboard_page_support import chosen, has, open_page, parameters, words
from dashboard_run_support import small
from dashboard_support import DEVICE, case_records

from cufa.dashboard import engine
from cufa.dashboard.model import doctor, presets
from cufa.dashboard.views import run_controls, run_live
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store
from cufa.measure.cases import Case, contenders
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES, make
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import make_plan


def test_a_cpu_run_from_the_button_to_its_result(measured: Path, with_runs: Store) -> None:
    app = open_page("run", sq="64", sk="64", seconds="0.2")
    before = len(with_runs.ids())
    run = start(app)
    assert run.status is Status.DONE
    assert len(with_runs.ids()) == before + 1
    assert parameters(app)["run"] == run.id
    said = words(app)
    has(said, "measured on CPU</span>", "(CPU)")
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
def test_any_operation_starts_from_its_presets(operation: str, asked: list[Job]) -> None:
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


def test_a_run_that_ends_while_the_page_is_drawn(with_runs: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends between two reads of one page run: the page must be drawn again."""
    real, asked = engine.all_runs, []

    def all_runs() -> list[Run]:
        asked.append(real())
        return [dataclasses.replace(r, status=Status.RUNNING) if len(asked) == 1 else r for r in asked[-1]]

    monkeypatch.setattr(engine, "all_runs", all_runs)
    open_page("run")
    assert len(asked) == 2


def test_an_empty_history_is_said() -> None:
    assert "press Start" in words(open_page("run"))
    assert "Nothing is measured yet" in words(open_page("history"))
    assert "Nothing is measured yet" in words(open_page("compare"))


@pytest.mark.parametrize(
    ("parameter", "value", "shown"), [("kernels", "fa9", "naive, fa1, fa2"), ("also", "3", "none")]
)
def test_what_is_shown_instead_of_several_is_said_in_words(parameter: str, value: str, shown: str) -> None:
    (warning,) = open_page("run", **{parameter: value}).warning
    assert f"; showing {shown} instead." in warning.value


def test_a_preset_sets_the_whole_shape_and_a_link_carries_it() -> None:
    app = open_page("run")
    app.number_input(key="run.batch").set_value(7).run()
    app.selectbox(key="run.preset").set_value("llama-8b").run()
    assert chosen(app) == {}
    assert parameters(app)["preset"] == "llama-8b"
    assert app.number_input(key="run.batch").value == 1
    assert app.selectbox(key="run.kv").value == "8"
    app.number_input(key="run.sq").set_value(300).run()
    link = parameters(app)
    assert link == {"on": "cpu", "preset": "llama-8b", "kernels": "naive,fa1,fa2", "sq": "300"}
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
    app.selectbox(key="run.on").set_value("cpu").run()  # the CPU does not have this suite
    assert not app.exception


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_that_cannot_be_used_fails_the_run_and_the_page_goes_on() -> None:
    app = open_page("run")
    run = start(app)
    assert run.status is Status.FAILED
    said = words(app)
    has(said, "failed</span>", "No timing is complete.")
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
    has(said, "flash_decode reaches 91% of a plain read", "TB/s in turns")
    assert list(app.dataframe[0].value["kernel"]) == ["flash_decode", "torch flash", "torch cudnn"]
    assert "Measured for this problem" in words(
        open_page("decode")
    )  # the second case is the default of the page
    assert store.read(run_id).timings == 8


def test_a_crash_is_shown_as_what_it_is(
    with_runs: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "crashed"))
    store = Store(tmp_path / "crashed")
    source = named(with_runs, "again")
    run_id = store.submit(source.job)
    (store.folder(run_id) / "started.json").write_text("{}")  # no process holds its lock
    (store.folder(run_id) / "log.txt").write_text("Fatal Python error: Segmentation fault")
    events = [{"event": "about", "record": {**source.record, "rows": []}}]
    events += [{"event": "row", "record": row} for row in source.rows[:1]]
    (store.folder(run_id) / "progress.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    app = open_page("run")
    said = words(app)
    has(said, "crashed</span>", "The worker process died", "1 of 2 timings are complete")
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


# --- What is said before Start ---------------------------------------------------------------------------


def test_nothing_starts_while_a_field_holds_what_it_cannot() -> None:
    app = open_page("run")
    assert not app.button(key="run.start").disabled
    app.number_input(key="run.heads").set_value(4096).run()
    assert app.button(key="run.start").disabled
    assert (
        "Heads is 4,096, which is not a whole number from 1 to 1,024; the page shows 1,024."
        in app.error[0].value
    )
    assert "Start is off while a field is invalid" in words(app)
    assert parameters(app)["heads"] == "1024"
    app.number_input(key="run.heads").set_value(4).run()
    assert not app.button(key="run.start").disabled
    assert not app.error


def test_memory_that_is_not_there_is_said_before_start() -> None:
    app = open_page("run", batch="4096", heads="1024", sq="1048576", sk="1048576")
    assert app.button(key="run.start").disabled
    assert re.search(
        r"Too large for this machine.*: .* needs about [0-9,]+ GiB, [0-9.,]+ GiB are free", words(app)
    )


def test_a_time_beyond_patience_is_said_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_live, "_cpu_rate", lambda job, runs: 1e6)
    said = words(open_page("run", sq="65536", sk="65536"))
    assert re.search(r"About [0-9,]+ years on this CPU", said)
    assert "You can cancel it at any time" in said


def test_the_first_run_on_a_cpu_has_tiles_to_skip() -> None:
    first = next(iter(presets.presets("forward").values())).problem
    plan = make_plan(first, None, "fa2")
    assert plan.schedule.total / plan.schedule.visited > 1.3


def test_a_link_stays_with_its_run_and_a_page_without_one_follows_the_newest(elsewhere: Path) -> None:
    store = Store(elsewhere / "runs")

    def ended() -> str:
        run_id = store.submit(small())
        store.finish(run_id, Status.CANCELLED, "so it is said")
        return run_id

    first = ended()
    linked, following = open_page("run", run=first), open_page("run")
    assert parameters(following)["run"] == first
    second = ended()
    assert parameters(linked.run())["run"] == first
    assert parameters(following.run())["run"] == second
