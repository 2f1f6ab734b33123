"""The backward on the pages: Masked work by keys, and recorded measurements on Compare, Roofline and Occupancy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from dashboard_page_support import alts, chosen, has, open_page, save_trace, words
from dashboard_support import DEVICE, make_records, schedules
from sampling import of_today

from cufa.dashboard import engine, theme
from cufa.dashboard.charts import roofline, tile_grid
from cufa.dashboard.model import evidence, launch, work
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.measurements import Measurement
from cufa.kernels import KERNELS
from cufa.measure.cases import of_forward
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL
from cufa.schedule.schedule import Schedule


def is_backward(m: Measurement) -> bool:
    return m.problem.operation == "backward"


def masked_work(**link: str):
    return open_page("masked_work", op="backward", **link)


def backward_plan(batch: int = 4, heads: int = 16, seqlen: int = 4096, head_dim: int = 128):
    return make_plan(of_forward(make(batch, heads, seqlen, head_dim, "bfloat16", CAUSAL)), DEVICE, "fa2")


# --- The figure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=lambda p: p.name)
@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_the_grid_counts_by_key_blocks(schedule: Schedule, palette: theme.Palette) -> None:
    """Axes and tiles equal the forward; the bars count the tiles of each column, below the grid."""
    by_keys = dataclasses.replace(schedule, by_keys=True)
    figure = tile_grid.tile_grid(by_keys, palette, selected=(0, schedule.num_kv_blocks - 1))
    assert (by_keys.tiles == schedule.tiles).all()
    assert figure.layout.xaxis.range == (-0.5, schedule.num_kv_blocks - 0.5)
    assert figure.layout.yaxis.range == (schedule.num_q_blocks - 0.5, -0.5)
    assert figure.layout.xaxis.matches == "x2", "a column stands over its bar"
    bars = {trace.name: trace for trace in figure.data[1:]}
    for tile in work.class_counts(by_keys):
        trace = bars[palette.tiles[tile].label]
        np.testing.assert_array_equal(trace.y, (by_keys.tiles == tile).sum(axis=0))
        assert trace.yaxis == "y2" and list(trace.x) == list(range(schedule.num_kv_blocks))
    frame = figure.layout.shapes[-1]
    assert (frame.y0, frame.y1) == (-0.5, schedule.num_q_blocks - 0.5), "the whole column"
    assert "A key block visits" in tile_grid.describe(by_keys, work.class_counts(by_keys))


def test_arithmetic_is_the_backwards() -> None:
    plan = backward_plan(2, 3, 100, 64)
    schedule = plan.schedule
    done = work.work(plan.problem, schedule)
    assert work.flops_per_score(plan.problem) == 10 * 64
    assert done.useful == 10 * 64 * 6 * (100 * 101 // 2) == plan.problem.flops
    assert done.done == 10 * 64 * 6 * schedule.visited * schedule.block_q * schedule.block_kv


# --- Masked work --------------------------------------------------------------------------------------------


def test_a_key_block_says_which_query_blocks_it_visits() -> None:
    app = masked_work(kv="4")  # tiles of 64 × 128
    said = words(app)
    assert "One key block" in said and "Inside one tile" not in said
    each = "for each of the 4 query heads that share its keys"
    assert f"Key block 16 visits 32 of 64 query blocks, {each}: 32 to 63 (30 full and 2 partial)" in said
    app.number_input(key="masked.k").set_value(31).run()
    assert "Key block 31 visits 2 of 64 query blocks" in words(app)
    assert chosen(app)["k"] == "31"
    assert "no query sees its keys" in words(masked_work(diag="at", at="-4096", k="31"))


def test_thread_blocks_are_those_of_the_order() -> None:
    """One thread block per key block and key/value head, in the kernel's order."""
    has(words(masked_work(kv="4")), "512 thread blocks", "Tiles are counted for one of the 4 query heads")
    assert "Tiles are counted for one" not in words(masked_work())
    plan = backward_plan()
    blocks = launch.thread_blocks(plan.problem, plan.schedule, plan.spec, DEVICE)
    assert plan.order is not None and (blocks.q_block == plan.order.q_block).all()
    assert (blocks.batch * plan.problem.kv_heads + blocks.head == plan.order.head).all()
    assert (blocks.tiles == plan.schedule.visits[blocks.q_block]).all()
    assert int(blocks.batch.max()) == 3 and int(blocks.head.max()) == 15


def test_wide_heads_are_drawn_by_their_own_kernel() -> None:
    app = masked_work(alg="fa3", d="256", heads="8", sq="1024", sk="1024", mask="causal")
    problem = of_forward(make(4, 8, 1024, 256, "bfloat16", CAUSAL))
    plan = make_plan(problem, DEVICE, "fa3")
    assert plan.spec.name == "fa3_backward_wide"
    assert app.selectbox(key="masked.tiles").value == config_key(plan.config)
    assert f"{plan.launches[1].grid[0]:,} thread blocks" in words(app)  # both of each pair


