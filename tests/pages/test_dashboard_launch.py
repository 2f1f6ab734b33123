"""Launches, timelines and traces of the dashboard, without Streamlit."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the dashboard needs plotly: pip install 'cufa[dashboard]'")

from dashboard_support import DEVICE, make_records, make_trace

from cufa.dashboard.model import launch, trace
from cufa.kernels import KERNELS
from cufa.measure import traces
from cufa.measure.cases import of_forward
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.schedule.order import Order, makespan, simulate
from cufa.schedule.schedule import Schedule

# --- Launches and timelines ------------------------------------------------------------------------------


MASKS = (FULL, CAUSAL, Band(300, 0), Band(100, 50, "top-left"))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2_noskip", "fa2", "fa3"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_query_block_is_launched_once(algorithm: str, mask: Mask) -> None:
    problem = make(3, 5, 700, 64, "bfloat16", mask)
    spec = launch.algorithms()[algorithm]
    schedule = Schedule.of(problem, 128, 64, spec.skip_masked_tiles)
    blocks = launch.thread_blocks(problem, schedule, spec, DEVICE)
    assert blocks.tiles.sum() == 15 * schedule.visited
    places = set(zip(blocks.q_block.tolist(), blocks.head.tolist(), blocks.batch.tolist(), strict=True))
    assert len(places) == len(blocks) == (15 if algorithm == "fa1" else 15 * schedule.num_q_blocks)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_key_block_of_the_backward_is_launched_once(mask: Mask, deterministic: bool) -> None:
    problem = of_forward(make(3, 8, 700, 64, "bfloat16", mask, kv_heads=4), deterministic=deterministic)
    spec = launch.algorithms("backward")["fa2"]
    schedule = Schedule.of(problem, 64, 128, spec.skip_masked_tiles)
    blocks = launch.thread_blocks(problem, schedule, spec, DEVICE)
    assert blocks.tiles.sum() == 12 * schedule.visited
    places = set(zip(blocks.q_block.tolist(), blocks.head.tolist(), blocks.batch.tolist(), strict=True))
    assert len(places) == len(blocks) == 12 * schedule.num_kv_blocks
    assert blocks.head.max() == 3 and blocks.batch.max() == 2
    if problem.mask_kind == "causal" and not deterministic:
        assert (np.diff(blocks.tiles[: len(blocks) * 5 // 8]) <= 0).all(), "the longest come first"


def test_both_blocks_of_a_pair_are_drawn_side_by_side() -> None:
    plan = make_plan(of_forward(make(3, 8, 700, 256, "bfloat16", CAUSAL)), DEVICE, "fa3")
    blocks = launch.thread_blocks(plan.problem, plan.schedule, plan.spec, DEVICE, plan.config)
    assert len(blocks) == plan.launches[1].grid[0] == 2 * len(plan.order)
    for numbers in (blocks.q_block, blocks.head, blocks.batch, blocks.tiles):
        assert (numbers[::2] == numbers[1::2]).all()


def test_launches_that_can_be_drawn_begin_with_the_simplest() -> None:
    assert list(launch.algorithms()) == ["fa1", "fa2_noskip", "fa2", "fa3"]
    assert launch.algorithms("backward")["fa2"] is KERNELS["fa2_backward"]


@pytest.mark.sampled(each="heads", fixed=0)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(300, 0)], ids=str)
@pytest.mark.parametrize(
    ("algorithm", "heads", "seqlen"),
    # 400 heads of 256 keys exceed the L2 cache: the kernel launches head batches.
    [("fa2", 3, 1200), ("fa2", 400, 256), ("fa3", 3, 1200), ("fa3", 60, 400)],
)
def test_launch_order_is_the_kernels(algorithm: str, heads: int, seqlen: int, mask: Mask) -> None:
    """The kernel's source, executed on this CPU, gives the work items of each block."""
    from cufa.run.emulate.calls import emulate

    q = np.random.default_rng(0).standard_normal((1, heads, seqlen, 64), np.float32).astype(np.float16)
    run = emulate(q, q[:, :1], q[:, :1], mask=mask, algorithm=algorithm, num_splits=1)
    config = run.plan.config
    problem = make(1, heads, seqlen, 64, "float16", mask)
    schedule = Schedule.of(problem, config.block_q, config.block_kv, True)
    blocks = launch.thread_blocks(problem, schedule, run.plan.spec, run.plan.device or DEVICE)
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


