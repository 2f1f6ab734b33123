"""Masks beyond bands: tiles that are never skipped wrongly, sequences and heads that differ, masks as values."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS
from support import make_inputs

import cufa
from cufa import masks
from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.columns import FROM_THE_START, TO_THE_END, Columns, columns_of
from cufa.problem.integers import Integers
from cufa.problem.mask import Band, Mask
from cufa.problem.problem import Problem
from cufa.problem.tile_classes import TileClass, TileLists
from cufa.run.cpu import backward as cpu_backward
from cufa.run.cpu import forward as cpu
from cufa.schedule.schedule import Schedule, Tile

# --- Tiles ------------------------------------------------------------------------------------------------

SIDE = st.integers(1, 40)
BLOCK = st.sampled_from([1, 2, 3, 5, 8, 16])


@st.composite
def any_mask(draw, seqlen_q, seqlen_k):
    """A band with sets, or columns with any runs within one, with rows counted in any way."""
    band, few = draw(BANDS), st.integers(0, 12)
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
def test_skip_is_never_wrong_and_clear_neither(schedule):
    seen = schedule.mask.dense(schedule.seqlen_q, schedule.seqlen_k)
    assert schedule.mask.visible_scores(*seen.shape) == seen.sum()
    assert len(schedule.classes) == schedule.num_blocks
    for i in range(schedule.num_q_blocks):
        for j in range(schedule.num_kv_blocks):
            rows = slice(i * schedule.block_q, (i + 1) * schedule.block_q)
            tile = seen[rows, j * schedule.block_kv : (j + 1) * schedule.block_kv]
            kind = schedule.classes[(j, i) if schedule.by_keys else (i, j)]
            whole = (
                tile.shape[0] == schedule.block_q if schedule.by_keys else tile.shape[1] == schedule.block_kv
            )
            if kind == TileClass.SKIP:
                assert schedule.skip_masked_tiles and not tile.any()
            elif kind == TileClass.CLEAR:
                assert tile.all() and whole
            assert (schedule.tiles[i, j] == Tile.SKIPPED) == (kind == TileClass.SKIP)
            if schedule.tiles[i, j] in (Tile.FULL, Tile.PADDED):
                assert tile.all()
            if isinstance(schedule.mask, Band):  # exact: nothing is visited in vain
                assert (kind == TileClass.CLEAR) == bool(tile.all() and whole)
                assert not schedule.skip_masked_tiles or (kind == TileClass.SKIP) == (not tile.any())
    ranges = schedule.ranges
    np.testing.assert_array_equal(schedule.visits, ranges.count)
    np.testing.assert_array_equal(ranges.count, (schedule.classes != TileClass.SKIP).sum(axis=1))
    np.testing.assert_array_equal(ranges.clear, (schedule.classes == TileClass.CLEAR).sum(axis=1))


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
    """Beside keys with runs, wherever their empty ones are said to begin."""
    lo, hi = np.full(32, 20), np.full(32, 28)
    for empty in ((0, 0), (31, 5), (TO_THE_END, FROM_THE_START)):
        lo[9], hi[9] = empty
        schedule = Schedule(32, 32, 8, 8, masks.columns(lo, hi))
        assert schedule.tiles[0, 1] == schedule.tiles[1, 1] == Tile.FULL
        assert schedule.tiles[2, 1] == schedule.tiles[3, 1] == Tile.PARTIAL


def test_documents_at_a_million_tokens():
    """Lists are as long as what is visited: no matrix of scores, or of tiles."""
    n = 1 << 20
    mask = masks.documents([1 << 14] * 64)
    schedule = Schedule(n, n, 128, 128, mask)
    assert isinstance(schedule.ranges, TileLists)
    assert schedule.visited == 64 * (128 * 129 // 2) and schedule.ranges.clear.sum() == 64 * (128 * 127 // 2)
    assert mask.visible_scores(n, n) == 64 * (1 << 14) * ((1 << 14) + 1) // 2


# --- Sequences and heads that differ ----------------------------------------------------------------------


def spread_masks():
    rng = np.random.default_rng(0)
    return [
        masks.prefix([3, 40]),
        masks.streaming(np.array([2, 9], np.int32), 5),
        masks.global_window([0, 4], 3, 3),
        masks.documents([[10, 20, 20], [50, 0, 0]]),
        masks.documents([[10, 20, 20], [30, 5, 0]], causal=False),
        masks.shared_question([5, 9], [[20, 25], [30, 2]]),
        masks.shared_question(5, [[20, 25], [30, 2]]),
        masks.shared_question([5, 9], [20, 21]),
        masks.evict(rng.integers(0, 60, (2, 50))),
        masks.evict(rng.integers(0, 60, (2, 3, 50))),
        masks.columns(rng.integers(0, 50, (1, 3, 50)), rng.integers(0, 50, (2, 1, 50)), causal=True),
        masks.from_flashmask(rng.integers(0, 50, (2, 3, 50, 4)), causal=False),
        masks.from_flashmask(rng.integers(0, 50, (2, 1, 50, 1)), causal=True),
    ]


@pytest.mark.parametrize("mask", spread_masks(), ids=str)
@pytest.mark.parametrize("seqlen_q", [50, 17])
def test_a_mask_for_each_sequence_and_head(mask, seqlen_q):
    """As the same call made for one sequence and head after the other."""
    q, k, v = make_inputs(2, 6, 3, seqlen_q, 50, 8, "float64")
    dout = np.random.default_rng(1).standard_normal(q.shape)
    out, lse = cufa.flash_attention(q, k, v, mask=mask, return_lse=True, device="cpu")
    gradients = cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask, device="cpu")
    reference = cufa.attention_reference(q, k, v, mask=mask)
    plan = cufa.plan(q, k, mask=mask, device="cpu")
    visible = 0
    for b, h in np.ndindex(2, 3):
        one, group = (slice(b, b + 1), slice(h, h + 1)), (slice(b, b + 1), slice(2 * h, 2 * h + 2))
        alone = mask.at(b, h)
        assert alone.spread == (1, 1)
        np.testing.assert_array_equal(mask.dense(seqlen_q, 50, b, h), alone.dense(seqlen_q, 50))
        visible += 2 * alone.visible_scores(seqlen_q, 50)
        expected = cufa.attention_reference(q[group], k[one], v[one], mask=alone)
        np.testing.assert_allclose(out[group], expected, atol=1e-12)
        np.testing.assert_allclose(reference[group], expected, atol=1e-12)
        exact = cufa.attention_reference_backward(dout[group], q[group], k[one], v[one], mask=alone)
        for found, x, part in zip(gradients, exact, (group, one, one), strict=True):
            np.testing.assert_allclose(found[part], x, atol=1e-11)
    assert plan.problem.all_visible_scores == visible and plan.problem.flops == 4 * 8 * visible
    assert "visited" in str(plan)


# --- Decoding ---------------------------------------------------------------------------------------------

DECODED = [
    masks.causal(), masks.window(9, 0), masks.streaming(4, 9), masks.streaming([4, 0, 90], 9),
    masks.prefix(20), masks.global_window(20, 9, 0), masks.chunks(32),
]  # fmt: skip


@pytest.mark.parametrize("mask", DECODED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {"schedule": "balanced"}], ids=str)
def test_decoding_under_masks(mask, tokens, options):
    """As the last rows of a dense call say."""
    q, k, v = make_inputs(3, 4, 2, tokens, 700, 8, "float64")
    lengths = [tokens, 64, 700]
    out, lse = cufa.flash_decode(
        q, k, v, cache_seqlens=lengths, mask=mask, return_lse=True, device="cpu", **options
    )
    expected = cufa.decode_reference(q, k, v, cache_seqlens=lengths, mask=mask, return_lse=True)
    for x, exact in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(x, exact, atol=1e-12)
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        dense = cufa.attention_reference(q[one], k[one, :, :n], v[one, :, :n], mask=mask.at(b, 0))
        np.testing.assert_allclose(out[one], dense, atol=1e-12)


def test_masks_that_decoding_does_not_take():
    q, k, v = make_inputs(3, 4, 2, 1, 70, 64, "float16")
    wrong = (
        masks.full(),
        masks.window(3, 1),
        masks.causal("top-left"),
        masks.documents([70]),
        masks.chunks(3, 5),
    )
    for mask in wrong:
        with pytest.raises(ValueError, match="the queries of a decoding call are the last tokens") as refused:
            cufa.flash_decode(q, k, v, mask=mask)
        assert "global_window(tokens, left, 0)" in str(refused.value)
    with pytest.raises(ValueError, match=r"mask=causal and window=\(3, 0\) both say"):
        cufa.flash_decode(q, k, v, mask=masks.causal(), window=(3, 0))
    with pytest.raises(ValueError, match="is of 2 sequences but k has 3"):
        cufa.flash_decode(q, k, v, mask=masks.streaming([1, 2], 3))
    with pytest.raises(ValueError, match="takes one number of first keys for all sequences"):
        cufa.plan_decode(q, k, mask=masks.streaming([1, 2, 3], 9), device="sm_90")
    with pytest.raises(ValueError, match="band masks, not masks that hide each key from one run of rows"):
        cufa.plan_decode(q, k, mask=masks.chunks(16), device="sm_90")


# --- Numbers as values ------------------------------------------------------------------------------------


def test_numbers_cannot_be_changed_from_outside():
    rows = np.arange(8)
    mask = masks.evict(rows)
    before = mask.dense(8, 8)
    rows[:] = 0
    np.testing.assert_array_equal(mask.dense(8, 8), before)
    assert isinstance(mask, Columns) and not mask.intervals.values.flags.writeable


def test_many_numbers_are_left_out_of_json():
    """But not of short descriptions: documents of a long stream take a few hundred bytes."""
    mask = masks.evict(np.random.default_rng(0).integers(0, 1 << 20, 1 << 14))
    record = json.dumps(mask.as_json())
    assert len(record) < 500
    kept = Mask.from_json(json.loads(record))
    assert kept == mask and str(kept) == str(mask) and not kept.known
    with pytest.raises(ValueError, match=r"too many to be kept.*make the mask anew"):
        kept.dense(8, 8)
    x = np.ones((1, 1, 1 << 14, 8), np.float32)
    with pytest.raises(ValueError, match=r"has lost them, but q is computed on the CPU.*make it anew"):
        cufa.flash_attention(x, x, x, mask=kept, device="cpu")
    assert "at most" in str(cufa.plan(x.shape, mask=kept, device="cpu"))
    long = masks.documents([1 << 10] * 64)
    assert len(json.dumps(long.as_json())) < 2000 and Mask.from_json(long.as_json()).known


def test_integers_of_any_kind():
    rng = np.random.default_rng(0)
    x = Integers(rng.integers(-(2**31), 2**31, (2, 3, 5)))
    again = Integers.from_json(json.loads(json.dumps(x.as_json())))
    assert again == x and x != Integers(np.zeros((2, 3, 5), int)) and x != 3 and "(2, 3, 5)" in repr(x)
    np.testing.assert_array_equal(again.values, x.values)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_copies_are_frozen(copied):
    mask = masks.documents([3, 5])
    found = copied(mask)
    assert found == mask and not found.intervals.values.flags.writeable