@pytest.mark.in_turn
def test_a_trace_of_pairs_is_not_judged_by_sms_whose_blocks_keep_no_record(elsewhere: Path) -> None:
    plan = make_plan(of_forward(make(2, 4, 1024, 256, "bfloat16", CAUSAL)), DEVICE, "fa3")
    records = make_records(plan)
    first_of_pairs = records[records["thread_block"] % 2 == 0]
    trace = save_trace(elsewhere / "records", plan, records=first_of_pairs)
    app = open_page("masked_work")
    app.selectbox(key="masked.open").select(trace.name).run()
    said = words(app)
    has(
        said,
        "agree with every column of the schedule",
        "Only the first thread block of each pair has a record",
    )
    assert "The tail is" not in said
    occupancy = open_page("occupancy", kernel="fa3_backward_wide", d="256", tiles=config_key(trace.config))
    assert "of 64 warps per SM" in words(occupancy) and "Achieved" not in words(occupancy)


def test_skipping_is_not_told_by_the_forwards_records() -> None:
    """Kernels without skipping are recorded and published for the forward only."""
    assert "Recorded gains in figures" in str([e.label for e in open_page("masked_work").expander])
    app = masked_work()
    assert "Recorded gains in figures" not in str([e.label for e in app.expander])
    assert "Published" not in words(app)
    assert any("No measured series is recorded" in alt for alt in alts(app))


# --- Other pages --------------------------------------------------------------------------------------------


RECORDED = [e.name for e in evidence.load() if e.limits and any(is_backward(m) for m in e.rows)]
assert RECORDED


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, shipped: Path) -> evidence.Evidence:
    """Evidence of each card."""
    return next(e for e in evidence.load() if e.name == request.param)


def test_the_roofline_counts_the_backwards_arithmetic(recorded: evidence.Evidence) -> None:
    """10 · head dim FLOP per exponential; the forward has 4 · head dim."""
    forward = {m.suite for m in recorded.rows if not is_backward(m)}  # some suites have both
    suites = sorted({m.suite for m in recorded.rows} - forward)
    assert suites
    for suite in of_today(suites, recorded.name, fixed=0):
        app = open_page("roofline", machine=recorded.name, suite=suite)
        assert "comes closest" in words(app) and "(backward batch" in words(app)
        assert "FLOP are 10 · head dim" in app.caption[0].value
    assert (
        "FLOP are 4 · head dim"
        in open_page("roofline", machine=recorded.name, suite="forward").caption[0].value
    )


def test_exponentials_limit_the_backward_at_a_higher_rate(recorded: evidence.Evidence) -> None:
    """The drawn ceiling equals the floor of the problem with exponentials alone."""
    assert recorded.limits is not None
    for m in filter(is_backward, recorded.rows):
        alone = dataclasses.replace(
            recorded.limits, flops=dict.fromkeys(recorded.limits.flops, 1e30), copy_bytes=1e30
        )
        seconds, bound = dataclasses.replace(alone, read_bytes=0.0).floor(m.problem)
        assert bound == "exponentials"
        drawn = roofline.exponential_ceiling(recorded.limits, m.problem)
        assert drawn == pytest.approx(m.problem.flops / seconds)


def test_compare_shows_the_recorded_backward_beside_other_libraries(recorded: evidence.Evidence) -> None:
    rows = [
        m for m in engine.all_measurements() if is_backward(m) and m.row.is_peer and recorded.name in m.source
    ]
    families = dict.fromkeys(m.family for m in rows)
    assert len(families) >= 4
    for family in of_today([*families], recorded.name, fixed=0):
        machine = next(m.machine_key for m in rows if m.family == family)
        app = open_page("compare", machine=machine, shapes=family)
        assert not app.warning and family.startswith("Backward: ")
        assert app.selectbox(key="compare.shapes").value == family
        shown = app.multiselect(key="compare.show").value
        assert {"fa2", "fa3"} & {*shown} and any(m.row.label in shown for m in rows if m.family == family)
        assert "is the fastest" in words(app) and "Speed-up over" in words(app)


@pytest.mark.in_turn
def test_occupancy_begins_with_the_launch_that_a_trace_is_of(shipped: Path) -> None:
    each = next(c for c in KERNELS["fa3_backward"].configs if c.fits(128) and not c.persistent)
    app = open_page("occupancy", kernel="fa3_backward", tiles=config_key(each))
    entries = app.segmented_control(key="occupancy.entry")
    assert entries.value == "fa3_backward"
    said = words(app)
    assert "12 of 64 warps per SM" in said
    assert re.search(r"Achieved \d\.\d\d of 1 block per SM.* \(backward batch 4, heads 16, seqlen 4096", said)
    entries.select("fa3_backward_prepare").run()
    assert "of 64 warps per SM" in words(app) and "Achieved" not in words(app)
