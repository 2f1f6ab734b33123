"""The schedule against a classification of every single score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS

from cufa import masks
from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan
from cufa.problem.columns import Columns
from cufa.problem.mask import CAUSAL, FULL
from cufa.problem.mask_family import Mask
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule, Tile

LENGTH = st.integers(1, 70)
BLOCK = st.sampled_from([1, 2, 3, 5, 8, 16, 64])
SCHEDULES = st.builds(Schedule, LENGTH, LENGTH, BLOCK, BLOCK, BANDS, st.booleans(), st.booleans())


def visible(schedule: Schedule) -> np.ndarray:
    """Every score that counts, (seqlen_q, seqlen_k)."""
    return schedule.mask.dense(schedule.seqlen_q, schedule.seqlen_k)


def tile_of(schedule: Schedule, scores: np.ndarray, i: int, j: int) -> np.ndarray:
    return scores[
        i * schedule.block_q : (i + 1) * schedule.block_q, j * schedule.block_kv : (j + 1) * schedule.block_kv
    ]


def classify(schedule: Schedule) -> np.ndarray:
    """The tiles' kinds, as their definitions say, from every score."""
    scores = visible(schedule)
    kinds = np.empty((schedule.num_q_blocks, schedule.num_kv_blocks), np.uint8)
    for i, j in np.ndindex(kinds.shape):
        tile = tile_of(schedule, scores, i, j)
        if schedule.skip_masked_tiles and not tile.any():
            kinds[i, j] = Tile.SKIPPED
        elif not tile.all():
            kinds[i, j] = Tile.PARTIAL
        elif tile.shape != (schedule.block_q, schedule.block_kv):
            kinds[i, j] = Tile.PADDED
        else:
            kinds[i, j] = Tile.FULL
    return kinds


@given(SCHEDULES)
def test_tiles(schedule):
    np.testing.assert_array_equal(schedule.tiles, classify(schedule))


@given(SCHEDULES)
def test_blocks_cover_the_scores_exactly(schedule):
    assert (schedule.num_q_blocks - 1) * schedule.block_q < schedule.seqlen_q
    assert schedule.num_q_blocks * schedule.block_q >= schedule.seqlen_q
    assert (schedule.num_kv_blocks - 1) * schedule.block_kv < schedule.seqlen_k
    assert schedule.num_kv_blocks * schedule.block_kv >= schedule.seqlen_k


@given(SCHEDULES)
def test_visits_are_the_tiles_that_are_not_skipped(schedule):
    kept, ranges = classify(schedule) != Tile.SKIPPED, schedule.ranges
    kept = kept.T if schedule.by_keys else kept  # (blocks, tiles that a block visits)
    tile = np.arange(kept.shape[1])
    assert len(kept) == schedule.num_blocks
    np.testing.assert_array_equal(schedule.visits, kept.sum(axis=1))
    np.testing.assert_array_equal(kept, (tile >= ranges.first[:, None]) & (tile < ranges.end[:, None]))


@given(SCHEDULES)
def test_clear_tiles_need_no_mask(schedule):
    """A tile that a block visits is whole, and each of the block's rows sees all of it; or, where keys visit
    queries, each of its keys is seen by all of it. No other tile is so."""
    scores, ranges = visible(schedule), schedule.ranges
    of_block, of_tile = schedule.block_q, schedule.block_kv
    if schedule.by_keys:
        scores, of_block, of_tile = scores.T, of_tile, of_block
    for i in range(schedule.num_blocks):
        block = scores[i * of_block : (i + 1) * of_block]
        tiles = [block[:, start : start + of_tile] for start in range(0, block.shape[1], of_tile)]
        clear = range(ranges.clear_first[i], ranges.clear_end[i])
        needs_none = [j for j, tile in enumerate(tiles) if tile.all() and tile.shape[1] == of_tile]
        assert needs_none == list(clear)
        if not clear:  # all that is visited counts as masked on the right
            assert ranges.clear_first[i] == ranges.clear_end[i] == ranges.first[i]
    assert (ranges.first <= ranges.clear_first).all() and (ranges.clear_end <= ranges.end).all()


@given(SCHEDULES)
def test_counts(schedule):
    kinds = classify(schedule)
    assert {tile: schedule.count(tile) for tile in Tile} == {tile: (kinds == tile).sum() for tile in Tile}
    assert schedule.total == kinds.size
    assert schedule.skipped == (kinds == Tile.SKIPPED).sum()
    assert schedule.visited + schedule.skipped == schedule.total


def test_the_figure_of_a_causal_square():
    """Four by four blocks: the lower triangle, its diagonal cut by the boundary."""
    s, f, p = Tile.SKIPPED, Tile.FULL, Tile.PARTIAL
    schedule = Schedule(64, 64, 16, 16, CAUSAL)
    assert schedule.tiles.tolist() == [[p, s, s, s], [f, p, s, s], [f, f, p, s], [f, f, f, p]]
    assert (schedule.visited, schedule.skipped, schedule.total) == (10, 6, 16)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_long_sequences_are_not_enumerated_score_by_score(mask):
    """A million tokens a side: 10¹² scores."""
    n = 1 << 20
    schedule = Schedule(n, n, 128, 64, mask)
    blocks_q, blocks_kv = n // 128, n // 64
    assert schedule.total == blocks_q * blocks_kv
    assert schedule.visited == (blocks_q * (blocks_q + 1) if mask is CAUSAL else schedule.total)


def test_of_a_problem():
    problem = Problem(2, 4, 2, 30, 50, 64, "float16", CAUSAL)
    assert Schedule.of(problem, 16, 8, False) == Schedule(30, 50, 16, 8, CAUSAL, False)


def test_planning_walks_no_matrix_of_tiles(monkeypatch):
    """Its time would grow with the square of seqlen, and with seqlen where documents are few."""
    for method in ("key_tiles", "query_tiles", "rectangles", "visible_per_key"):
        monkeypatch.setattr(Mask, method, None)
        monkeypatch.setattr(Columns, method, None, raising=False)
    mask = masks.documents([1000] * 131)
    assert len(mask.intervals.starts) == 131
    for operation in ("forward", "backward"):
        problem = Problem(1, 8, 8, 131_000, 131_000, 64, "bfloat16", mask, 0.125, operation=operation)
        plan = make_plan(problem, Device.typical("sm_90"))
        assert plan.launches and (plan.block_order is not None) == (operation == "forward")
