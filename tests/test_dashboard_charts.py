"""The dashboard's data and figures, without Streamlit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
import tomllib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the dashboard needs plotly: pip install 'cufa[dashboard]'")

import plotly.graph_objects as go
from dashboard_support import DEVICE, LIMITS, make_records, make_trace, write_evidence

from cufa.architectures import ARCHITECTURES
from cufa.bench import traces
from cufa.bench.suites import make
from cufa.commands.dashboard import dashboard_dir
from cufa.dashboard import theme
from cufa.dashboard.charts import decode as decode_charts
from cufa.dashboard.charts import occupancy as occupancy_charts
from cufa.dashboard.charts import roofline as roofline_charts
from cufa.dashboard.charts import tile_grid, timeline
from cufa.dashboard.charts import work as work_charts
from cufa.dashboard.charts.occupancy import Point
from cufa.dashboard.model import counters, decode, evidence, launch, softmax_steps, trace, work
from cufa.decode.plan import DecodePlan, make_decode_plan
from cufa.decode.problem import DecodeProblem
from cufa.planner import make_plan
from cufa.problem import default_scale
from cufa.reference import attention_reference
from cufa.schedule import Schedule, Tile

PALETTES = (theme.LIGHT, theme.DARK)


def schedules() -> list[Schedule]:
    return [
        Schedule(512, 512, 128, 64, True),
        Schedule(500, 300, 64, 64, True),
        Schedule(300, 500, 64, 128, True, skip_masked_tiles=False),
        Schedule(1, 1, 64, 64, False),
        Schedule(1000, 10, 64, 64, True),
    ]


# --- Launches and timelines ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fa1", "fa2_noskip", "fa2", "fa3"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_query_block_is_launched_once(algorithm: str, causal: bool) -> None:
    problem = make(3, 5, 700, 64, "bfloat16", causal)
    schedule = Schedule.of(problem, 128, 64, skip_masked_tiles=algorithm == "fa2")
    blocks = launch.thread_blocks(problem, schedule, algorithm, 132)
    assert blocks.tiles.sum() == 15 * schedule.visited
    places = set(zip(blocks.q_block.tolist(), blocks.head.tolist(), blocks.batch.tolist(), strict=True))
    assert len(places) == len(blocks) == (15 if algorithm == "fa1" else 15 * schedule.num_q_blocks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "heads", "seqlen"),
    # 600 heads of 256 keys are more than share the L2 cache: the heads are launched in groups.
    [("fa2", 3, 1200), ("fa2", 600, 256), ("fa3", 3, 1200), ("fa3", 50, 900)],
)
def test_launch_order_is_the_kernels(algorithm: str, heads: int, seqlen: int, causal: bool) -> None:
    """The kernel's own source, executed on this CPU, says which block does what."""
    from cufa.emulator import emulate

    q = np.random.default_rng(0).standard_normal((1, heads, seqlen, 64), np.float32).astype(np.float16)
    run = emulate(q, q[:, :1], q[:, :1], causal=causal, algorithm=algorithm)
    config = run.plan.config
    problem = make(1, heads, seqlen, 64, "float16", causal)
    schedule = Schedule.of(problem, config.block_q, config.block_kv, True)
    blocks = launch.thread_blocks(problem, schedule, algorithm, num_sms=132)
    taker = np.arange(len(blocks)) if blocks.thread_block is None else blocks.thread_block
    expected = set(zip(taker, blocks.q_block, blocks.head, strict=True))
    found = {(int(r["thread_block"]), int(r["q_block"]), int(r["head"])) for r in run.records}
    assert found == expected
    assert trace.disagreements(run.records, schedule) == []


def test_list_scheduling_gives_the_next_block_to_the_first_free_place() -> None:
    tiles = np.array([5, 3, 1, 1, 4])
    zeros = np.zeros(5, np.int64)
    line = launch.predict(launch.Blocks(zeros, zeros, zeros, tiles), num_sms=2, blocks_per_sm=1)
    assert line.start.tolist() == [0, 0, 3, 4, 5]
    assert line.sm.tolist() == [0, 1, 1, 1, 0]
    assert line.span == 9
    assert line.sm_end.tolist() == [9, 5]
    assert line.tail == pytest.approx(4 / 18)
    assert line.mean_blocks == pytest.approx(14 / 18)


