"""Every page of the dashboard under Streamlit's AppTest: with and without a GPU, evidence, a compiler."""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

import streamlit as st
from dashboard_support import APP, DEVICE, decode_records, make_trace, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.bench import records, traces
from cufa.bench.suites import make
from cufa.core.problem import default_scale
from cufa.dashboard.model import compiled, devices, gpu
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.decode.plan import make_decode_plan
from cufa.decode.problem import DecodeProblem
from cufa.nvrtc.static_compile import MissingCompilerError
from cufa.planner import make_plan

Open = Callable[..., AppTest]


def registered_pages() -> list[str]:
    """Files of the sidebar, read from app.py, so that a page that is added is tested."""
    for node in ast.parse(Path(APP).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PAGES":
            return [name for name, _, _ in ast.literal_eval(node.value)]
    raise AssertionError("app.py has no PAGES")


PAGES = registered_pages()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No evidence, no cache, no GPU, unless a test brings some; nothing of the user's is touched."""
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUFA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(records, "RECORDS_DIR", tmp_path / "records")
    monkeypatch.setattr(traces, "TRACES_DIR", tmp_path / "records" / "traces")
    monkeypatch.setattr(gpu, "gpu_count", lambda: 0)
    # Only what a page waits for is compiled: the table's hundred builds would take minutes.
    monkeypatch.setattr(compiled.Compiler, "want", want_one)
    st.cache_data.clear()
    st.cache_resource.clear()
    yield tmp_path
    st.cache_resource.clear()


real_want = compiled.Compiler.want


def want_one(self: compiled.Compiler, variants: object) -> int:
    wanted = list(variants)  # type: ignore[call-overload]
    return real_want(self, wanted) if len(wanted) == 1 else 0


def open_page(name: str, **parameters: str) -> AppTest:
    """A page as a browser gets it from a link."""
    app = AppTest.from_file(APP, default_timeout=120)
    app.switch_page(f"screens/{name}.py")
    for key, value in parameters.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception, [e.value for e in app.exception]
    return app


def words(app: AppTest) -> str:
    """Everything that a page says."""
    kinds = (app.title, app.header, app.markdown, app.caption, app.info, app.warning, app.error)
    html = [element.proto.body for element in app.get("html")]
    return "\n".join([*html, *(element.value for kind in kinds for element in kind)])


def parameters(app: AppTest) -> dict[str, str]:
    return {key: value[0] if isinstance(value, list) else value for key, value in app.query_params.items()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_gpu_and_evidence(name: str) -> None:
    app = open_page(name)
    assert app.title
    assert not app.warning
    assert "cufa-verdict" in words(app)
    assert parameters(app) == {}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_with_gpu_and_evidence(name: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_evidence(elsewhere / "records")
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    app = open_page(name)
    assert app.title
    assert "cufa-verdict" in words(app)


@pytest.mark.parametrize("name", PAGES)
def test_a_bad_link_falls_back_and_says_so(name: str) -> None:
    app = open_page(name, nonsense="1")
    assert "'nonsense'" in app.warning[0].value
    assert parameters(app) == {}
    app.run()
    assert not app.warning


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("causal_work", "sq", "banana"),
        ("causal_work", "sq", "0"),
        ("causal_work", "sq", "999999999999"),
        ("causal_work", "sk", "-5"),
        ("causal_work", "alg", "fa9"),
        ("causal_work", "kv", "7"),
        ("causal_work", "card", "70"),
        ("causal_work", "tiles", "1x1"),
        ("causal_work", "q", "32"),
        ("causal_work", "mask", "<script>alert(1)</script>"),
        ("occupancy", "kernel", "none"),
        ("occupancy", "arch", "70"),
        ("decode", "batch", "1e3"),
    ],
)
def test_a_bad_value_falls_back_and_says_so(name: str, parameter: str, value: str) -> None:
    if name == "occupancy":
        without_compiler()
    app = open_page(name, **{parameter: value})
    (warning,) = app.warning
    assert repr(value) in warning.value
    assert parameters(app) == {}


def without_compiler() -> None:
    """The next Compiler finds no NVRTC."""
    compiler = compiled.Compiler()
    compiler.missing = "NVRTC is not here"
    from cufa.dashboard.views import occupancy_view

    st.cache_resource.clear()
    occupancy_view.compiler = lambda: compiler  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def compiler_back() -> Iterator[None]:
    from cufa.dashboard.views import occupancy_view

    real = occupancy_view.compiler
    yield
    occupancy_view.compiler = real  # type: ignore[assignment]


# --- Causal work -----------------------------------------------------------------------------------------


def test_a_link_carries_the_view_and_the_view_the_link() -> None:
    link = {
        "alg": "fa1",
        "mask": "full",
        "sq": "1000",
        "sk": "777",
        "heads": "6",
        "kv": "2",
        "d": "64",
        "q": "3",
    }
    app = open_page("causal_work", **link)
    assert not app.warning
    assert parameters(app) == link
    assert app.number_input(key="causal.sq").value == 1000
    app.number_input(key="causal.sk").set_value(500).run()
    assert parameters(app) == {**link, "sk": "500"}
    app.number_input(key="causal.sk").set_value(4096).run()
    assert "sk" not in parameters(app)


def test_a_page_keeps_its_controls_when_it_is_left() -> None:
    app = open_page("causal_work")
    app.number_input(key="causal.sq").set_value(512).run()
    app.switch_page("screens/decode.py").run()
    app.query_params.clear()
    app.switch_page("screens/causal_work.py").run()
    assert app.number_input(key="causal.sq").value == 512
    assert parameters(app) == {"sq": "512"}


def test_every_algorithm_and_shape_can_be_drawn() -> None:
    for link in (
        {"alg": "fa1"},
        {"alg": "fa2_noskip"},
        {"alg": "fa3"},
        {"alg": "fa3", "mask": "full", "d": "256", "tiles": "custom"},
        {"mask": "full"},
        {"sq": "1", "sk": "1"},
        {"sq": "1000", "sk": "10"},
        {"sq": "10", "sk": "1000", "batch": "1", "heads": "1"},
        {
            "sq": "16384",
            "sk": "16384",
            "tiles": "custom",
            "bq": "64",
            "bkv": "64",
            "batch": "4",
            "heads": "20",
        },
        {"sq": "131072", "sk": "131072", "tiles": "custom", "bq": "16", "bkv": "16"},
        {"d": "256", "card": "86"},
    ):
        app = open_page("causal_work", **link)
        assert "cufa-verdict" in words(app), link


def test_an_algorithm_that_the_card_does_not_run_is_not_shown() -> None:
    app = open_page("causal_work", alg="fa3", card="80")
    assert "'fa3'" in app.warning[0].value
    assert parameters(app) == {"card": "80"}


def test_tiles_that_would_be_too_many_are_made_larger_and_it_says_so() -> None:
    app = open_page("causal_work", sq="131072", tiles="custom", bq="16")
    assert "are too many" in app.warning[0].value


def test_no_trace_is_said_plainly() -> None:
    assert "no trace of this problem is recorded" in words(open_page("causal_work"))


def test_a_trace_stands_beside_the_prediction(elsewhere: Path) -> None:
    app = open_page("causal_work")
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", True), DEVICE, "fa2")
    traces.save(make_trace(plan), elsewhere / "records" / "traces")
    app.run()
    said = words(app)
    assert "agree with every row of the schedule" in said
    assert "Made-up GPU" in said
    assert "measured</span>" in said
    assert "The tail is as predicted" in said


def test_a_disagreement_is_an_alarm(elsewhere: Path) -> None:
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", True), DEVICE, "fa2")
    trace = make_trace(plan)
    trace.records["tiles_visited"][7] += 1
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("causal_work")
    assert "Alarm" in words(app)
    assert "1 of 2,048 records differ" in app.error[0].value


def test_a_recorded_trace_can_be_opened(elsewhere: Path) -> None:
    plan = make_plan(make(2, 4, 2048, 64, "bfloat16", True), DEVICE, "fa1")
    trace = make_trace(plan)
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("causal_work")
    app.selectbox(key="causal.open").select(trace.name).run()
    assert app.selectbox(key="causal.open").value is None
    assert parameters(app)["alg"] == "fa1"
    assert app.number_input(key="causal.sq").value == 2048
    assert "agree with every row" in words(app)


def test_a_damaged_trace_is_named_and_the_page_goes_on(elsewhere: Path) -> None:
    folder = elsewhere / "records" / "traces"
    folder.mkdir(parents=True)
    (folder / "broken.npz").write_bytes(b"not a zip file")
    app = open_page("causal_work")
    assert "broken.npz" in app.warning[0].value


def test_a_trace_that_fails_is_shown_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)  # the process that is started finds none
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    app = open_page("causal_work")
    assert app.selectbox(key="causal.card").value == "here"
    app.button(key="causal.trace").click().run()
    assert not app.exception
    assert "ended with code" in app.error[0].value


