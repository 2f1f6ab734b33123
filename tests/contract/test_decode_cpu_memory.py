"""Decoding in NumPy: caches that are appended to, any strides, threads, and the memory that it takes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import tracemalloc

import numpy as np
import pytest
from decode_cpu_support import PAGE_SIZES, SMALL, check, decode, planned
from decode_support import make_case

from cufa.run.cpu import decode as cpu_decode

# --- Appending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("new", [1, 2, 5, 20])
def test_appended_and_attended_to(new, page_size, fp8):
    case = make_case([new, 40, 64 + new, 15 + new], new=new, page_size=page_size, fp8=fp8, tokens=min(new, 3))
    for schedule in ("fixed", "balanced"):
        plan, operands = planned(case, schedule=schedule, num_splits=3)
        before = operands["k_cache"].copy(), operands["v_cache"].copy()
        cpu_decode.run(plan, operands)
        case.check(operands["out"], operands["lse"])
        for cache, was, added in zip(
            (operands["k_cache"], operands["v_cache"]),
            before,
            (operands["k_new"], operands["v_new"]),
            strict=True,
        ):
            written = np.zeros(cache.shape[:3:2], bool)  # (batch or pages, position)
            for b, n in enumerate(case.lengths):
                for i in range(new):
                    at = b, n - new + i
                    if page_size:
                        at = operands["block_table"][b, at[1] // page_size], at[1] % page_size
                    np.testing.assert_array_equal(cache[at[0], :, at[1]], added[b, :, i])
                    written[at] = True
            unwritten = ~written[:, None, :, None]
            np.testing.assert_array_equal(
                np.where(unwritten, cache.view(f"u{cache.itemsize}"), 0),
                np.where(unwritten, was.view(f"u{cache.itemsize}"), 0),
            )


def test_what_was_appended_is_read_back():
    """Token by token, as a decode loop does it, equals one call at the end."""
    case = make_case([30, 12], dtype="float32", capacity=30)
    cache = [np.full_like(x, np.nan) for x in (case.k_cache, case.v_cache)]
    plan, operands = planned(case)
    for step in range(30):
        lengths = np.array([step, min(step, 11)], np.int32)
        k, v = (np.stack([x[b, :, n : n + 1] for b, n in enumerate(lengths)]) for x in cached(case))
        grown = dataclasses.replace(plan.problem.cache, new_tokens=1)
        problem = dataclasses.replace(plan.problem, lengths=grown)
        now = {**operands, "k_cache": cache[0], "v_cache": cache[1], "cache_seqlens": lengths}
        now |= {"k_new": k, "v_new": v}
        cpu_decode.run(dataclasses.replace(plan, problem=problem), now)
    case.check(operands["out"], operands["lse"])


def cached(case):
    return case.k_cache, case.v_cache


# --- Memory layout ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("fp8", [False, True])
def test_layout_bshd(fp8, page_size):
    case = make_case([50, 33], tokens=2, page_size=page_size, fp8=fp8, new=3)
    plan, operands = planned(case, num_splits=3, layout="bshd")
    cpu_decode.run(plan, operands)
    case.check(operands["out"], operands["lse"])


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
