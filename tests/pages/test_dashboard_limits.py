"""The pages Occupancy and Roofline under Streamlit's AppTest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from card_support import edit, write_lines
from dashboard_page_support import chosen, figures, has, open_page, parameters, words
from dashboard_support import DEVICE, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.build.static_compile import MissingCompilerError
from cufa.dashboard.model import builder, devices
from cufa.measure import cards, memory_rates
from cufa.measure.cards import read_lines


def test_occupancy_compiles_and_explains(elsewhere: Path, nvrtc: None) -> None:
    app = open_page("occupancy", kernel="naive", d="64", mask="band")
    has(words(app), "Mask: window", "Limited by")
    registers = app.slider(key="occupancy.regs")
    compiled_with = registers.value
    registers.set_value(32).run()
    assert parameters(app)["regs"] == "32"
    assert compiled_with != 32
    has(words(open_page("occupancy", kernel="naive", d="64", mask="band")), "Limited by")
    stored = list((elsewhere / "cache" / "static").glob("*.json"))
    assert len(stored) == 1  # a second visit reads it


def test_occupancy_without_a_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise MissingCompilerError("NVRTC was not found; install it with: pip install something")

    monkeypatch.setattr(builder, "nvrtc_version", missing)
    assert "pip install something" in words(open_page("occupancy"))


def test_roofline_of_recorded_evidence(elsewhere: Path) -> None:
    assert "make gpu-evidence" in words(open_page("roofline"))
    write_evidence(elsewhere / "records")
    app = open_page("roofline", mask="causal")
    has(words(app), "recorded</span>", "Made-up GPU, 2026-01-02")
    shapes = app.selectbox(key="roofline.shape")
    shapes.set_value(next(name for name in shapes.options if name.startswith("fa3"))).run()
    has(words(app), "alone need", "in turns")
    app.segmented_control(key="roofline.regime").set_value("sustained").run()
    assert "sustained" in words(app)
    assert any({"clock", "power", "energy per call"} <= set(table.value.columns) for table in app.dataframe)
    for suite, bound in (("decode", "memory"), ("forward", "")):  # memory has one roof, the fastest reading
        of_suite = open_page("roofline", suite=suite)
        assert not of_suite.warning and f"of the limit by {bound}" in words(of_suite)
        assert "memory: 4.00 TB/s" in [trace.get("name", "") for trace in figures(of_suite)[0]["data"]]
    app.multiselect(key="roofline.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_what_if_goes_with_its_kernel_and_can_be_taken_back(nvrtc: None) -> None:
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


@pytest.mark.in_turn
def test_the_limits_of_a_build_are_a_table(nvrtc: None) -> None:
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
    assert "setmaxnreg" in words(app)  # the Hopper kernel moves registers from its producer to its consumers
    decode = open_page("occupancy", kernel="decode_balanced", cache="1")
    assert len(decode.selectbox(key="occupancy.cache").options) > 1
    assert not decode.warning and not decode.error and "Limited by" in words(decode)


def test_recorded_ceilings_of_caches_are_possible() -> None:
    """Faster than device memory; at most 64 bytes per clock and SM from L2, 128 from shared memory."""
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


def recorded(folder: Path, device: str, *, needs: bool) -> None:
    """Evidence of the backward on a card of this name, with or without recorded needs."""
    file = write_evidence(folder / "records", "backward", with_loads=False)
    # Near an H200.
    rates = {"flops": {"bfloat16": 9e14}, "sustained_flops": {"bfloat16": 8.9e14}, "exponentials": 4.1e12}

    def change(line: dict[str, Any]) -> dict[str, Any]:
        if line.get("what") == "session":
            return {**line, "device": device}
        if line.get("what") == "ceilings":
            return {**line, **rates}
        if "what" not in line and not needs:
            line.pop("needs_ns", None), line.pop("predicted_ns", None)
        return {**line, "card": device} if "card" in line else line

    edit(file, change)


def shown(head_dim: int) -> tuple[AppTest, dict[str, float]]:
    """The page of FA3's backward, and its bars: what each resource needs."""
    app = open_page("roofline", suite="backward", mask="full")
    shapes = app.selectbox(key="roofline.shape")
    shapes.set_value(next(x for x in shapes.options if "fa3" in x and f"head_dim {head_dim}," in x)).run()
    assert not app.exception
    bar = next(trace for f in figures(app) for trace in f["data"] if trace["type"] == "bar")
    return app, dict(zip(bar["y"], bar["x"], strict=True))


def test_what_binds_is_derived_and_counted(elsewhere: Path) -> None:
    """By one model, also where a session recorded other needs."""
    recorded(elsewhere, "NVIDIA H200", needs=True)
    of_rows = shown(128)[1]
    recorded(elsewhere, "NVIDIA H200", needs=False)
    app, bars = shown(128)
    assert bars == of_rows
    has(words(app), "shared memory alone needs", "bytes per product, more than the 0.0729 at which")
    table = next(e.value for e in app.dataframe if "per product" in e.value)
    each = dict(zip(table["counted"], table["per product"], strict=True))
    assert each["multiply-adds"] == "1.0000"
    # 64 + 64 rows of 128 or 64 columns for 64 · 64 products of two bytes each, and the copies.
    assert 0.05 < float(each["shared memory, by tensor cores and copy engine"]) < 0.0729
    assert {"shared memory, by threads", "added in the L2 cache, float32"} <= each.keys()
    app, bars = shown(256)  # pairs of blocks add half as much in the L2 cache as blocks did
    assert {"products", "shared memory", "L2 additions", "passes"} <= bars.keys()
    has(words(app), "shared memory alone needs")
    has(words(app), "3.9 TB/s (measured by hand on one H200 on 2026-11-22, not recorded yet)")
    recorded(elsewhere, "NVIDIA H20", needs=False)
    app, bars = shown(256)
    assert "L2 additions" not in bars
    has(words(app), "The rate of additions in the L2 cache of NVIDIA H20 is not measured")