def test_the_kernel_counts_on_this_cpu() -> None:
    app = open_page("causal_work", sq="300", sk="300", d="64")
    app.button(key="causal.emulate").click().run()
    assert not app.error, app.error[0].value
    assert "this CPU, one head" in words(app)


def test_a_tile_shows_its_softmax() -> None:
    app = open_page("causal_work", q="5", k="0")
    assert "first maximum" in words(app)
    app.number_input(key="causal.k").set_value(40).run()
    assert "is skipped" in words(app)
    assert parameters(app) == {"q": "5", "k": "40"}


def test_recorded_speedups_are_drawn(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions")
    app = open_page("causal_work")
    figures = [json.loads(e.proto.spec) for e in app.get("plotly_chart")]
    names = [trace.get("name", "") for figure in figures for trace in figure["data"]]
    assert any(name.startswith("recorded, float16") for name in names)
    assert any(name.startswith("recorded, float32") for name in names)
    said = words(app)
    assert "Made-up GPU, 2026-01-02, skip alone, float16 d64, 4 heads: 1.50× at 512" in said
    assert (
        "Made-up GPU, 2026-01-02, FA1→FA2 with all that changed, float16 d64, 4 heads: 2.50× at 512" in said
    )


def test_damaged_evidence_is_said_and_the_page_goes_on(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions").write_text('{"schema": 1}')
    assert "cannot be read" in words(open_page("causal_work"))
    assert "cannot be read" in words(open_page("roofline"))


# --- The other pages -------------------------------------------------------------------------------------


def test_occupancy_compiles_and_explains(elsewhere: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy", kernel="naive", d="64")
    assert "Limited by" in words(app)
    registers = app.slider(key="occupancy.regs")
    compiled_with = registers.value
    registers.set_value(32).run()
    assert parameters(app)["regs"] == "32"
    assert compiled_with != 32
    stored = list((elsewhere / "cache" / "static").glob("*.json"))
    assert len(stored) == 1  # a second visit reads it


def test_occupancy_of_a_decode_kernel() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy", kernel="decode_balanced")
    assert not app.warning
    assert not app.error
    assert "Limited by" in words(app)


def test_occupancy_without_a_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise MissingCompilerError("NVRTC was not found; install it with: pip install something")

    monkeypatch.setattr(compiled, "nvrtc_version", missing)
    assert "pip install something" in words(open_page("occupancy"))


def test_roofline_of_recorded_evidence(elsewhere: Path) -> None:
    assert "make gpu-evidence" in words(open_page("roofline"))
    write_evidence(elsewhere / "records")
    app = open_page("roofline", mask="causal")
    assert "recorded</span>" in words(app)
    assert "Made-up GPU, 2026-01-02" in words(app)
    assert "waiting for the busiest SM makes it" in words(app)
    app.multiselect(key="roofline.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_decode_follows_the_planner() -> None:
    said = words(open_page("decode"))
    assert "measured</span>" not in said
    assert "predicted</span>" in said
    problem = DecodeProblem(1, 32, 8, 1, 8192, 128, "bfloat16", "bfloat16", default_scale(128))
    plan = make_decode_plan(problem, DEVICE)
    for reason in plan.reasons:
        assert html.escape(reason) in said or reason in said
    assert f"{plan.num_splits:,}" in said


@pytest.mark.parametrize(
    "link",
    [
        {"batch": "512", "cached": "131072"},
        {"batch": "3", "heads": "64", "kv": "1", "tokens": "16", "d": "256"},
        {"dtype": "bfloat16.float8_e4m3", "d": "64"},
        {"cached": "1", "ragged": "2", "spread": "1"},
        {"batch": "16", "kv": "32", "ragged": "512"},
    ],
)
def test_any_batch_can_be_decoded(link: dict[str, str]) -> None:
    app = open_page("decode", **link)
    assert not app.warning
    assert "predicted</span>" in words(app)


def test_recorded_decoding_stands_beside_the_plan(elsewhere: Path) -> None:
    assert "No decoding is recorded" in words(open_page("decode"))
    write_evidence(elsewhere / "records", "versions")
    said = words(open_page("decode"))
    assert "flash_decode reaches 91% of a plain read at best" in said
    assert "This very problem: " in said  # one sequence, 32/8 heads, 8k: a published shape
    assert "recorded</span>" in said


def test_a_curve_of_splits_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    monkeypatch.setattr(
        client, "submit", lambda store, job: asked.append(job) or "20260101T000000.000000-abcdef"
    )
    app = open_page("decode", cached="4096")
    app.button(key="decode.measure").click().run()
    assert not app.exception
    (job,) = asked
    (case,) = job.decode
    assert [c.label for c in case.contenders][:3] == ["planner", "balanced", "1 splits"]
    assert all(c.plan(DEVICE).num_splits for c in case.contenders)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_ragged_batch_is_measured_on_a_gpu(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    monkeypatch.setattr(
        client, "submit", lambda store, job: asked.append(job) or "20260101T000000.000000-abcdef"
    )
    link = {"ragged": "16", "spread": "64"}
    app = open_page("decode", **link)
    app.button(key="decode.measure.ragged").click().run()
    assert not app.exception
    (case,) = asked[0].decode
    assert len(case.lengths) == 16
    assert {c.schedule for c in case.contenders} == {"balanced", "fixed"}
    assert Job.from_json(json.loads(json.dumps(asked[0].to_json()))) == asked[0]
    assert "against" not in words(app)
    file = write_evidence(elsewhere / "records", "versions")
    record = json.loads(file.read_text())
    record["decode"]["rows"] += decode_records(case)
    file.write_text(json.dumps(record))
    said = words(open_page("decode", **link))
    assert re.search(r"Shares are 1\.05× faster than .*: .*, 91% against 87% of a plain read", said)
    other = open_page("decode", **link, tiles=other_tiles(app))
    assert other.button(key="decode.measure.ragged").disabled  # a run takes the planner's tiles


def other_tiles(app: AppTest) -> str:
    """Such as the planner does not choose."""
    chosen = app.selectbox(key="decode.tiles")
    words = chosen.options[1 if chosen.index == 0 else 0]
    problem = DecodeProblem(1, 32, 8, 1, 8192, 128, "bfloat16", "bfloat16", default_scale(128))
    configs = make_decode_plan(problem, DEVICE).spec.configs
    return next(config_key(c) for c in configs if c.fits(128) and config_words(c) == words)


def test_an_architecture_without_a_decode_kernel_says_so() -> None:
    app = open_page("decode", card="80", dtype="bfloat16.float8_e4m3")
    assert "No kernel decodes this on sm_80" in words(app)


def test_options_that_look_alike_are_told_apart() -> None:
    """A browser sends the words of what it chose: of two runs of one second it would get the wrong one."""
    from cufa.dashboard.state import _distinct

    words = _distinct({"latest": "the latest run", "b": "12:00:01 · fa2", "a": "12:00:01 · fa2"})
    assert words == {"latest": "the latest run", "b": "12:00:01 · fa2 (2)", "a": "12:00:01 · fa2"}
    assert list(words) == ["latest", "b", "a"]


# --- The command -----------------------------------------------------------------------------------------


def test_the_command_starts_streamlit_on_this_very_cufa(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cufa.cli import main

    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append((command, env)))
    result = CliRunner().invoke(main, ["dashboard", "--no-browser", "--port", "8700"])
    assert result.exit_code == 0, result.output
    (command, environment), *_ = started
    assert command[1:5] == ["-m", "streamlit", "run", str(Path(APP).with_name("server.py"))]
    assert "--server.port=8700" in command
    assert not any("headless" in argument for argument in command)
    assert environment["CUFA_DASHBOARD_OPEN_BROWSER"] == "0"
    assert CliRunner().invoke(main, ["dashboard"]).exit_code == 0
    assert started[1][1]["CUFA_DASHBOARD_OPEN_BROWSER"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(APP).parents[1])


def test_the_command_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from cufa.cli import main

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else real(name))
    result = CliRunner().invoke(main, ["dashboard"])
    assert result.exit_code == 3
    assert "pip install 'cufa[dashboard]'" in result.output


def test_importing_cufa_loads_nothing_of_the_dashboard() -> None:
    code = "import sys, cufa, cufa.cli; print({'streamlit', 'plotly', 'cufa.dashboard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- Speed -----------------------------------------------------------------------------------------------


LARGE = {"sq": "16384", "sk": "16384", "heads": "20", "tiles": "custom", "bq": "64", "bkv": "64"}
"""256 × 256 tiles, 20,480 thread blocks."""


@pytest.mark.parametrize("link", [{}, LARGE, {**LARGE, "alg": "fa3"}], ids=["default", "large", "persistent"])
def test_the_page_is_made_in_a_fifth_of_a_second(link: dict[str, str]) -> None:
    """Processor time of a whole rerun with another mask: what other work on the machine does not change."""
    app = open_page("causal_work", **link)
    spent = []
    for mask in ("full", "causal") * 2:
        app.segmented_control(key="causal.mask").set_value(mask)
        start = time.process_time()
        app.run()
        spent.append(time.process_time() - start)
        assert not app.exception
    print(f"\n{', '.join(f'{1000 * s:.0f} ms' for s in spent)}")
    assert min(spent[2:]) < 0.2
    assert min(spent[:2]) < 0.4  # seen for the first time