def test_an_sm_without_work_is_idle_from_start_to_end() -> None:
    zeros = np.zeros(3, np.int64)
    line = launch.predict(launch.Blocks(zeros, zeros, zeros, np.full(3, 7)), num_sms=4, blocks_per_sm=2)
    assert (line.busy_sms, line.tail) == (3, 0.25)


def test_persistent_blocks_take_their_items_one_after_another() -> None:
    tiles = np.array([5, 4, 3, 2, 1])
    zeros = np.zeros(5, np.int64)
    taker = np.array([0, 1, 1, 0, 0])
    line = launch.predict(launch.Blocks(zeros, zeros, zeros, tiles, taker), num_sms=3, blocks_per_sm=1)
    assert line.start.tolist() == [0, 0, 4, 5, 7]
    assert line.end.tolist() == [5, 4, 7, 7, 8]
    assert line.sm_end.tolist() == [8, 7, 0]


def test_a_persistent_block_is_one_block_though_its_items_overlap() -> None:
    ones = np.ones(2, np.int64)
    blocks = launch.Blocks(ones, ones, ones, ones, thread_block=np.zeros(2, np.int64))
    start, end, sm = np.array([0.0, 4.0]), np.array([5.0, 8.0]), np.zeros(2, np.int64)
    line = launch.Timeline(start, end, sm, sm, blocks, num_sms=1, slots_per_sm=1, unit="µs")
    assert line.mean_blocks == 1


def test_blocks_never_overlap_on_a_place() -> None:
    problem = make(2, 7, 3000, 64, "bfloat16", True)
    schedule = Schedule.of(problem, 64, 64, True)
    line = launch.predict(launch.thread_blocks(problem, schedule, "fa2", 132), 10, 3)
    places = line.sm * 3 + line.slot
    for place in np.unique(places):
        mine = np.flatnonzero(places == place)
        order = mine[np.argsort(line.start[mine])]
        assert (line.start[order[1:]] >= line.end[order[:-1]]).all()


# --- Traces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fa1", "fa2_noskip", "fa2", "fa3"])
def test_a_trace_gives_back_its_timeline(algorithm: str) -> None:
    plan = make_plan(make(2, 8, 1024, 64, "bfloat16", True), DEVICE, algorithm)
    blocks = launch.thread_blocks(plan.problem, plan.schedule, algorithm, DEVICE.num_sms)
    expected = launch.predict(blocks, DEVICE.num_sms, plan.config.blocks_per_sm)
    got = trace.measured_timeline(make_records(plan), DEVICE.num_sms, whole_heads=algorithm == "fa1")
    rows = [
        sorted(zip(t.sm, t.start * scale, t.blocks.tiles, t.blocks.head, strict=True))
        for t, scale in ((got, 1.0), (expected, 0.9))
    ]
    np.testing.assert_allclose(*rows)
    assert got.tail == pytest.approx(expected.tail)
    assert trace.disagreements(make_records(plan), plan.schedule) == []


@pytest.mark.parametrize("field", ["tiles_visited", "tiles_skipped", "tiles_unmasked"])
def test_a_wrong_tile_count_is_found(field: str) -> None:
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", True), DEVICE, "fa2")
    found = make_records(plan)
    found[field][5] += 1
    (sentence,) = trace.disagreements(found, plan.schedule)
    assert field.replace("_", " ") in sentence
    assert f"1 of {len(found)} records" in sentence


def test_a_trace_of_another_length_is_found() -> None:
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", True), DEVICE, "fa2")
    shorter = dataclasses.replace(plan.schedule, seqlen_q=256, seqlen_k=256)
    assert "the schedule only" in trace.disagreements(make_records(plan), shorter)[0]


