"""Data of the dashboard's figures: arithmetic, splits, evidence; no page is opened."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from card_support import Json, edit, edit_rows, write_lines
from dashboard_support import ENVIRONMENT, decode_plan, schedules, write_evidence

from cufa import masks
from cufa.dashboard.model import evidence, softmax_steps, split_time, splits, work
from cufa.dashboard.model.asked import where
from cufa.gpu.architectures import Device
from cufa.measure import cards, decode_cases
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.schedule.schedule import Schedule, Tile

# --- Arithmetic ------------------------------------------------------------------------------------------


def test_work_counts_every_tile_and_every_visible_score() -> None:
    problem = make(2, 3, 100, 64, "bfloat16", CAUSAL)
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
    ratios = work.skip_speedups(Schedule(64, 64, 64, 64, CAUSAL), [64, 1024, 65536])
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert 1.99 < ratios[-1] < 2


@pytest.mark.parametrize(
    ("mask", "limit"), [(FULL, 1), (CAUSAL, 2), (Band(0, None), 2), (Band(1023, 0), math.inf)]
)
def test_what_skipping_tends_to(mask: Mask, limit: float) -> None:
    assert work.skip_limit(mask) == limit
    assert work.skip_speedups(Schedule(64, 64, 64, 64, mask), [1 << 18])[0] == pytest.approx(
        min(limit, (1 << 18) / (1024 + 64)), rel=0.02
    )


@pytest.mark.parametrize(
    "mask",
    [
        FULL, CAUSAL, Band(70, 0), Band(100, 30, "top-left"), Band(None, 3, -50), Band(10, None, 60),
        masks.streaming(9, 40), masks.chunks(90), masks.evict(np.arange(300)[::-1] // 2 + 100),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "q_block"), [(200, 200, 1), (100, 300, 0), (300, 100, 4)])
def test_the_last_tile_ends_at_the_lse(mask: Mask, seqlen_q: int, seqlen_k: int, q_block: int) -> None:
    """m + log l after the last tile is the log-sum-exp of the row, by float64 on the same inputs."""
    schedule = Schedule(seqlen_q, seqlen_k, 64, 64, mask)
    steps = softmax_steps.observe_rows(schedule, q_block, head_dim=32)
    visited = np.flatnonzero(schedule.classes[q_block]).tolist()
    assert [s.kv_block for s in steps] == visited
    first, end = (visited[0], visited[-1] + 1) if visited else (0, 0)
    for before, after in itertools.pairwise(steps):
        np.testing.assert_array_equal(before.m_after, after.m_before)
        np.testing.assert_array_equal(before.l_after, after.l_before)
    rows = np.arange(64 * q_block, min(64 * (q_block + 1), seqlen_q))
    keys = np.arange(64 * first, min(64 * end, seqlen_k))
    if not len(keys):
        return
    rng = np.random.default_rng([0, q_block])
    q = rng.standard_normal((len(rows), 32), np.float32)
    k = rng.standard_normal((1, 1, len(keys), 32), np.float32)[0, 0]
    seen = mask.visible(rows, keys, seqlen_q, seqlen_k)
    s = np.where(seen, q.astype(np.float64) @ k.T / np.sqrt(32), -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s).sum(axis=1))
        got = steps[-1].m_after + np.log(steps[-1].l_after)
    np.testing.assert_allclose(got, lse, rtol=1e-5, atol=1e-5)


def test_a_block_of_rows_that_see_nothing_has_no_steps() -> None:
    assert softmax_steps.observe_rows(Schedule(300, 100, 64, 64, CAUSAL), 0, 32) == []


# --- Splits ----------------------------------------------------------------------------------------------


def test_a_split_covers_every_tile_once() -> None:
    batch = splits.Batch.of(decode_plan(3, 1000), (1000, 70, 1), overhead=0)
    for number in (1, 2, 5, 16):
        blocks = splits.fixed_blocks(batch, number)
        assert blocks.tiles.sum() == batch.kv_heads * sum(batch.tiles)
        assert blocks.tiles.min() >= 1
        for sequence, tiles in enumerate(batch.tiles):
            mine = blocks.batch == sequence
            assert np.bincount(blocks.head[mine], blocks.tiles[mine]).tolist() == [tiles] * batch.kv_heads
    blocks = splits.balanced_blocks(batch, 7)
    assert blocks.tiles.sum() == batch.kv_heads * sum(batch.tiles)
    shares = np.bincount(blocks.thread_block, blocks.tiles)
    assert len(shares) == 7
    assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(("sequences", "capacity"), [(1, 8192), (1, 65536), (33, 4096), (5, 100_000)])
def test_fixed_splits_are_the_blocks_of_the_launch(sequences: int, capacity: int) -> None:
    plan = decode_plan(sequences, capacity, "fixed")
    batch = splits.Batch.of(plan, (capacity,) * sequences, overhead=0)
    found = splits.fixed(batch, plan.num_splits)
    simulated = splits.evaluate(batch, splits.fixed_blocks(batch, plan.num_splits), plan.num_splits)
    assert simulated.blocks == found.blocks == math.prod(plan.launches[0].grid)
    assert simulated.span <= found.span  # the last part of a sequence may be a little shorter


def test_splitting_one_sequence_fills_the_card() -> None:
    batch = splits.Batch.of(decode_plan(1, 65536), (65536,), overhead=1)
    curve = splits.split_curve(batch, splits.candidates(128))
    best = splits.best(curve)
    assert curve[0].fill == pytest.approx(8 / batch.places, rel=0.01)
    assert best.fill > 0.9
    assert best.span < curve[0].span * 8 / batch.places * 1.3


def test_a_full_card_is_not_split() -> None:
    one = splits.Batch.of(decode_plan(1, 4096), (4096,), overhead=1)
    sequences = one.places // one.items
    batch = splits.Batch.of(decode_plan(sequences, 4096), (4096,) * sequences, overhead=1)
    assert 0 <= batch.places - batch.items < 8
    assert splits.best(splits.split_curve(batch, splits.candidates(64))).splits == 1


def test_equal_shares_end_together() -> None:
    plan = decode_plan(16, 32768, "balanced")
    batch = splits.Batch.of(plan, splits.ragged(16, 32768, 32), overhead=0)
    assert not batch.ragged  # equal shares
    line = splits.timeline(batch, splits.balanced_blocks(batch, plan.num_splits))
    ends = np.zeros(batch.places)
    np.maximum.at(ends, line.slot * line.num_sms + line.sm, line.end)
    share = max(np.bincount(line.blocks.thread_block, line.blocks.tiles))
    assert ends.max() - ends.min() <= share  # several waves: the last one may end later
    assert (np.diff(np.sort(line.slot * line.num_sms + line.sm)) <= 1).all()  # every place has work
    fixed = splits.split_curve(batch, [1, 2, 4, 8, 16, 32])
    assert line.span <= 1.05 * min(s.span for s in fixed)  # lengths are unknown at launch time


# --- Evidence --------------------------------------------------------------------------------------------


def test_recorded_speedups_by_length(tmp_path) -> None:
    write_evidence(tmp_path, "versions")
    (found,) = evidence.load(tmp_path)
    assert where(found.rows) == "Made-up GPU, 2026-01-02"
    series = evidence.pairs(found.rows, "fa2_noskip", "fa2_forward", CAUSAL)
    assert "float16 d64, 4 heads, in turns" in series
    assert evidence.pairs(found.rows, "fa2_noskip", "fa2_forward", Band(1023, 0)) == {}
    for times in series.values():
        lengths = [slow.problem.seqlen_k for slow, _ in times]
        assert lengths == sorted(lengths)
        assert all(slow.seconds / fast.seconds == pytest.approx(1.5, rel=1e-3) for slow, fast in times)


def test_rows_that_are_older_than_a_kernel_say_so_beside_their_figures(tmp_path) -> None:
    """Later rows have their own date."""
    file = write_evidence(tmp_path, "versions")
    kernel, later = "fa2_forward", "2026-01-09T00:00:00+00:00"

    def change(line: Json) -> Json:
        digest = {"digest": "0" * 64} if line.get("kernel") == kernel else {}
        return {**line, **digest, **({"recorded": later} if line.get("suite") == "versions" else {})}

    edit(file, change)
    write_lines(file, [{"what": "session", **ENVIRONMENT, "recorded": later}, *cards.read_lines(file)])
    (found,) = evidence.load(tmp_path)
    of_suite = [m for m in found.rows if m.suite == "versions"]
    assert where(of_suite) == "Made-up GPU, 2026-01-09 (changed since: fa2_forward)"
    places = {m.kernel: m.where for m in found.rows if m.suite == "versions"}
    assert places[kernel] == "Made-up GPU, 2026-01-09 (changed since: fa2_forward)"
    assert places["fa2_noskip"] == "Made-up GPU, 2026-01-09"


def test_damaged_evidence_says_which_file(tmp_path) -> None:
    file = write_evidence(tmp_path, "versions")
    edit_rows(file, lambda row: row.pop("p50_ns"))
    with pytest.raises(ValueError, match=r"made-up-gpu\.jsonl is damaged: KeyError\('p50_ns'\)"):
        evidence.load(tmp_path)


# --- Reading ---------------------------------------------------------------------------------------------


def test_times_of_splits_are_those_that_were_recorded() -> None:
    """The fit has a median error below 10%; the planner's split is near the best."""
    device = Device.typical(90)
    reading = split_time.reading(device, 16, evidence.load())
    assert reading is not None
    assert reading.fitted > 15
    assert reading.typical < 0.1
    assert reading.error < 0.5
    for batch, heads, kv_heads, capacity in decode_cases.PUBLISHED:
        plan = make_plan(decode_cases.make_decode(batch, heads, kv_heads, capacity), device)
        if plan.config.block_q != 16:
            continue
        planned = reading.seconds(split_time.load_of(plan))
        for splits_ in (1, 2, 4, 8, 16, 32, 64, 128):
            other = make_plan(plan.problem, device, "fixed", num_splits=splits_)
            assert planned < 1.05 * reading.seconds(split_time.load_of(other))


def test_a_card_without_evidence_gets_no_times() -> None:
    found = evidence.load()
    assert split_time.reading(Device.typical(80), 16, found) is None
    assert split_time.reading(Device.typical(90), 16, []) is None
    h20 = dataclasses.replace(Device.typical(90), name="H20")
    assert split_time.reading(h20, 16, found) is None  # same architecture, other memory
