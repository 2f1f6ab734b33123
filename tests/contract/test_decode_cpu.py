"""Decoding in NumPy: every cut of the keys against float64, whatever lies in unused memory."""

from __future__ import annotations

import numpy as np
import pytest
from decode_cpu_support import PAGE_SIZES, check, decode, planned
from decode_support import FLOAT8, NAN_BITS, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa.kernels import TileConfig
from cufa.kernels.decode import row_blocks
from cufa.plan.decode import ragged_shares
from cufa.problem.mask import CAUSAL
from cufa.run.cpu import cache as cpu_cache
from cufa.run.cpu import decode as cpu_decode
from cufa.schedule.decode import balanced_shares, split_range, used_splits

# --- Splits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_number_of_splits(dtype, page_size):
    """1 to the number of tiles and beyond: the answer does not depend on it, beyond rounding."""
    case = make_case([101, 8, 64], tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 16):
        check(case, num_splits=num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_every_number_of_shares(dtype, page_size):
    """1 to one a tile, and more shares than tiles. Six query rows: two blocks of them."""
    case = make_case([51, 0, 9, 1, 16], heads=6, kv_heads=2, tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 60):
        check(case, schedule="balanced", num_splits=num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_window_begins_anywhere_within_a_tile(page_size):
    """Of several tokens the first may see the whole of a tile whose first keys the later ones do not see."""
    for left in range(40):
        case = make_case([37, 8, 20], tokens=4, page_size=page_size, window=(left, 0), dtype="float64")
        check(case, num_splits=left % 4 + 1)


def test_splits_agree_to_rounding():
    """In float64, where float32's rounding cannot hide a mistake."""
    case = make_case([97], dtype="float64")
    expected, _ = case.expected
    for schedule in ("fixed", "balanced"):
        for num_splits in range(1, 14):
            out, _ = decode(case, schedule=schedule, num_splits=num_splits)
            np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_the_work_is_the_schedules():
    """Fixed: split_range of each sequence. Balanced: the spans. Whole heads may share a stack."""
    case = make_case([51, 0, 9, 1, 16], heads=6, kv_heads=6, capacity=60)
    for num_splits in range(1, 40):
        plan, operands = planned(case, num_splits=num_splits)
        lengths = cpu_decode.valid_keys(plan, operands)
        assert lengths == [51, 0, 9, 1, 16]
        got = [
            (w.batch, h, w.first_key, w.last_key)
            for w in cpu_decode.works(plan, lengths)
            for h in range(w.heads.start, w.heads.stop)
        ]
        assert sorted(got) == sorted(
            (b, h, *split_range(n, num_splits, s, 8))
            for b, n in enumerate(lengths)
            for h in range(6)
            for s in range(used_splits(n, num_splits, 8))
        )
        plan, operands = planned(case, schedule="balanced", num_splits=num_splits)
        got = [
            (w.batch, h, w.first_key, w.last_key)
            for w in cpu_decode.works(plan, lengths)
            for h in range(w.heads.start, w.heads.stop)
        ]
        spans = list(
            balanced_shares(
                lengths,
                6,
                num_splits,
                8,
                row_blocks(plan.problem, plan.config),
                ragged=ragged_shares(plan),
                min_shares=plan.split.least,
            )
        )
        assert got == [(p.batch, p.kv_head, p.first_key, p.last_key) for p in spans]


def test_heads_share_a_stack_when_there_are_enough():
    plan, operands = planned(make_case([16] * 16, kv_heads=4))
    works = list(cpu_decode.works(plan, cpu_decode.valid_keys(plan, operands)))
    assert {w.heads.stop - w.heads.start for w in works} == {4}


def test_stacks_of_heads_do_not_mix_blocks_of_rows():
    case = make_case([16] * 16, heads=8, kv_heads=4, tokens=3)
    plan, _ = planned(case)
    assert row_blocks(plan.problem, plan.config) == 2
    for num_splits in (1, 3, 64):
        check(case, schedule="balanced", num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_every_observed_tile_goes_on_from_the_one_before_in_its_split(num_splits):
    case = make_case([50, 13], dtype="float64", tokens=2)
    plan, operands = planned(case, num_splits=num_splits)
    tiles = []
    cpu_decode.run(plan, operands, observer=tiles.append)
    case.check(operands["out"], operands["lse"])
    for b, length in enumerate(case.lengths):
        for head in range(2):
            for split in range(used_splits(length, num_splits, 8)):
                first, last = split_range(length, num_splits, split, 8)
                own = [x for x in tiles if (x.batch, x.head) == (b, head) and first <= 8 * x.kv_block < last]
                assert [x.kv_block for x in own] == list(range(first // 8, -(-last // 8)))
                q = operands["q"][b].reshape(2, 4, 16)[head] / 4
                keys, values = (operands[x][b, head, first:last] for x in ("k_cache", "v_cache"))
                seen = CAUSAL.visible(np.arange(4) % 2, np.arange(first, last), 2, length)
                S = np.where(seen, q @ keys.T, -np.inf)
                m, l = np.full(4, -np.inf), np.zeros(4)
                for x in own:
                    so_far = S[:, : 8 * (x.kv_block + 1) - first]
                    columns = slice(8 * x.kv_block - first, 8 * (x.kv_block + 1) - first)
                    np.testing.assert_allclose(x.S, S[:, columns], rtol=1e-12, atol=1e-14)
                    np.testing.assert_array_equal(x.m_before, m)
                    np.testing.assert_array_equal(x.l_before, l)
                    m, l = so_far.max(axis=1), np.exp(so_far - so_far.max(axis=1, keepdims=True)).sum(axis=1)
                    np.testing.assert_allclose(x.m_after, m, rtol=1e-12, atol=1e-14)
                    np.testing.assert_allclose(x.l_after, l, rtol=1e-12)
                    np.testing.assert_allclose(x.alpha, np.exp(x.m_before - m), rtol=1e-12)
                    np.testing.assert_allclose(x.P, np.exp(x.S - m[:, None]), rtol=1e-12)
                    weights = np.exp(so_far - m[:, None])
                    np.testing.assert_allclose(x.O, weights @ values[: so_far.shape[1]], rtol=1e-9)
                    m, l = x.m_after, x.l_after


# --- Lengths, pages, tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 63, 64, 65])
def test_lengths_around_tiles(length, page_size, schedule):
    case = make_case([length], page_size=page_size, dtype="float32")
    check(case, schedule=schedule, num_splits=3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ragged(page_size, schedule, fp8):
    """With default tiles as well, which pages of 3 do not divide."""
    lengths = [700, 0, 1, 255, 256, 257, 300, 13]
    case = make_case(lengths, page_size=page_size, fp8=fp8, dtype="bfloat16", seed=page_size)
    check(case, schedule=schedule, num_splits=5)
    check(case, schedule=schedule, config=None)


@pytest.mark.parametrize("tokens", range(1, 17))
def test_query_tokens(tokens):
    """Causal among themselves; the first ones of a short sequence see nothing."""
    case = make_case([0, 1, tokens - 1, tokens, tokens + 1, 40], tokens=tokens, dtype="float32", seed=tokens)
    for schedule in ("fixed", "balanced"):
        check(case, schedule=schedule, num_splits=4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 1), (16, 2), (32, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_grouped_heads(heads, kv_heads, tokens):
    case = make_case([20, 41], heads=heads, kv_heads=kv_heads, tokens=tokens)
    for schedule in ("fixed", "balanced"):
        check(case, schedule=schedule, num_splits=4)
        check(case, schedule=schedule, config=None)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_head_dims(head_dim, fp8):
    check(make_case([33, 70], head_dim=head_dim, fp8=fp8, page_size=16), num_splits=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_huge_logits(dtype):
    case = make_case([90, 33], dtype=dtype, spread=3000.0)
    check(case, num_splits=5)


def test_a_scale_of_zero_gives_the_mean():
    case = make_case([37], dtype="float32", scale=0.0)
    out, _ = decode(case, num_splits=3)
    mean = case.v_cache[0, :, :37].mean(axis=1)
    np.testing.assert_allclose(out[0, :, 0], np.repeat(mean, 2, axis=0), rtol=1e-5, atol=1e-6)


def test_values_that_a_token_does_not_see_play_no_part():
    """The last key is the last token's: inf or NaN there leaves the others alone."""
    for bad in (np.inf, np.nan):
        case = make_case([20], tokens=3, dtype="float32")
        clean, _ = decode(case, num_splits=2)
        case.k_cache[0, :, 19], case.v_cache[0, :, 19] = bad, bad
        out, _ = decode(case, num_splits=2)
        np.testing.assert_allclose(out[:, :, :2], clean[:, :, :2], rtol=1e-5, atol=1e-6)
        assert np.isnan(out[:, :, 2]).all()


# --- fp8 --------------------------------------------------------------------------------------------------


def test_every_number_of_e4m3():
    """One key a sequence: the result is its value, for all 254 numbers (NaN left out)."""
    bits = np.array([b for b in range(256) if b & NAN_BITS != NAN_BITS], np.uint8)
    case = make_case([1] * len(bits), heads=1, kv_heads=1, head_dim=8, fp8=True, dtype="float32")
    case.v_cache[:, 0, 0] = bits[:, None]
    case.options["v_scale"] = np.float32([0.375])
    out, _ = decode(case)
    np.testing.assert_array_equal(out[:, 0, 0, 0], bits.view(FLOAT8).astype(np.float32) * np.float32(0.375))


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_conversion_of_every_float16_and_e4m3(wide):
    """Bit for bit, subnormal numbers and the sign of zero included; with inf and NaN of both signs among them, of
    one, or of none."""
    halves, bytes_ = np.arange(1 << 16, dtype=np.uint16).view(np.float16), np.arange(256, dtype=np.uint8)
    for x, exact in ((halves, halves.astype(wide)), (bytes_, bytes_.view(FLOAT8).astype(wide))):
        finite, negative = np.isfinite(exact), np.signbit(exact)
        for chosen in (finite, finite | negative, finite | ~negative, np.full(exact.shape, True)):
            got = np.full(exact[chosen].shape, np.nan, wide)
            cpu_cache.widen(x[chosen], got)
            np.testing.assert_array_equal(got, exact[chosen])
            np.testing.assert_array_equal(np.signbit(got), np.signbit(exact[chosen]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_fp8_under_any_query(dtype):
    check(make_case([100, 3], fp8=True, dtype=dtype, tokens=2, page_size=16), num_splits=3)


# --- Anything ---------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150)
def test_anything(data):
    draw = data.draw
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (8, 2)]))
    new = draw(st.sampled_from([0, 0, 1, 3]))
    case = make_case(
        [n + new for n in draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))],
        heads=heads,
        kv_heads=kv_heads,
        tokens=draw(st.sampled_from([1, 1, 2, 5, 16])),
        head_dim=draw(st.sampled_from([8, 24])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"])),
        fp8=draw(st.booleans()),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        new=new,
        scale=draw(st.sampled_from([None, 0.0, 0.7])),
        seed=draw(st.integers(0, 99)),
    )
    config = TileConfig(draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 5, 8, 32])), num_warps=0)
    check(
        case,
        schedule=draw(st.sampled_from(["fixed", "balanced"])),
        num_splits=draw(st.sampled_from([None, 1, 2, 3, 7, 30])),
        config=config,
        num_threads=draw(st.sampled_from([1, 2])),
    )
