"""The page Machine code under Streamlit's AppTest."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="compiling needs NVRTC: pip install 'cufa[cuda13]'")

from dashboard_page_support import alts, open_page, parameters, words
from streamlit.testing.v1 import AppTest

from cufa.build import sass
from cufa.build.machine_code import Code, Instruction, LoopCost, Place
from cufa.dashboard.model.listed import slots_per_tile, source_lines
from cufa.kernels import KERNELS

BUILD = {"kernel": "fa2_forward", "d": "64", "arch": "80"}


def open_listing(**link: str) -> AppTest:
    """The page with a complete build."""
    app = open_page("machine_code", **BUILD, **link)
    deadline = time.monotonic() + 300
    while "being compiled and disassembled" in words(app):
        assert time.monotonic() < deadline, "no listing came"
        time.sleep(0.1)
        app.run()
    return app


@pytest.mark.parametrize("language", ["ptx", "sass"])
def test_a_line_shows_what_it_became(language: str, real_listing: None) -> None:
    if language == "sass" and sass.find_nvdisasm() is None:
        pytest.skip(f"SASS: {sass.ADVICE}")
    app = open_listing(**{"as": language})
    assert not app.warning
    said = words(app)
    assert re.search(
        r"a tile takes [0-9,]+ issue slots of an SM, [0-9,]+ per warp, up to [0-9,]+ for partial tiles", said
    )
    assert next(e.value for e in app.dataframe if "tensor" in e.value)["count"].min() > 0
    app.toggle(key="code.all").set_value(True).run()
    table = next(e.value for e in app.dataframe if "tensor" in e.value)
    assert list(table["source"]) == list(source_lines("forward/fa2/kernel.cu"))
    busiest = table.loc[table["tensor"].idxmax()]
    app.number_input(key="code.line").set_value(int(busiest["line"])).run()
    assert parameters(app)["line"] == str(busiest["line"])
    assert f"Line {busiest['line']} compiles to {int(busiest['count']):,} instructions" in words(app)
    listings = [e.proto.body for e in app.main.get("html") if "<pre" in e.proto.body]
    shown = listings[-3]  # the last two are of a score function
    assert ("HMMA" if language == "sass" else "mma.sync") in shown
    assert ("registers live" in words(app)) == (language == "sass")
    figures = alts(app)
    assert len(figures) == (2 if language == "sass" else 1)
    assert "whole kernel" in figures[0]


def test_another_file_of_the_same_build(real_listing: None) -> None:
    app = open_listing(file="shared/softmax.cuh", all="1")
    table = next(e.value for e in app.dataframe if "tensor" in e.value)
    assert len(table) == len(source_lines("shared/softmax.cuh"))
    assert table["exp"].sum() > 0
    app.number_input(key="code.line").set_value(1).run()
    assert "Line 1 has no instructions" in words(app)


def test_without_a_disassembler_ptx_is_shown_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, real_listing: None
) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    app = open_listing(**{"as": "sass"})
    assert "'sass'" in app.warning[0].value
    assert sass.ADVICE in words(app)
    assert parameters(app)["as"] == "ptx"


def test_a_build_that_is_not_there_yet_is_waited_for() -> None:
    assert "being compiled and disassembled" in words(open_page("machine_code"))


def test_sources_are_found_and_generated_ones_have_none() -> None:
    assert any("extern" in line or "KERNEL" in line for line in source_lines("forward/fa2/kernel.cu"))
    assert source_lines("cufa.cu") == ()
    assert source_lines("../pyproject.toml") == ()
    places = tuple(Place(file, 1) for file in "cabd")
    build = Code((Instruction("EXIT", "other", places), Instruction("EXIT", "other", places[3:])), ())
    assert list(build.files) == ["d", "a", "b", "c"], "the most instructions first, then by name"


def test_slots_are_told_per_tile_only_where_a_pass_is_whole_tiles(elsewhere: Path) -> None:
    spec = KERNELS["fa2_forward"]
    config = next(c for c in spec.configs if (c.block_q, c.block_kv, c.num_warps) == (128, 64, 4))
    tile = 4 * 128 * 64 * 128
    assert slots_per_tile(LoopCost(None, 900, {}, tile // 4), spec, config, 128) == 3600
    assert slots_per_tile(LoopCost(None, 900, {}, tile // 2), spec, config, 128) == 1800
    assert slots_per_tile(LoopCost(None, 900, {}, tile // 6), spec, config, 128) is None
    assert slots_per_tile(LoopCost(None, 900, {}, 0), spec, config, 128) is None
