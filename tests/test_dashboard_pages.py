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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

import streamlit as st
from dashboard_support import APP, DEVICE, case_records, make_trace, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.bench import records, traces
from cufa.bench.decode_cases import make_decode
from cufa.bench.suites import make
from cufa.core.architectures import Device
from cufa.core.mask import CAUSAL
from cufa.dashboard.model import compiled, devices, gpu
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
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
        ("masked_work", "sq", "banana"),
        ("masked_work", "sq", "0"),
        ("masked_work", "sq", "999999999999"),
        ("masked_work", "sk", "-5"),
        ("masked_work", "alg", "fa9"),
        ("masked_work", "kv", "7"),
        ("masked_work", "card", "70"),
        ("masked_work", "tiles", "1x1"),
        ("masked_work", "q", "32"),
        ("masked_work", "mask", "<script>alert(1)</script>"),
        ("masked_work", "diag", "middle"),
        ("masked_work", "softcap", "0"),
        ("masked_work", "softcap", "-30"),
        ("masked_work", "softcap", "nan"),
        ("decode", "mask", "full"),
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


# --- Masked work -----------------------------------------------------------------------------------------


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
    app = open_page("masked_work", **link)
    assert not app.warning
    assert parameters(app) == link
    assert app.number_input(key="masked.sq").value == 1000
    app.number_input(key="masked.sk").set_value(500).run()
    assert parameters(app) == {**link, "sk": "500"}
    app.number_input(key="masked.sk").set_value(4096).run()
    assert "sk" not in parameters(app)


def test_a_page_keeps_its_controls_when_it_is_left() -> None:
    app = open_page("masked_work")
    app.number_input(key="masked.sq").set_value(512).run()
    app.switch_page("screens/decode.py").run()
    app.query_params.clear()
    app.switch_page("screens/masked_work.py").run()
    assert app.number_input(key="masked.sq").value == 512
    assert parameters(app) == {"sq": "512"}


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ({}, "causal"),
        ({"mask": "full"}, "full"),
        ({"diag": "top-left"}, "causal top-left"),
        ({"mask": "window"}, "window (1023, 0)"),
        ({"mask": "window", "left": "511", "right": "128"}, "window (511, 128)"),
        ({"mask": "window", "left": "none", "right": "7"}, "window (None, 7)"),
        ({"mask": "window", "diag": "at", "at": "-300"}, "window (1023, 0) diagonal -300"),
        ({"softcap": "30"}, "causal, softcap 30"),
    ],
)
def test_a_link_carries_any_mask(link: dict[str, str], text: str) -> None:
    app = open_page("masked_work", **link, sq="3000", sk="3000")
    assert not app.warning
    expected = {**link, "sq": "3000", "sk": "3000"}
    if "softcap" in link:
        expected["softcap"] = "30.0"
    assert parameters(app) == expected
    assert f"Mask: **{text}**" in words(app)
    assert any(
        f"under the mask {text.removesuffix(', softcap 30')}:" in e.proto.alt for e in app.get("plotly_chart")
    )


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_a_bad_side_of_a_window_falls_back_and_says_so(value: str) -> None:
    app = open_page("masked_work", mask="window", left=value)
    assert repr(value) in app.warning[0].value
    assert "or none" in app.warning[0].value
    assert parameters(app) == {"mask": "window"}
    stray = open_page("masked_work", left="5")  # of a window, which the link does not ask for
    assert "'left'" in stray.warning[0].value


def test_the_sides_of_a_window_can_be_emptied_and_come_back() -> None:
    app = open_page("masked_work", mask="window", sq="512", sk="512")
    app.number_input(key="masked.left").set_value(None).run()
    assert parameters(app)["left"] == "none"
    assert "window (None, 0)" not in words(app)  # which is causal
    app.number_input(key="masked.left").set_value(100).run()
    assert "window (100, 0)" in words(app)
    app.segmented_control(key="masked.mask").set_value("causal").run()
    assert "left" not in parameters(app)
    app.segmented_control(key="masked.mask").set_value("window").run()
    assert app.number_input(key="masked.left").value == 100


