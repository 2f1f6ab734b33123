"""The page Roofline about the backward on Hopper, under AppTest: which resource binds, and what each product asks of
shared memory."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from card_support import edit
from dashboard_page_support import elsewhere, open_page, words  # noqa: F401 - fixtures among them
from dashboard_support import write_evidence


def recorded(folder: Path, device: str, *, needs: bool) -> None:
    """Evidence of the backward on a card of this name; with or without what was derived when it was recorded."""
    file = write_evidence(folder / "records", "backward", with_loads=False)
    # Near an H200's.
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


def page_of(head_dim: int) -> object:
    app = open_page("roofline", suite="backward", mask="full")
    shapes = app.selectbox(key="roofline.shape")
    shapes.set_value(next(x for x in shapes.options if "fa3" in x and f"head_dim {head_dim}," in x)).run()
    assert not app.exception
    return app


def bars_of(app: object) -> dict[str, float]:
    figures = [json.loads(e.proto.spec) for e in app.get("plotly_chart")]
    bar = next(trace for f in figures for trace in f["data"] if trace["type"] == "bar")
    return dict(zip(bar["y"], bar["x"], strict=True))


def test_what_binds_is_derived_where_it_was_not_recorded(elsewhere: Path) -> None:
    recorded(elsewhere, "NVIDIA H200", needs=False)
    narrow, wide = page_of(128), page_of(256)
    assert {"products", "shared memory", "L2 additions", "passes"} <= bars_of(wide).keys()
    assert "shared memory alone needs" in words(narrow)
    assert "shared memory alone needs" in words(
        wide
    )  # pairs of blocks add half as much in the L2 cache as blocks did
    assert "3.9 TB/s (measured by hand on one H200 on 2026-11-22, not recorded yet)" in words(wide)


def test_without_a_ceiling_of_additions_the_page_says_so(elsewhere: Path) -> None:
    recorded(elsewhere, "NVIDIA H20", needs=False)
    app = page_of(256)
    assert "L2 additions" not in bars_of(app)
    assert "The rate of additions in the L2 cache of NVIDIA H20 is not measured" in words(app)


def test_what_was_recorded_stays_as_it_was(elsewhere: Path) -> None:
    recorded(elsewhere, "NVIDIA H200", needs=True)
    assert list(bars_of(page_of(128))) == ["products", "memory", "busiest block"]


def test_what_was_counted_is_a_table(elsewhere: Path) -> None:
    recorded(elsewhere, "NVIDIA H200", needs=False)
    app = page_of(128)
    table = next(e.value for e in app.dataframe if "per product" in e.value)
    each = dict(zip(table["counted"], table["per product"], strict=True))
    assert each["multiply-adds"] == "1.0000"
    # 64 + 64 rows, and 128 or 64 columns of them, for 64 · 64 products of two bytes each; and what copies move.
    assert 0.05 < float(each["shared memory, by tensor cores and copy engine"]) < 0.0729
    assert {"shared memory, by threads", "added in the L2 cache, float32"} <= each.keys()
    assert "bytes per product, more than the 0.0729 at which" in words(app)
