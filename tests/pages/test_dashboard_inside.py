"""Masked work, inside a block, under Streamlit's AppTest."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from conftest import why_no_compiler
from dashboard_page_support import elsewhere, open_page, words  # noqa: F401 - a fixture among them

from cufa.gpu.architectures import Device
from cufa.measure import inside
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL

SMALL = {"sq": "512", "sk": "512", "alg": "fa3", "batch": "1", "heads": "2"}


@pytest.fixture
def compiler() -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)


def test_without_a_recorded_trace_the_order_is_executed(elsewhere: Path, compiler: None) -> None:
    app = open_page("masked_work", **SMALL)
    assert "no trace of the inside of such a thread block is recorded" in words(app)
    app.button(key="masked.inside").click().run(timeout=120)
    assert not app.exception
    said = words(app)
    assert "Executed on the CPU: order, not time." in said
    assert "of the softmax overlaps products" not in said  # which would be a figure of time
    assert "µs on one SM" not in said


def test_a_kernel_without_stamps_says_so(elsewhere: Path) -> None:
    assert "fa1_forward has no time stamps" in words(open_page("masked_work", alg="fa1"))


def test_too_long_to_execute_is_said_before(elsewhere: Path) -> None:
    app = open_page("masked_work", alg="fa3", sq="65536", sk="65536")
    assert app.button(key="masked.inside").disabled


def test_a_recorded_trace_is_shown_with_its_sums(
    elsewhere: Path, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make(1, 1, 512, 128, "bfloat16", CAUSAL)
    trace = inside.execute(make_plan(problem, Device.typical("sm_90"), "fa3"))
    environment = {"device": "NVIDIA H200", "recorded": "2026-11-22T10:00:00", "arch": "sm_90"}
    heads = trace.logs.heads.copy()
    heads["start_ns"], heads["end_ns"] = heads["start_clock"], heads["end_clock"]
    logs = dataclasses.replace(trace.logs, heads=heads)
    folder = elsewhere / "inside"
    measured = dataclasses.replace(trace, clock="cycles", environment=environment, slowdown=1.125, logs=logs)
    inside.save(measured, folder)
    monkeypatch.setattr(inside, "INSIDE_DIR", folder)
    tiles = f"{trace.config.block_q}x{trace.config.block_kv}"
    app = open_page("masked_work", **{**SMALL, "d": "128"})
    said = words(app)
    assert not app.exception
    if "no trace of the inside" in said:
        pytest.fail(f"tiles {tiles} of the trace are not those that the page shows")
    assert "µs on one SM; its warps wait" in said
    assert "of the softmax overlaps products" in said
    assert "in a special build: its run takes 12.5% longer than a run without stamps." in said
    (folder / "damaged.npz").write_text("nothing")
    assert not open_page("masked_work", **{**SMALL, "d": "128"}).exception
