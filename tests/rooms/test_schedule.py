"""Tiles: which a block visits and which need no mask, against every single score."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS, tiles_of
from support import make_inputs

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.columns import FROM_THE_START, TO_THE_END, Columns, columns_of
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.problem.problem import Problem
from cufa.problem.tile_classes import TileClass, TileLists
from cufa.run.cpu import backward as cpu_backward
from cufa.run.cpu import forward as cpu
from cufa.schedule.schedule import Schedule, Tile

SIDE = st.integers(1, 70)
BLOCK = st.sampled_from([1, 2, 3, 5, 8, 16, 64])


@st.composite
def any_mask(draw, seqlen_q, seqlen_k):
    """A band, a band with sets, or columns with any runs within one, with rows counted in any way."""
    band, few = draw(BANDS), st.integers(0, 12)
    if draw(st.booleans()):
        return band
    band = Band(band.left, band.right, band.diagonal, draw(few), draw(few), draw(few))
    if draw(st.booleans()):
        return band
    edge = st.one_of(st.integers(-5, 45), st.sampled_from([FROM_THE_START, TO_THE_END]))
    run = st.lists(edge, min_size=seqlen_k, max_size=seqlen_k)
    if draw(st.booleans()):  # runs of neighbours alike, so that tiles are covered
        run = edge.map(lambda x: [x] * seqlen_k)
    runs = [np.array(draw(run)) for _ in range(2 * draw(st.integers(1, 2)))]
    rows = draw(st.sampled_from(["top-left", "bottom-right", -3, 4]))
    return columns_of(band, runs, rows, "")


@st.composite
def schedules(draw, block=BLOCK):
    seqlen_q, seqlen_k = draw(SIDE), draw(SIDE)
    mask = draw(any_mask(seqlen_q, seqlen_k))
    return Schedule(
        seqlen_q, seqlen_k, draw(block), draw(block), mask, draw(st.booleans()), draw(st.booleans())
    )


@given(schedules())
def test_tiles_are_what_every_score_says(schedule):
    """No visible score is skipped, and no hidden one left unmasked. Under bands both are exact: nothing is visited or
    masked in vain."""
    seen, sides = (
        schedule.mask.dense(schedule.seqlen_q, schedule.seqlen_k),
        (schedule.block_q, schedule.block_kv),
    )
    exact, by_keys = isinstance(schedule.mask, Band), schedule.by_keys
    assert schedule.mask.visible_scores(*seen.shape) == seen.sum()
    some, whole = tiles_of(seen.T, *sides[::-1]) if by_keys else tiles_of(seen, *sides)
    visited, clear = schedule.classes != TileClass.SKIP, schedule.classes == TileClass.CLEAR
    assert visited.shape == some.shape == (schedule.num_blocks, schedule.tiles_of_block)
    assert (visited >= some).all() and (clear <= whole).all()
    assert visited.all() or schedule.skip_masked_tiles
    if exact:
        np.testing.assert_array_equal(clear, whole)
        np.testing.assert_array_equal(visited, some | (not schedule.skip_masked_tiles))
    ranges = schedule.ranges
    for count in (schedule.visits, ranges.count):
        np.testing.assert_array_equal(count, visited.sum(axis=1))
    np.testing.assert_array_equal(ranges.clear, clear.sum(axis=1))
    if exact and not schedule.mask.irregular_kind:
        assert (ranges.first <= ranges.clear_first).all() and (ranges.clear_end <= ranges.end).all()
        assert (ranges.clear_first == ranges.first)[ranges.clear == 0].all(), "as in the kernels' walk"
        assert not ranges.first[ranges.count == 0].any()
    for (i, j), kind in np.ndenumerate(schedule.tiles):
        tile = seen[i * sides[0] : (i + 1) * sides[0], j * sides[1] : (j + 1) * sides[1]]
        of_scores = Tile.PARTIAL if not tile.all() else Tile.FULL if tile.shape == sides else Tile.PADDED
        skipped = not visited[(j, i) if by_keys else (i, j)]
        assert kind == (Tile.SKIPPED if skipped else of_scores) or (kind == Tile.PARTIAL and not exact)
    counts = {tile: schedule.count(tile) for tile in Tile}
    assert (
        schedule.total == schedule.tiles.size == schedule.visited + schedule.skipped == sum(counts.values())
    )
    assert schedule.skipped == counts[Tile.SKIPPED]


@settings(max_examples=40)
@given(schedules(BLOCK.filter(lambda n: n > 4)))
def test_the_cpu_path_walks_these_tiles(schedule):
    """Small tiles, so that many are skipped and some visited in vain: forward and backward against float64."""
    lengths = schedule.seqlen_q, schedule.seqlen_k
    q, k, v = make_inputs(1, 2, 1, *lengths, 8, "float64")
    config = TileConfig(schedule.block_q, schedule.block_kv, num_warps=0)
    problem = Problem(1, 2, 1, *lengths, 8, "float64", schedule.mask, 8**-0.5)
    plan = make_plan(problem, None, "fa2" if schedule.skip_masked_tiles else "fa2_noskip", config)
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan)
    cpu.run(plan, q, k, v, out, lse)
    expected = cufa.attention_reference(q, k, v, mask=schedule.mask, return_lse=True)
    for x, exact in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(x, exact, atol=1e-12)
    dout = np.random.default_rng(1).standard_normal(q.shape)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": None}
    given |= {f"d{name}": np.full_like(given[name], np.nan) for name in "qkv"}
    plan = make_plan(dataclasses.replace(problem, operation="backward"), None, "fa2", config)
    cpu_backward.run(plan, given)
    exact = cufa.attention_reference_backward(dout, q, k, v, mask=schedule.mask)
    for name, x in zip(("dq", "dk", "dv"), exact, strict=True):
        np.testing.assert_allclose(given[name], x, atol=1e-11)


def test_a_run_that_covers_a_tile_exactly_and_by_one_row_less():
    """Rows 8…15 of keys 8…15: hidden; with a row less of one key, not; by two runs together, visited in vain."""
    lo, hi = np.full(32, 8), np.full(32, 16)
    assert Schedule(32, 32, 8, 8, masks.columns(lo, hi)).tiles[1, 1] == Tile.SKIPPED
    hi[9] = 15
    schedule = Schedule(32, 32, 8, 8, masks.columns(lo, hi))
    assert schedule.tiles[1, 1] == Tile.PARTIAL and schedule.tiles[1, 0] == Tile.SKIPPED
    assert schedule.tiles[0, 1] == schedule.tiles[2, 1] == Tile.FULL
    middle = np.full(32, 12)
    both = Schedule(32, 32, 8, 8, masks.columns(np.full(32, 8), middle, middle, np.full(32, 16)))
    assert both.tiles[1, 1] == Tile.PARTIAL and not both.mask.dense(32, 32)[8:16].any()


def test_empty_runs_cost_nothing():
    """Beside keys with runs, wherever the empty runs are said to begin."""
    lo, hi = np.full(32, 20), np.full(32, 28)
    for empty in ((0, 0), (31, 5), (TO_THE_END, FROM_THE_START)):
        lo[9], hi[9] = empty
        schedule = Schedule(32, 32, 8, 8, masks.columns(lo, hi))
        assert schedule.tiles[0, 1] == schedule.tiles[1, 1] == Tile.FULL
        assert schedule.tiles[2, 1] == schedule.tiles[3, 1] == Tile.PARTIAL


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


def test_documents_at_a_million_tokens():
    """Lists are as long as what is visited: no matrix of scores, or of tiles."""
    n = 1 << 20
    mask = masks.documents([1 << 14] * 64)
    schedule = Schedule(n, n, 128, 128, mask)
    assert isinstance(schedule.ranges, TileLists)
    assert schedule.visited == 64 * (128 * 129 // 2) and schedule.ranges.clear.sum() == 64 * (128 * 127 // 2)
    assert mask.visible_scores(n, n) == 64 * (1 << 14) * ((1 << 14) + 1) // 2


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