def test_traces_are_saved_and_loaded(tmp_path) -> None:
    plan = make_plan(make(1, 4, 512, 64, "bfloat16", True), DEVICE, "fa2")
    written = make_trace(plan)
    file = traces.save(written, tmp_path)
    (loaded,) = traces.load_all(tmp_path).values()
    assert (loaded.problem, loaded.config, loaded.is_current) == (plan.problem, plan.config, True)
    shift = written.records["start_ns"].min()
    np.testing.assert_array_equal(loaded.records["end_ns"], written.records["end_ns"] - shift)
    np.testing.assert_array_equal(loaded.records["sm"], written.records["sm"])
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=file.name):
        traces.load(file)


def test_perfetto_export_has_an_event_for_every_block() -> None:
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", True), DEVICE, "fa2")
    line = trace.measured_timeline(make_records(plan), DEVICE.num_sms)
    exported = json.loads(trace.perfetto(line, "a title"))
    slices = [e for e in exported["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 4 * plan.schedule.num_q_blocks
    assert slices[0]["args"]["tiles"] == line.blocks.tiles[0]
    assert exported["otherData"] == {"title": "a title", "predicted": False, "unit": "µs"}


def test_perfetto_events_of_one_thread_never_cross() -> None:
    plan = make_plan(make(2, 16, 2048, 128, "bfloat16", True), DEVICE, "fa3")
    records = make_records(plan)
    records["end_ns"] += 500  # an item ends after the next one of its block began
    line = trace.measured_timeline(records, DEVICE.num_sms)
    slices = [e for e in json.loads(trace.perfetto(line, "x"))["traceEvents"] if e["ph"] == "X"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) > DEVICE.num_sms
    for spans in threads.values():
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(sorted(spans)))
    assert {e["args"]["thread_block"] for e in slices} == set(range(DEVICE.num_sms))


# --- Arithmetic ------------------------------------------------------------------------------------------


def test_work_counts_every_tile_and_every_visible_score() -> None:
    problem = make(2, 3, 100, 64, "bfloat16", True)
    schedule = Schedule.of(problem, 64, 64, True)
    done = work.work(problem, schedule)
    factor = 4 * 64 * 6
    assert done.done == factor * 3 * 64 * 64
    assert done.useful == factor * 100 * 101 // 2
    assert done.dense == factor * 100 * 100
    assert done.waste == done.done - done.useful


@pytest.mark.parametrize("schedule", schedules())
def test_classes_add_up(schedule: Schedule) -> None:
    counts = work.class_counts(schedule)
    assert sum(counts.values()) == schedule.total
    assert counts[Tile.SKIPPED] == schedule.skipped


def test_skipping_tends_to_twice_and_never_reaches_it() -> None:
    ratios = work.skip_speedups(Schedule(64, 64, 64, 64, True), [64, 1024, 65536])
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert 1.99 < ratios[-1] < 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "q_block"), [(200, 200, 1), (100, 300, 0), (300, 100, 4)])
def test_the_last_tile_ends_at_the_lse(causal: bool, seqlen_q: int, seqlen_k: int, q_block: int) -> None:
    """m + log l after the last tile is the log-sum-exp of the row, by float64 on the same inputs."""
    schedule = Schedule(seqlen_q, seqlen_k, 64, 64, causal)
    steps = softmax_steps.observe_rows(schedule, q_block, head_dim=32)
    assert [s.kv_block for s in steps] == list(range(schedule.visits[q_block]))
    for before, after in itertools.pairwise(steps):
        np.testing.assert_array_equal(before.m_after, after.m_before)
        np.testing.assert_array_equal(before.l_after, after.l_before)
    rows = min(64, seqlen_q - 64 * q_block)
    keys = seqlen_k if not causal else min(seqlen_k, 64 * q_block + rows + seqlen_k - seqlen_q)
    rng = np.random.default_rng([0, q_block])
    q = rng.standard_normal((1, 1, rows, 32), np.float32)
    k, v = (rng.standard_normal((1, 1, keys, 32), np.float32) for _ in range(2))
    _, lse = attention_reference(q, k, v, causal=causal, return_lse=True)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(
            steps[-1].m_after + np.log(steps[-1].l_after), lse[0, 0], rtol=1e-5, atol=1e-5
        )


