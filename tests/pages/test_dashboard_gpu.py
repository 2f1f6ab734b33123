"""The dashboard on a machine with a GPU: pages, and runs from start to result.

The texts of the pages are written to ``$CUFA_SCREENSHOTS``, if that is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

import dashboard_page_support
import streamlit as st
from dashboard_page_support import PAGES, alts, has, want_one, words
from dashboard_run_support import end_worker, over, wait_for, worker_pid
from streamlit.testing.v1 import AppTest

from cufa.dashboard.model import compiled
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Runs of all tests of this file; the worker ends with them."""
    found = Store(tmp_path_factory.mktemp("runs"))
    yield found
    end_worker(found)


@pytest.fixture(autouse=True)
def elsewhere(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real evidence and GPU; no files of the user."""
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUFA_RUNS_DIR", str(store.root))
    monkeypatch.setattr(compiled.Compiler, "want", want_one)
    st.cache_data.clear()
    st.cache_resource.clear()


def open_page(name: str, **parameters: str) -> AppTest:
    return seen(dashboard_page_support.open_page(name, **parameters), name)


def seen(app: AppTest, name: str) -> AppTest:
    """The page has no exception; its text is saved."""
    assert not app.exception, [e.value for e in app.exception]
    folder = os.environ.get("CUFA_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        figures = [f"[figure] {e.proto.alt}" for e in app.get("plotly_chart")]
        metrics = [f"[metric] {m.label}: {m.value}" for m in app.metric]
        tables = [f"[table]\n{t.value.to_string(max_rows=12)}" for t in app.dataframe]
        with (Path(folder) / "pages.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n===== {name} {dict(app.query_params)}\n{words(app)}\n")
            file.write("\n".join([*metrics, *figures, *tables]) + "\n")
    return app


def newest(store: Store, wanted: Callable[[Run], bool] = over) -> Run:
    """The newest run, once it is as wanted."""
    return wait_for(store, store.ids()[0], wanted)


def done(store: Store) -> Run:
    run = newest(store)
    assert run.status is Status.DONE, f"{run.message}\n{run.detail}"
    return run


def clicked(app: AppTest, key: str) -> AppTest:
    app.button(key=key).click().run()
    assert not app.exception, [e.value for e in app.exception]
    return app


@pytest.mark.parametrize("name", PAGES)
def test_every_page_with_a_gpu(name: str) -> None:
    app = open_page(name)
    assert not app.error, [e.value for e in app.error]
    assert "cufa-verdict" in words(app)


SMALL = {"kernels": "fa2,fa3", "batch": "2", "heads": "8", "kv": "8", "sq": "2048", "sk": "2048", "d": "128"}


def test_a_forward_run_from_its_page_to_its_result(store: Store) -> None:
    app = open_page("run", **SMALL, also="4096", seconds="0.2")
    assert app.selectbox(key="run.on").value == "cuda:0"
    clicked(app, "run.start")
    run = done(store)
    assert len(run.rows) >= 2
    seen(app.run(), "run, after a run")
    assert "measured on GPU" in words(app)
    metrics = {m.label: m.value for m in app.metric}
    assert float(metrics["Largest error against float64"]) < 0.02
    assert 0 < float(next(v for k, v in metrics.items() if k.startswith("Of the limit")).rstrip("%")) <= 110
    table = app.dataframe[0].value
    assert set(table["kernel"]) >= {run.rows[0]["label"]}
    assert not table["compile"].str.fullmatch("–").all()
    compare = open_page("compare")
    assert "runs here" in str(compare.selectbox(key="compare.machine").options)
    history = words(open_page("history", **{"from": "run"}))
    assert "2 kernels" in history


def test_a_window_alone_with_its_energy(store: Store) -> None:
    link = {**SMALL, "mask": "window", "left": "255", "regime": "sustained", "seconds": "1"}
    app = clicked(open_page("run", **link), "run.start")
    run = done(store)
    assert {row["regime"] for row in run.rows} == {"sustained"}
    assert all(row["max_error"] < 0.02 for row in run.rows if "kernel" in row)
    said = words(seen(app.run(), "run, sustained"))
    has(said, "window (255, 0)", "sustained")
    assert "clock" in app.dataframe[0].value


def test_a_suite_of_decoding_from_its_page_to_its_result(store: Store) -> None:
    """Ragged lengths and pages are among its cases."""
    app = clicked(open_page("run", op="decode", preset="suite-decode", seconds="0.2"), "run.start")
    run = done(store)
    titles = " ".join(dict.fromkeys(row["case"] for row in run.rows))
    has(titles, "ragged", "pages")
    assert all(row["max_error"] is None or row["max_error"] < 0.05 for row in run.rows)
    seen(app.run(), "run, after decode")
    assert "of a plain read at best" in words(app)
    decode = open_page("decode")
    assert "run of" in words(decode) + str(decode.selectbox(key="decode.record").options)


def test_a_curve_of_splits_is_measured_beside_its_prediction(store: Store) -> None:
    app = clicked(open_page("decode", cached="16384", batch="2"), "decode.measure")
    run = done(store)
    assert {row["split"]["kind"] for row in run.rows if "split" in row} == {"fixed", "balanced"}
    app = open_page("decode", cached="16384", batch="2")
    assert "Measured for this problem: " in words(app)
    curve = json.loads(app.get("plotly_chart")[0].proto.spec)
    assert "measured" in [trace.get("name") for trace in curve["data"]]


def test_a_ragged_batch_is_measured_beside_its_prediction(store: Store) -> None:
    link = {"cached": "32768", "ragged": "16", "spread": "64"}
    app = clicked(open_page("decode", **link), "decode.measure.ragged")
    done(store)
    app = open_page("decode", **link)
    assert re.search(r"faster than .*against \d+% of a plain read", words(app))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_trace_stands_beside_its_prediction(algorithm: str) -> None:
    app = open_page("masked_work", alg=algorithm)
    assert app.selectbox(key="masked.card").options[0].startswith("NVIDIA ")
    with contextlib.suppress(KeyError):  # the page already shows a recorded trace of this launch
        clicked(app, "masked.trace")
    assert not app.error, [e.value for e in app.error]
    said = words(seen(app.run(), f"masked work, {algorithm} traced"))
    assert "agree with every row of the schedule" in said
    assert "Alarm" not in said
    assert "The tail is " in said
    charts = alts(app)
    assert any(alt.startswith("Measured timeline") for alt in charts)
    assert any(alt.startswith("Predicted timeline") for alt in charts)


@pytest.mark.parametrize(
    "link",
    [
        {"mask": "window", "left": "700", "right": "100", "batch": "1", "heads": "4", "d": "64"},
        {"sq": "3000", "sk": "3333", "batch": "1", "heads": "7", "d": "64"},
    ],
    ids=["window", "lengths"],
)
def test_a_trace_of_a_launch_without_a_record(link: dict[str, str]) -> None:
    app = clicked(open_page("masked_work", **link), "masked.trace")
    assert not app.error, [e.value for e in app.error]
    said = words(seen(app.run(), "masked work, traced here"))
    assert "agree with every row of the schedule" in said and "Alarm" not in said


def test_a_cancelled_run_one_too_large_and_then_one_that_works(store: Store) -> None:
    endless = clicked(open_page("run", **SMALL, also="4096,8192,16384", seconds="10"), "run.start")
    run = newest(store, lambda run: "timing" in run.phase)
    pid = worker_pid(store, "cuda:0")
    endless.run()
    clicked(endless, f"cancel.{run.id}")
    assert newest(store).status is Status.CANCELLED
    assert "Cancelled" in words(seen(endless.run(), "run, cancelled"))

    large: dict[str, Any] = {**SMALL, "batch": "256", "heads": "64", "kv": "64", "sq": "65536", "sk": "128"}
    app = clicked(open_page("run", **large, seconds="0.2"), "run.start")
    run = newest(store)
    assert run.status is Status.FAILED
    assert run.message.startswith("Out of memory"), run.message
    assert "Out of memory" in words(seen(app.run(), "run, too large"))

    app = clicked(open_page("run", **SMALL, seconds="0.2"), "run.start")
    done(store)
    assert "measured on GPU" in words(seen(app.run(), "run, after a failure"))
    assert worker_pid(store, "cuda:0") == pid  # neither ended the process
