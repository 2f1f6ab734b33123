"""What the dashboard's figures show: arithmetic, decoding, evidence, without Streamlit."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the dashboard needs plotly: pip install 'cufa[dashboard]'")

from dashboard_support import decode_plan, schedules, write_evidence

from cufa.bench.suites import make
from cufa.core.schedule import Schedule, Tile
from cufa.dashboard.model import decode, evidence, softmax_steps, work
from cufa.ops.reference import attention_reference

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