def test_a_block_of_rows_that_see_nothing_has_no_steps() -> None:
    assert softmax_steps.observe_rows(Schedule(300, 100, 64, 64, True), 0, 32) == []


# --- Decode ----------------------------------------------------------------------------------------------


def decode_plan(batch: int, capacity: int, schedule: str = "auto", **changes: Any) -> DecodePlan:
    problem = DecodeProblem(batch, 32, 8, 1, capacity, 128, "bfloat16", "bfloat16", default_scale(128))
    return make_decode_plan(dataclasses.replace(problem, **changes), DEVICE, schedule=schedule)


def test_a_split_covers_every_tile_once() -> None:
    batch = decode.Batch.of(decode_plan(3, 1000), (1000, 70, 1), overhead=0)
    for splits in (1, 2, 5, 16):
        blocks = decode.fixed_blocks(batch, splits)
        assert blocks.tiles.sum() == batch.kv_heads * sum(batch.tiles)
        assert blocks.tiles.min() >= 1
        for sequence, tiles in enumerate(batch.tiles):
            mine = blocks.batch == sequence
            assert np.bincount(blocks.head[mine], blocks.tiles[mine]).tolist() == [tiles] * batch.kv_heads
    blocks = decode.balanced_blocks(batch, 7)
    assert blocks.tiles.sum() == batch.kv_heads * sum(batch.tiles)
    shares = np.bincount(blocks.thread_block, blocks.tiles)
    assert len(shares) == 7
    assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(("sequences", "capacity"), [(1, 8192), (1, 65536), (33, 4096), (5, 100_000)])
def test_fixed_splits_are_the_blocks_of_the_launch(sequences: int, capacity: int) -> None:
    plan = decode_plan(sequences, capacity, "fixed")
    batch = decode.Batch.of(plan, (capacity,) * sequences, overhead=0)
    found = decode.fixed(batch, plan.num_splits)
    simulated = decode.evaluate(batch, decode.fixed_blocks(batch, plan.num_splits), plan.num_splits)
    assert simulated.blocks == found.blocks == math.prod(plan.launches[0].grid)
    assert simulated.span <= found.span  # the last part of a sequence may be a little shorter


def test_splitting_one_sequence_fills_the_card() -> None:
    batch = decode.Batch.of(decode_plan(1, 65536), (65536,), overhead=1)
    curve = decode.split_curve(batch, decode.candidates(128))
    best = decode.best(curve)
    assert curve[0].fill == pytest.approx(8 / batch.places, rel=0.01)
    assert best.fill > 0.9
    assert best.span < curve[0].span * 8 / batch.places * 1.3


def test_a_full_card_is_not_split() -> None:
    one = decode.Batch.of(decode_plan(1, 4096), (4096,), overhead=1)
    sequences = one.places // one.items
    batch = decode.Batch.of(decode_plan(sequences, 4096), (4096,) * sequences, overhead=1)
    assert 0 <= batch.places - batch.items < 8
    assert decode.best(decode.split_curve(batch, decode.candidates(64))).splits == 1


def test_equal_shares_end_together() -> None:
    plan = decode_plan(16, 32768, "balanced")
    batch = decode.Batch.of(plan, decode.ragged(16, 32768, 32), overhead=0)
    assert not batch.ragged  # or the shares would have two sizes
    line = decode.timeline(batch, decode.balanced_blocks(batch, plan.num_splits))
    ends = np.zeros(batch.places)
    np.maximum.at(ends, line.slot * line.num_sms + line.sm, line.end)
    share = max(np.bincount(line.blocks.thread_block, line.blocks.tiles))
    assert ends.max() - ends.min() <= share  # several waves of them: the last one may be a little late
    assert (np.diff(np.sort(line.slot * line.num_sms + line.sm)) <= 1).all()  # every place has work
    fixed = decode.split_curve(batch, [1, 2, 4, 8, 16, 32])
    assert line.span <= 1.05 * min(s.span for s in fixed)  # which nobody knows when they are launched


# --- Evidence --------------------------------------------------------------------------------------------