def test_every_algorithm_and_shape_can_be_drawn() -> None:
    for link in (
        {"alg": "fa1"},
        {"alg": "fa2_noskip"},
        {"alg": "fa3"},
        {"alg": "fa3", "mask": "full", "d": "256", "tiles": "custom"},
        {"mask": "full"},
        {"alg": "fa3", "mask": "window", "left": "300", "right": "100"},
        {"alg": "fa2_noskip", "mask": "window", "left": "0", "right": "0", "sk": "5000", "diag": "top-left"},
        {"mask": "window", "left": "10", "right": "none", "diag": "at", "at": "9999"},
        {"alg": "fa1", "mask": "window", "softcap": "50"},
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
        app = open_page("masked_work", **link)
        assert "cufa-verdict" in words(app), link


def test_an_algorithm_that_the_card_does_not_run_is_not_shown() -> None:
    app = open_page("masked_work", alg="fa3", card="80")
    assert "'fa3'" in app.warning[0].value
    assert parameters(app) == {"card": "80"}


def test_tiles_that_would_be_too_many_are_made_larger_and_it_says_so() -> None:
    app = open_page("masked_work", sq="131072", tiles="custom", bq="16")
    assert "are too many" in app.warning[0].value


def test_no_trace_is_said_plainly() -> None:
    assert "no trace of this problem is recorded" in words(open_page("masked_work"))


def test_a_trace_stands_beside_the_prediction(elsewhere: Path) -> None:
    app = open_page("masked_work")
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, "fa2")
    traces.save(make_trace(plan), elsewhere / "records" / "traces")
    app.run()
    said = words(app)
    assert "agree with every row of the schedule" in said
    assert "Made-up GPU" in said
    assert "measured</span>" in said
    assert "The tail is as predicted" in said


def test_a_disagreement_is_an_alarm(elsewhere: Path) -> None:
    plan = make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, "fa2")
    trace = make_trace(plan)
    trace.records["tiles_visited"][7] += 1
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("masked_work")
    assert "Alarm" in words(app)
    assert "1 of 2,048 records differ" in app.error[0].value


def test_a_recorded_trace_can_be_opened(elsewhere: Path) -> None:
    plan = make_plan(make(2, 4, 2048, 64, "bfloat16", CAUSAL), DEVICE, "fa1")
    trace = make_trace(plan)
    traces.save(trace, elsewhere / "records" / "traces")
    app = open_page("masked_work")
    app.selectbox(key="masked.open").select(trace.name).run()
    assert app.selectbox(key="masked.open").value is None
    assert parameters(app)["alg"] == "fa1"
    assert app.number_input(key="masked.sq").value == 2048
    assert "agree with every row" in words(app)


def test_a_damaged_trace_is_named_and_the_page_goes_on(elsewhere: Path) -> None:
    folder = elsewhere / "records" / "traces"
    folder.mkdir(parents=True)
    (folder / "broken.npz").write_bytes(b"not a zip file")
    app = open_page("masked_work")
    assert "broken.npz" in app.warning[0].value


def test_a_trace_that_fails_is_shown_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)  # the process that is started finds none
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)
    app = open_page("masked_work")
    assert app.selectbox(key="masked.card").value == "here"
    app.button(key="masked.trace").click().run()
    assert not app.exception
    assert "ended with code" in app.error[0].value


def test_the_kernel_counts_on_this_cpu() -> None:
    app = open_page("masked_work", sq="300", sk="300", d="64")
    app.button(key="masked.emulate").click().run()
    assert not app.error, app.error[0].value
    assert "this CPU, one head" in words(app)


def test_a_tile_shows_its_softmax() -> None:
    app = open_page("masked_work", q="5", k="0")
    assert "first maximum" in words(app)
    app.number_input(key="masked.k").set_value(40).run()
    assert "is skipped" in words(app)
    assert parameters(app) == {"q": "5", "k": "40"}


