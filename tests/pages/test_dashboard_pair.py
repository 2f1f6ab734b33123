"""Masked work with a second algorithm, mask or tiling."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from dashboard_page_support import alts, chosen, has, open_page, parameters, save_trace, words
from dashboard_support import DEVICE, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.dashboard.charts import pair as charts
from cufa.dashboard.model import launch, pair, work
from cufa.dashboard.theme import LIGHT
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, Band
from cufa.schedule.schedule import Schedule


def numbers(app: AppTest) -> dict[str, list[str]]:
    """Lines of the table: left, right, ratio."""
    table = next(e.value for e in app.dataframe if "right ÷ left" in e.value)
    return {row[0]: list(row[1:]) for row in table.itertuples(index=False)}


def test_two_algorithms_in_numbers() -> None:
    app = open_page("masked_work", two="1", alg="fa2_noskip", b_alg="fa2", sq="2048", sk="2048")
    assert not app.warning
    done = numbers(app)["FLOP done"]
    ratio = float(done[2].removesuffix("×"))
    assert ratio == 0.53  # 272 of 512 tiles
    assert f"does {ratio:.2f}× the arithmetic of FA2, no skip" in words(app)
    assert re.search(r"at equal rates per SM it ends [0-9.]+× sooner", words(app))
    assert float(numbers(app)["FLOP useful"][2].removesuffix("×")) == 1


def test_figures_are_of_both() -> None:
    app = open_page("masked_work", two="1", b_mask="window", b_left="255")
    told = alts(app)
    assert len(told) == 2
    assert "under the mask causal. " in told[0]
    assert "under the mask window (255, 0)." in told[0]
    assert "Two timelines on one axis" in told[1]
    assert "no trace of FA2 128×64, causal and FA3 128×128, window (255, 0)" in words(app)


def test_a_link_carries_both() -> None:
    link = {
        "two": "1", "alg": "fa1", "mask": "full", "sq": "1000", "sk": "1500", "b_alg": "fa2",
        "b_mask": "window", "b_left": "300", "b_right": "none", "b_softcap": "30.0",
        "b_tiles": "64x64w4s2b2",
    }  # fmt: skip
    app = open_page("masked_work", **link)
    assert not app.warning
    assert chosen(app) == link
    app.toggle(key="masked.two").set_value(False).run()
    assert not [name for name in parameters(app) if name.startswith("b_")]
    app.toggle(key="masked.two").set_value(True).run()
    assert parameters(app)["b_left"] == "300"  # the last value


def test_what_stands_beside_follows_the_mask_until_it_has_its_own() -> None:
    app = open_page("masked_work", two="1")
    app.segmented_control(key="masked.mask").set_value("full").run()
    assert app.segmented_control(key="masked.b_mask").value == "full"
    app.segmented_control(key="masked.b_mask").set_value("window").run()
    app.segmented_control(key="masked.mask").set_value("causal").run()
    assert app.segmented_control(key="masked.b_mask").value == "window"


def test_the_same_twice_has_two_names() -> None:
    app = open_page("masked_work", two="1", b_alg="fa2")
    has(
        words(app),
        "FA2 128×64 (left) and FA2 128×64 (right)",
        "do the same arithmetic; at equal rates per SM it ends at the same time",
    )
    assert all(line[2] in ("1.00×", "–") for line in numbers(app).values())
    empty = open_page("masked_work", two="1", b_mask="window", b_left="10", b_diag="at", b_at="99999")
    has(words(empty), "In one view, no key is visible to any query")


def test_times_of_one_run_are_compared(elsewhere: Path) -> None:
    file = write_evidence(elsewhere / "records")
    problem = {"sq": "4096", "sk": "4096", "batch": "4", "heads": "16", "d": "128"}
    app = open_page("masked_work", two="1", alg="fa3", b_alg="fa2", **problem)
    said = re.search(
        r"FA2 \S+ takes ([0-9.]+) (.?s), FA3 \S+ ([0-9.]+) (.?s): ([0-9.]+)× (slower|faster)", words(app)
    )
    assert said is not None
    assert "recorded</span>" in words(app)
    assert "Unlike the controls above, measured on Made-up GPU, 2026-01-02: " in words(app)
    assert "time, recorded on Made-up GPU" in numbers(app)
    file.unlink()
    rows = numbers(open_page("masked_work", two="1", **problem))
    assert not [name for name in rows if name.startswith("time, recorded")]


def test_traces_of_both_stand_on_one_axis(elsewhere: Path) -> None:
    for algorithm in ("fa2", "fa3"):
        plan = make_plan(make(4, 16, 4096, 128, "bfloat16", CAUSAL), DEVICE, algorithm)
        save_trace(elsewhere / "records", plan)
    app = open_page("masked_work", two="1")
    assert len(app.get("plotly_chart")) == 3
    assert re.search(r"FA3 128×128 ends after [0-9,]+ µs, FA2 128×64 after [0-9,]+ µs", words(app))
    assert len(open_page("masked_work", two="1", card="80", b_alg="fa1").get("plotly_chart")) == 2


@pytest.mark.parametrize(
    ("operation", "algorithm", "head_dim"),
    [
        ("forward", "fa1", 64),
        ("forward", "fa2_noskip", 64),
        ("forward", "fa2", 64),
        ("forward", "fa3", 64),
        ("backward", "fa2", 64),
        ("backward", "fa3", 256),  # pairs of blocks
    ],
)
def test_no_arithmetic_is_lost_on_the_common_axis(operation: str, algorithm: str, head_dim: int) -> None:
    """The used SM time equals the arithmetic of all tiles, for any tile size and blocks per SM."""
    shape = dataclasses.replace(
        make(2, 8, 3000, head_dim, "bfloat16", Band(700, 0)), kv_heads=2, operation=operation
    )
    plan = make_plan(shape, DEVICE, algorithm)
    schedule, problem = plan.schedule, plan.problem
    blocks = launch.thread_blocks(problem, schedule, plan.spec, DEVICE, plan.config)
    places = plan.config.blocks_per_sm if blocks.thread_block is None else 1
    line = launch.predict(blocks, DEVICE.num_sms, places)
    found = pair.in_arithmetic(line, problem, schedule, plan.config.blocks_of_item)
    used = (found.end - found.start).sum() / places
    assert used == pytest.approx(work.work(problem, schedule).done)


def test_one_axis_for_other_tiles() -> None:
    schedules = [Schedule(1000, 700, *tiles, CAUSAL) for tiles in ((128, 64), (64, 256))]
    figure = charts.grids(("a", "b"), schedules, LIGHT)
    assert figure.layout.xaxis.range == (0, 768)  # the last tile is padded
    assert figure.layout.xaxis2.matches == "x"
    assert figure.layout.yaxis.range == (1024, 0)
    assert [image.sizex for image in figure.layout.images] == [704, 768]
    assert [image.xref for image in figure.layout.images] == ["x", "x2"]
    plan = make_plan(make(2, 8, 2048, 64, "bfloat16", CAUSAL), DEVICE, "fa2")
    blocks = launch.thread_blocks(plan.problem, plan.schedule, plan.spec, DEVICE)
    line = pair.in_arithmetic(launch.predict(blocks, DEVICE.num_sms, 2), plan.problem, plan.schedule)
    longer = dataclasses.replace(line, end=2 * line.end)
    figure = charts.timelines(("a", "b"), (line, longer), LIGHT)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.range[1] >= longer.span