def test_recorded_speedups_by_length(tmp_path) -> None:
    write_evidence(tmp_path, "versions")
    (found,) = evidence.load(tmp_path)
    assert found.where == "Made-up GPU, 2026-01-02"
    assert found.stale == ()
    series = evidence.speedups(found.rows, "fa2_noskip", "fa2_forward")
    assert "float16 d64, 4 heads" in series
    for values in series.values():
        assert list(values) == sorted(values)
        assert all(v == pytest.approx(1.5, rel=1e-3) for v in values.values())


def test_damaged_evidence_says_which_file(tmp_path) -> None:
    file = write_evidence(tmp_path, "versions")
    content = json.loads(file.read_text())
    del content["suites"]["versions"]["rows"][0]["p50_ns"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"made-up-gpu\.json lacks 'p50_ns'"):
        evidence.load(tmp_path)


# --- Figures ---------------------------------------------------------------------------------------------


def text_of(figure: go.Figure) -> str:
    return figure.to_json()


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_the_grid_shows_every_tile(schedule: Schedule, palette: theme.Palette) -> None:
    figure = tile_grid.tile_grid(schedule, palette, selected=(0, 0))
    picked = figure.data[0]
    assert len(picked.x) == schedule.total
    assert (picked.y[-1], picked.x[-1]) == (schedule.num_q_blocks - 1, schedule.num_kv_blocks - 1)
    bars = {trace.name: np.asarray(trace.x).sum() for trace in figure.data[1:]}
    for tile, count in work.class_counts(schedule).items():
        assert bars[palette.tiles[tile].label] == count
    for axis in (figure.layout.xaxis, figure.layout.xaxis2, figure.layout.yaxis):
        assert axis.title.text


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_wanted_scores_are_those_of_the_mask(schedule: Schedule, step: int) -> None:
    row, column = np.ogrid[: schedule.seqlen_q, : schedule.seqlen_k]
    offset = schedule.seqlen_k - schedule.seqlen_q
    mask = (column <= row + offset) | (not schedule.causal)
    for axis, size in enumerate((schedule.block_q * step, schedule.block_kv * step)):
        mask = np.add.reduceat(mask.astype(int), np.arange(0, mask.shape[axis], size), axis)
    np.testing.assert_array_equal(work.wanted_scores(schedule, step), mask)


@pytest.mark.parametrize("seqlen", [65 * 64, 300 * 64])
def test_a_large_grid_says_how_much_of_a_cell_is_wanted(seqlen: int) -> None:
    figure = tile_grid.tile_grid(Schedule(seqlen, seqlen, 64, 64, True), theme.LIGHT, (1, 0))
    (hover,) = (trace for trace in figure.data if trace.type == "heatmap")
    percent = np.asarray(hover.z)
    assert max(percent.shape) <= 256
    assert (np.triu(percent, 1) == 0).all()
    assert (np.tril(percent, -1)[1:, 0] == 100).all()
    assert ((np.diag(percent) > 0) & (np.diag(percent) < 100)).all()
    assert hover.x0 + (percent.shape[1] - 1) * hover.dx <= seqlen / 64
    assert len(figure.layout.shapes) == 2  # the frame


def test_classes_are_told_apart_without_colour() -> None:
    """Where the four classes have ink differs between any two of them."""
    grid = np.array([[tile] for tile in Tile], np.uint8)
    image = np.asarray(tile_grid.raster(grid, theme.LIGHT))
    side = image.shape[1]
    inked = [(image[side * t + 4 : side * (t + 1) - 4, 4:-4] % 2).astype(bool) for t in range(4)]
    shares = [float(x.mean()) for x in inked]
    assert shares[Tile.FULL] == 0
    for a in Tile:
        for b in Tile:
            if a < b:
                assert (inked[a] != inked[b]).mean() > 0.02, f"{a.name} looks like {b.name}"
    patterns = {theme.LIGHT.tiles[t].pattern for t in Tile}
    assert len(patterns) == 4


def test_a_reduced_grid_keeps_the_boundary() -> None:
    tiles = Schedule(64 * 1000, 64 * 1000, 64, 64, True).tiles
    small = tile_grid.reduce_tiles(tiles, 250)
    assert small.shape == (250, 250)
    assert (np.diag(small) == Tile.PARTIAL).all()
    assert small[0, -1] == Tile.SKIPPED
    assert small[-1, 0] == Tile.FULL