def test_recorded_speedups_are_drawn(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions")
    app = open_page("masked_work")
    figures = [json.loads(e.proto.spec) for e in app.get("plotly_chart")]
    names = [trace.get("name", "") for figure in figures for trace in figure["data"]]
    assert any(name.startswith("recorded, float16") for name in names)
    assert "no evidence with and without skipping under window" in words(
        open_page("masked_work", mask="window")
    )
    assert any(name.startswith("recorded, float32") for name in names)
    said = words(app)
    assert "Made-up GPU, 2026-01-02, skip alone, float16 d64, 4 heads, in turns: 1.50× at 512" in said
    assert (
        "Made-up GPU, 2026-01-02, FA1→FA2 with all that changed, float16 d64, 4 heads, in turns: 2.50× at 512"
        in said
    )


def test_damaged_evidence_is_said_and_the_page_goes_on(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions").write_text('{"schema": 1}')
    assert "cannot be read" in words(open_page("masked_work"))
    assert "cannot be read" in words(open_page("roofline"))


# --- The other pages -------------------------------------------------------------------------------------


def test_occupancy_compiles_and_explains(elsewhere: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy", kernel="naive", d="64", mask="band")
    assert "Mask: window" in words(app)
    assert "Limited by" in words(app)
    registers = app.slider(key="occupancy.regs")
    compiled_with = registers.value
    registers.set_value(32).run()
    assert parameters(app)["regs"] == "32"
    assert compiled_with != 32
    stored = list((elsewhere / "cache" / "static").glob("*.json"))
    assert len(stored) == 1  # a second visit reads it


def test_occupancy_of_a_kernel_over_a_cache() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy", kernel="decode_balanced", cache="1")
    assert len(app.selectbox(key="occupancy.cache").options) > 1
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
    assert "in turns" in words(app)
    app.segmented_control(key="roofline.regime").set_value("sustained").run()
    assert "sustained" in words(app)
    decoding = open_page("roofline", suite="decode")
    assert not decoding.warning
    assert "of what memory allows" in words(decoding)
    app.multiselect(key="roofline.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_decode_follows_the_planner() -> None:
    said = words(open_page("decode"))
    assert "measured</span>" not in said
    assert "predicted</span>" in said
    plan = make_plan(make_decode(1, 32, 8, 8192), Device.typical(90))
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
        {"mask": "window", "left": "1023", "cached": "131072", "softcap": "30"},
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
    assert "flash_decode reaches 91% of a plain read" in said
    assert "This very problem: " in said  # one sequence, 32/8 heads, 8k: a published shape
    assert "recorded</span>" in said
    app = open_page("decode")
    app.selectbox(key="decode.record").set_value("made-up-gpu, sustained").run()
    assert "Measured sustained on" in words(app)


def test_a_window_reads_only_what_it_sees() -> None:
    whole, window = (words(open_page("decode", cached="131072", **x)) for x in ({}, {"mask": "window"}))
    assert "some query sees are 536.9 MB" in whole
    assert "some query sees are 4.2 MB" in window
    assert "window (1023, 0)" in window


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
    (case,) = job.cases
    assert [c.label for c in case.contenders][:4] == ["planner", "balanced", "1 split", "2 splits"]
    assert all(c.plan(case.problem, DEVICE).num_splits for c in case.contenders if c.is_ours)
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
    (case,) = asked[0].cases
    assert len(case.lengths) == 16
    assert {c.algorithm for c in case.contenders} == {"balanced", "fixed", "streaming read"}
    assert Job.from_json(json.loads(json.dumps(asked[0].to_json()))) == asked[0]
    assert "against" not in words(app)
    file = write_evidence(elsewhere / "records", "versions")
    record = json.loads(file.read_text())
    record["suites"]["decode"]["rows"] += case_records(case)
    file.write_text(json.dumps(record))
    said = words(open_page("decode", **link))
    assert re.search(r"Shares are 1\.05× faster than .*: .*, 91% against 87% of a plain read", said)
    other = open_page("decode", **link, tiles=other_tiles(app))
    assert other.button(key="decode.measure.ragged").disabled  # a run takes the planner's tiles


def other_tiles(app: AppTest) -> str:
    """Such as the planner does not choose."""
    chosen = app.selectbox(key="decode.tiles")
    words = chosen.options[1 if chosen.index == 0 else 0]
    configs = make_plan(make_decode(1, 32, 8, 8192), DEVICE).spec.configs
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