@pytest.mark.parametrize(("cost", "items", "slots"), [(0.1, 100, 7), (2, 3, 8), (0, 5, 2), (1, 0, 4)])
def test_items_of_one_cost_go_as_among_others(cost: float, items: int, slots: int) -> None:
    """Items of equal cost have a shortcut. An additional last item of another cost does not change the others."""
    zeros = np.zeros(items + 1, np.int64)
    alike = simulate(Order(zeros[1:], zeros[1:]), np.full(items, cost), slots)
    among = simulate(Order(zeros, zeros), np.array([*[cost] * items, cost + 1]), slots)
    for one, other in zip(alike, among, strict=True):
        assert one.tolist() == other[:-1].tolist()


def test_the_last_end_is_found_without_the_others() -> None:
    tiles = np.random.default_rng(0).integers(1, 40, 500) + 0.3
    order = Order(np.zeros(500, np.int64), np.zeros(500, np.int64))
    for slots in (1, 7, 132, 1000):
        assert makespan(order, tiles, slots) == simulate(order, tiles, slots)[1].max()
    assert makespan(Order(order.q_block[:0], order.head[:0]), tiles[:0], 4) == 0


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
    problem = make(2, 7, 3000, 64, "bfloat16", CAUSAL)
    schedule = Schedule.of(problem, 64, 64, True)
    line = launch.predict(launch.thread_blocks(problem, schedule, KERNELS["fa2_forward"], DEVICE), 10, 3)
    places = line.sm * 3 + line.slot
    for place in np.unique(places):
        mine = np.flatnonzero(places == place)
        order = mine[np.argsort(line.start[mine])]
        assert (line.start[order[1:]] >= line.end[order[:-1]]).all()


# --- Traces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fa1", "fa2_noskip", "fa2", "fa3"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_trace_gives_back_its_timeline(algorithm: str, mask: Mask) -> None:
    plan = make_plan(make(2, 8, 1024, 64, "bfloat16", mask), DEVICE, algorithm)
    blocks = launch.thread_blocks(plan.problem, plan.schedule, plan.spec, DEVICE)
    expected = launch.predict(blocks, DEVICE.num_sms, plan.config.blocks_per_sm)
    got = trace.measured_timeline(make_records(plan), DEVICE.num_sms, whole_heads=algorithm == "fa1")
    rows = [
        sorted(zip(t.sm, t.start * scale, t.blocks.tiles, t.blocks.head, strict=True))
        for t, scale in ((got, 1.0), (expected, 0.9))
    ]
    np.testing.assert_allclose(*rows)
    assert got.tail == pytest.approx(expected.tail)
    assert trace.disagreements(make_records(plan), plan.schedule) == []


@pytest.mark.parametrize(
    "field", ["first_tile", "tiles_visited", "tiles_skipped", "first_clear", "tiles_clear"]
)
def test_a_wrong_tile_count_is_found(field: str) -> None:
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", CAUSAL), DEVICE, "fa2")
    found = make_records(plan)
    found[field][5] += 1
    (sentence,) = trace.disagreements(found, plan.schedule)
    assert field.replace("_", " ") in sentence
    assert f"1 of {len(found)} records" in sentence


def test_a_trace_of_another_length_is_found() -> None:
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", CAUSAL), DEVICE, "fa2")
    shorter = dataclasses.replace(plan.schedule, seqlen_q=256, seqlen_k=256)
    assert "the schedule only" in trace.disagreements(make_records(plan), shorter)[0]


def test_traces_are_saved_and_loaded(tmp_path) -> None:
    plan = make_plan(make(1, 4, 512, 64, "bfloat16", CAUSAL), DEVICE, "fa2")
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
    plan = make_plan(make(1, 4, 1024, 64, "bfloat16", CAUSAL), DEVICE, "fa2")
    line = trace.measured_timeline(make_records(plan), DEVICE.num_sms)
    exported = json.loads(trace.perfetto(line, "a title"))
    slices = [e for e in exported["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 4 * plan.schedule.num_q_blocks
    assert slices[0]["args"]["tiles"] == line.blocks.tiles[0]
    assert exported["otherData"] == {"title": "a title", "predicted": False, "unit": "µs"}


def test_perfetto_events_of_one_thread_never_cross() -> None:
    plan = make_plan(make(2, 16, 2048, 128, "bfloat16", CAUSAL), DEVICE, "fa3")
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