@pytest.mark.parametrize("blocks", [1, 40, timeline.BARS, timeline.BARS + 1, 20_000])
def test_timeline_of_few_and_many_blocks(blocks: int) -> None:
    tiles = np.arange(blocks) % 13 + 1
    zeros = np.zeros(blocks, np.int64)
    line = launch.predict(launch.Blocks(zeros, zeros, zeros, tiles), 132, 2)
    figure = timeline.timeline_figure(line, theme.DARK)
    drawn = figure.data[0]
    if blocks <= timeline.BARS:
        assert np.asarray(drawn.x).sum() == tiles.sum()
    else:
        share = np.isfinite(drawn.z).mean()
        assert share == pytest.approx(tiles.sum() / (264 * line.span), abs=0.02)
        first, last = drawn.y0, drawn.y0 + 263 * drawn.dy  # two places an SM, around its number
        assert (first, last) == pytest.approx((-0.25, 131.25))
    assert "SM" in figure.layout.yaxis.title.text
    assert f"{blocks:,} thread blocks" in timeline.describe_timeline(line)


def test_an_empty_launch_can_be_drawn() -> None:
    nothing = np.zeros(4, np.int64)
    line = launch.predict(launch.Blocks(nothing, nothing, nothing, nothing), 4, 1)
    assert line.tail == 0
    text_of(timeline.timeline_figure(line, theme.LIGHT))
    text_of(timeline.sm_finish({"predicted": line}, theme.LIGHT))


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
def test_the_other_figures(palette: theme.Palette, tmp_path) -> None:
    problem = make(2, 3, 1000, 64, "bfloat16", True)
    schedule = Schedule.of(problem, 128, 64, True)
    flops = work_charts.flops_figure(work.work(problem, schedule), palette)
    assert sum(t.x[0] for t in flops.data if t.y[0] == "done") == work.work(problem, schedule).done
    lengths = [256, 512]
    gain = work_charts.speedup_figure(
        (lengths, [1.0, 1.1]), (lengths, [1.3, 1.6]), (512, 1.6), {"recorded": {512: 1.4}}, palette
    )
    assert {"recorded", "this view"} <= {t.name for t in gain.data}
    assert gain.layout.shapes[0].y0 == 2
    step = softmax_steps.observe_rows(schedule, 0, 32)[0]
    softmax = work_charts.softmax_figure(step, palette)
    np.testing.assert_array_equal(softmax.data[1].y, step.m_after)
    assert np.isnan(softmax.data[0].y).all()  # minus infinity before the first tile
    batch = decode.Batch.of(decode_plan(1, 4096), (4096,), overhead=1)
    curve = decode.split_curve(batch, decode.candidates(16))
    for schedule in ("fixed", "balanced"):
        text_of(decode_charts.split_figure(curve, (schedule, decode.best(curve)), curve[0], palette))
    write_evidence(tmp_path, "forward")
    rows = evidence.load(tmp_path)[0].rows
    roof = roofline_charts.roofline(rows, LIMITS, ["bfloat16"], palette)
    points = [t for t in roof.data if t.mode == "markers"]
    assert sum(len(t.x) for t in points) == len(rows)
    assert max(t.y.max() if hasattr(t.y, "max") else max(t.y) for t in points) < 700


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_the_occupancy_sentence_is_true(arch) -> None:
    """What it says would add a block does add one; one register more does not."""
    point = Point(registers=168, threads=128, shared_memory=20_000)
    o = point.on(arch)
    sentence = occupancy_charts.verdict(o)
    assert f"{o.blocks} block" in sentence
    needs = o.one_more_block
    if needs is not None and needs.registers is not None and needs.shared_memory is None:
        assert f"{168 - needs.registers} fewer registers" in sentence
        assert dataclasses.replace(point, registers=needs.registers).on(arch).blocks == needs.blocks
        assert dataclasses.replace(point, registers=needs.registers + 8).on(arch).blocks < needs.blocks


