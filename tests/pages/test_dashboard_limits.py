"""The pages Occupancy and Roofline under Streamlit's AppTest."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from card_support import write_lines
from dashboard_page_support import (  # noqa: F401 - fixtures among them
    PAGES,
    Open,
    chosen,
    compiler_back,
    elsewhere,
    open_page,
    parameters,
    without_compiler,
    words,
)
from dashboard_support import DEVICE, write_evidence

from cufa.build.static_compile import MissingCompilerError
from cufa.dashboard.model import builder, devices
from cufa.measure import cards, memory_rates
from cufa.measure.cards import read_lines


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

    monkeypatch.setattr(builder, "nvrtc_version", missing)
    assert "pip install something" in words(open_page("occupancy"))


def test_roofline_of_recorded_evidence(elsewhere: Path) -> None:
    assert "make gpu-evidence" in words(open_page("roofline"))
    write_evidence(elsewhere / "records")
    app = open_page("roofline", mask="causal")
    assert "recorded</span>" in words(app)
    assert "Made-up GPU, 2026-01-02" in words(app)
    shapes = app.selectbox(key="roofline.shape")
    shapes.set_value(next(name for name in shapes.options if name.startswith("fa3"))).run()
    assert "waiting for the busiest SM adds up to" in words(app)
    assert "in turns" in words(app)
    app.segmented_control(key="roofline.regime").set_value("sustained").run()
    assert "sustained" in words(app)
    decoding = open_page("roofline", suite="decode")
    assert not decoding.warning
    assert "of what memory allows" in words(decoding)
    app.multiselect(key="roofline.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_what_if_goes_with_its_kernel_and_can_be_taken_back() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy", kernel="naive", d="64", regs="32")
    assert app.slider(key="occupancy.regs").value == 32
    assert "predicted</span>" in words(app)
    app.button(key="occupancy.reset").click().run()
    compiled_with = app.slider(key="occupancy.regs").value
    assert compiled_with != 32
    assert "regs" not in chosen(app)
    app.slider(key="occupancy.regs").set_value(48).run()
    app.selectbox(key="occupancy.d").set_value("128").run()
    assert not app.exception
    assert "regs" not in chosen(app)
    assert "Move a slider" in words(app)


def test_what_only_reads_has_the_fastest_reading_for_a_roof(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    figures = [json.loads(e.proto.spec) for e in open_page("roofline", suite="decode").get("plotly_chart")]
    names = [trace.get("name", "") for trace in figures[0]["data"]]
    assert "memory, reading: 4.00 TB/s" in names
    figures = [json.loads(e.proto.spec) for e in open_page("roofline", suite="forward").get("plotly_chart")]
    assert any(
        name.startswith("memory, copying: ")
        for trace in figures[0]["data"]
        for name in [trace.get("name", "")]
    )


def test_the_roofline_begins_with_this_machines_card_or_where_most_was_measured(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = read_lines(write_evidence(elsewhere / "records"))
    lines[0]["device"] = "Another GPU"
    fewer = [line for line in lines if line.get("suite") != "versions"]
    write_lines(elsewhere / "records" / "a-file-that-sorts-first.jsonl", fewer)
    assert parameters(open_page("roofline"))["machine"] == "made-up-gpu"
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: dataclasses.replace(DEVICE, name="Another GPU"))
    assert parameters(open_page("roofline"))["machine"] == "a-file-that-sorts-first"


def test_the_roofline_has_every_level_of_memory(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    app = open_page("roofline", mask="causal")
    levels = next(e.value for e in app.dataframe if "level" in e.value)
    assert list(levels["level"]) == ["device memory", "L2 cache", "shared memory"]
    assert list(levels["ceiling"])[1:] == ["not measured"] * 2
    assert "no ceiling of its caches is recorded" in words(app)
    record = memory_rates.MemoryRates("Made-up GPU", "2026-01-03T00:00:00+00:00", 7e12, 33e12)
    memory_rates.record(record)
    app.run()
    levels = next(e.value for e in app.dataframe if "level" in e.value)
    assert list(levels["ceiling"])[1:] == ["7.00 TB/s", "33.00 TB/s"]
    assert "is the slowest level" in words(app)
    (elsewhere / "records" / "memory" / "made-up-gpu.json").write_text("{}")
    assert "made-up-gpu.json is damaged" in words(open_page("roofline", mask="causal"))
    file.unlink()


def test_the_limits_of_a_build_are_a_table() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app = open_page("occupancy")
    table = next(e.value for e in app.markdown if "blocks per SM" in e.value)
    names, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    rows = [dict(zip(names, line, strict=True)) for line in lines]
    assert [row["resource"] for row in rows] == ["warps", "registers", "shared memory", "barriers", "blocks"]
    limits = {row["resource"]: row["blocks per SM"] for row in rows}
    assert min(int(n) for n in limits.values() if n != "no limit") == 1
    assert limits["registers"] == "1"
    assert [row["resource"] for row in rows if row[""] == "limits"] == [
        name for name, n in limits.items() if n == "1"
    ]
    assert "setmaxnreg" in words(app)  # Hopper's kernel moves registers from its producer to its consumers


def test_recorded_ceilings_of_caches_are_possible() -> None:
    """Faster than device memory, and no faster than an SM takes it: 64 bytes a clock from L2, 128 of its own."""
    shipped = (
        Path(cards.__file__).parents[1] / "records" / memory_rates.FOLDER
    )  # not those of this test's folder
    files = sorted(shipped.glob("*.json"))
    assert files
    for file in files:
        found = memory_rates.MemoryRates(**json.loads(file.read_text()))
        clocks = 132 * 1.98e9 if "H200" in found.device else float("inf")
        assert 4.5e12 < found.l2_bytes < 64 * clocks
        assert found.shared_bytes is None or found.l2_bytes < found.shared_bytes < 1.01 * 128 * clocks
