"""Decoding by NumPy, beyond what every backend promises (test_decode.py): the work that a schedule makes, what an
observer is told of each tile, conversion of bytes, any strides, threads, and the memory that it takes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import tracemalloc
import warnings

import numpy as np
import pytest
from decode_contract import SMALL
from decode_support import FLOAT8, NAN_BITS, make_case, prepare

from cufa.kernels.decode import row_blocks
from cufa.plan.decode import ragged_shares
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL
from cufa.run.cpu import cache as cpu_cache
from cufa.run.cpu import decode as cpu_decode
from cufa.schedule.decode import balanced_shares, split_range, used_splits


def planned(case, *, schedule="fixed", num_splits=None, config=SMALL, layout="bhsd"):
    """(plan, operands) with poisoned results; the caches are copies."""
    problem, operands = prepare(case, layout)
    return make_plan(problem, None, schedule, config, num_splits=num_splits), operands


def decode(case, *, num_threads=1, **how):
    """(out, lse) in "bhsd". A warning fails the test."""
    plan, operands = planned(case, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_decode.run(plan, operands, num_threads=num_threads)
    return operands["out"], operands["lse"]


def check(case, **how) -> None:
    case.check(*decode(case, **how))


# --- Work and tiles ---------------------------------------------------------------------------------------


def test_the_work_is_the_schedules():
    """Fixed: split_range of each sequence. Balanced: the spans. Whole heads may share a stack."""
    case = make_case([51, 0, 9, 1, 16], heads=6, kv_heads=6, capacity=60)

    def works(plan, lengths):
        return [
            (w.batch, h, w.first_key, w.last_key)
            for w in cpu_decode.works(plan, lengths)
            for h in range(w.heads.start, w.heads.stop)
        ]

    for num_splits in range(1, 40):
        plan, operands = planned(case, num_splits=num_splits)
        lengths = cpu_decode.valid_keys(plan, operands)
        assert lengths == [51, 0, 9, 1, 16]
        assert sorted(works(plan, lengths)) == sorted(
            (b, h, *split_range(n, num_splits, s, 8))
            for b, n in enumerate(lengths)
            for h in range(6)
            for s in range(used_splits(n, num_splits, 8))
        )
        plan, operands = planned(case, schedule="balanced", num_splits=num_splits)
        how = {"ragged": ragged_shares(plan), "min_shares": plan.split.least}
        spans = balanced_shares(lengths, 6, num_splits, 8, row_blocks(plan.problem, plan.config), **how)
        assert works(plan, lengths) == [(p.batch, p.kv_head, p.first_key, p.last_key) for p in spans]


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


# --- Values -----------------------------------------------------------------------------------------------


def test_values_that_a_token_does_not_see_play_no_part():
    """The last key is the last token's: inf or NaN there leaves the others alone."""
    for bad in (np.inf, np.nan):
        case = make_case([20], tokens=3, dtype="float32")
        clean, _ = decode(case, num_splits=2)
        case.k_cache[0, :, 19], case.v_cache[0, :, 19] = bad, bad
        out, _ = decode(case, num_splits=2)
        np.testing.assert_allclose(out[:, :, :2], clean[:, :, :2], rtol=1e-5, atol=1e-6)
        assert np.isnan(out[:, :, 2]).all()


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


# --- Memory -----------------------------------------------------------------------------------------------


def padded(x):
    around = np.zeros([n + 3 for n in x.shape], x.dtype)
    view = around[1:-2, 2:-1, 1:-2, 2:-1]
    view[...] = x
    return view


STRIDES = {
    "padded": padded,
    "reversed": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "tokens first": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "interleaved": lambda x: np.stack([x, x], axis=1)[:, 1],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_strides(dtype, page_size, strides):
    case = make_case([50, 33], tokens=2, dtype=dtype, page_size=page_size)
    expected = decode(case, num_splits=3)
    change = STRIDES[strides]
    case = dataclasses.replace(
        case, q=change(case.q), k_cache=change(case.k_cache), v_cache=change(case.v_cache)
    )
    plan, operands = planned(case, num_splits=3)
    operands["out"] = change(operands["out"])
    operands["lse"] = change(operands["lse"][..., None])[..., 0]
    operands |= {"k_cache": case.k_cache, "v_cache": case.v_cache}  # as they lie, not their copies
    cpu_decode.run(plan, operands)
    np.testing.assert_allclose(operands["out"], expected[0], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(operands["lse"], expected[1], rtol=1e-6)


def test_one_cache_for_all_by_broadcasting():
    case = make_case([20, 20], dtype="float32")
    for name in ("k_cache", "v_cache"):
        setattr(case, name, np.broadcast_to(getattr(case, name)[:1], getattr(case, name).shape))
    check(case, num_splits=2)


def test_shared_pages():
    """Two sequences with a common prefix point to the same pages."""
    case = make_case([32, 20], page_size=8)
    case.options["block_table"][1, :2] = case.options["block_table"][0, :2]
    check(case, num_splits=2)


# --- Threads, memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("config", [SMALL, None])
def test_bit_identical_whatever_the_threads(schedule, config):
    case = make_case([700, 0, 33, 256], heads=8, kv_heads=4, tokens=2, page_size=16)
    expected = decode(case, schedule=schedule, config=config, num_splits=7)
    for num_threads in (1, 2, 3, 8, None):
        for got, want in zip(
            decode(case, schedule=schedule, config=config, num_splits=7, num_threads=num_threads),
            expected,
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)


def test_splits_run_side_by_side(monkeypatch):
    """Two threads meet inside; with one at a time the barrier would break."""
    meeting, attend = threading.Barrier(2, timeout=300), cpu_decode._attend

    def attend_in_company(*arguments):
        meeting.wait()
        return attend(*arguments)

    monkeypatch.setattr(cpu_decode, "_attend", attend_in_company)
    decode(make_case([32], kv_heads=1), num_splits=2, num_threads=2)


def test_calls_from_several_threads():
    case = make_case([700, 33], heads=8, kv_heads=4)
    expected, _ = decode(case, num_splits=3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out, _ in pool.map(lambda _: decode(case, num_splits=3, num_threads=2), range(8)):
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "fp8"])
def test_the_cache_is_never_copied_whole(kind, page_size):
    """Extra memory stays at a few tiles while the cache grows."""
    dtype, fp8 = ("float16", True) if kind == "fp8" else (kind, False)
    case = make_case([16384], head_dim=64, dtype=dtype, fp8=fp8, page_size=page_size)
    plan, operands = planned(case, config=None)
    operands["lse"] = None
    assert plan.config.block_kv * 16 < 16384
    cpu_decode.run(plan, operands, num_threads=1)  # tables of conversion are made once
    tracemalloc.start()
    try:
        cpu_decode.run(plan, operands, num_threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tile = 2 * plan.config.block_kv * 64 * 4  # of both heads in float32; lookups hold 8-byte indices of one
    assert peak < 8 * tile
    assert peak < operands["k_cache"].size  # a quarter of the bytes of all keys in float32