def test_occupancy_figures() -> None:
    arch = ARCHITECTURES[90]
    kernel = Point(168, 128, 50_000)
    what_if = dataclasses.replace(kernel, threads=256)
    for field, value, x in (("registers", 128, 128), ("shared_memory", 40 * 1024, 40), ("threads", 512, 512)):
        curve = occupancy_charts.curve(arch, field, kernel, what_if, theme.LIGHT).data[0]
        expected = dataclasses.replace(what_if, **{field: value}).on(arch).fraction
        assert curve.y[list(curve.x).index(x)] == expected
    cells = [[kernel.on(arch), "does not fit"], ["…", kernel.on(arch)]]
    table = occupancy_charts.table(["a", "b"], ["x", "y"], cells, theme.DARK, (0, 0))
    assert table.data[0].text[0][1] == "does not fit"
    assert table.data[0].z[0][0] == kernel.on(arch).fraction


def test_a_kernel_that_cannot_run_is_called_that() -> None:
    assert "cannot run" in occupancy_charts.verdict(Point(255, 1024, 0).on(ARCHITECTURES[80]))


# --- Time, and the theme ---------------------------------------------------------------------------------


def test_large_views_are_drawn_in_time() -> None:
    """256 × 256 tiles and 20,000 blocks, drawn and written as JSON, in 200 ms of this thread's time."""
    problem = make(4, 20, 16384, 128, "bfloat16", True)
    schedule = Schedule.of(problem, 64, 64, True)

    def draw() -> float:
        start = time.thread_time()
        fresh = dataclasses.replace(schedule)
        text_of(tile_grid.tile_grid(fresh, theme.LIGHT, (100, 50)))
        blocks = launch.thread_blocks(problem, fresh, "fa2", 132)
        assert len(blocks) == 20_480
        text_of(timeline.timeline_figure(launch.predict(blocks, 132, 2), theme.LIGHT))
        return time.thread_time() - start

    assert min(draw() for _ in range(3)) < 0.2


def test_the_streamlit_theme_has_the_same_colours() -> None:
    config = tomllib.loads((dashboard_dir() / ".streamlit" / "config.toml").read_text())
    for palette in PALETTES:
        section = config["theme"][palette.name]
        assert section["backgroundColor"] == palette.background
        assert section["textColor"] == palette.text
        assert section["primaryColor"] == palette.accent


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
            for v in (x / 255 for x in bytes.fromhex(colour[1:]))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
def test_text_and_lines_stand_out(palette: theme.Palette) -> None:
    """WCAG AA: 4.5 for text, 3 for what has a meaning in a figure."""
    for name in ("text", "muted", "alarm", "warn", "measured", "predicted"):
        assert contrast(getattr(palette, name), palette.background) >= 4.5, name
    for colour in palette.series:
        assert contrast(colour, palette.background) >= 3, colour


def test_the_server_is_local_and_silent() -> None:
    config = tomllib.loads((dashboard_dir() / ".streamlit" / "config.toml").read_text())
    assert config["server"]["address"] == "127.0.0.1"
    assert set(config["server"]["allowedHosts"]) == {"localhost", "127.0.0.1", "[::1]"}
    assert config["browser"]["gatherUsageStats"] is False


def test_why_a_head_is_not_executed_here() -> None:
    assert counters.why_not_emulated(Schedule(1024, 1024, 128, 64, True), 64, True) is None
    assert "s on a CPU core" in str(
        counters.why_not_emulated(Schedule(65536, 65536, 128, 64, True), 64, True)
    )
    assert "No kernel" in str(counters.why_not_emulated(Schedule(64, 64, 16, 16, True), 64, False))


def test_every_config_of_a_kernel_has_its_own_name_in_the_link() -> None:
    from cufa.dashboard.model.configs import config_key, config_words
    from cufa.kernels import KERNELS

    for spec in KERNELS.values():
        for head_dim in range(8, 257, 8):
            fitting = [c for c in spec.configs if c.fits(head_dim)]
            assert len({config_key(c) for c in fitting}) == len(fitting), (spec.name, head_dim)
            assert len({config_words(c) for c in fitting}) == len(fitting), (spec.name, head_dim)
