"""The contract of ``invariant=True``: the bits of a result depend on its sequence alone. A sequence is decoded by
itself, then among others, in pages, in a larger cache, with any number of splits, and (on a GPU and by executed
kernels) as one of several tokens."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from backends import CPU, backends
from decode_contract import SMALL, check
from decode_kernel_support import cache_of, served
from decode_support import Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa.kernels import kernels_of
from cufa.schedule.decode import chunk_of, chunk_ranges, chunk_start, most_chunks, num_tiles

ROOM = 700


def case_of(lengths, tokens=1, heads=4, dtype="bfloat16", head_dim=64, **changes) -> Case:
    made = make_case(
        lengths, tokens=tokens, heads=heads, dtype=dtype, head_dim=head_dim, capacity=ROOM, **changes
    )
    return dataclasses.replace(made, options={**made.options, "invariant": True})


def member(case: Case, b: int) -> Case:
    """Sequence ``b`` alone, with the last of its query tokens, in a contiguous cache of its own length."""
    caches = [np.ascontiguousarray(case.sequence(b, name)).astype(case.q.dtype) for name in "kv"]
    kept = ("window", "mask", "softcap", "scale", "invariant")
    options = {name: x for name, x in case.options.items() if name in kept}
    options["cache_seqlens"] = np.array(case.lengths[b : b + 1], np.int32)
    q = np.ascontiguousarray(case.q[b : b + 1, :, -1:])
    return Case(q, *caches, options, case.lengths[b : b + 1])


def in_order(case: Case, order: list[int]) -> Case:
    """The sequences in other places of the batch."""
    paged = "block_table" in case.options
    names = (
        ["cache_seqlens", "block_table"] if paged else ["cache_seqlens", *["k_scale", "v_scale"] * case.fine]
    )
    options = {**case.options, **{name: case.options[name][order] for name in names}}
    caches = [x if paged else x[order] for x in (case.k_cache, case.v_cache)]
    q = np.ascontiguousarray(case.q[order])
    return Case(q, *caches, options, [case.lengths[b] for b in order])


def assert_same_bits(backend, case, kernel, others, **how):
    """Each sequence of ``case`` by itself, by each of ``others``, gives the bits that the batch gave."""
    done = check(backend, case, kernel, trace=False, **how)
    for b in range(len(case.lengths)):
        for other in others:
            alone = check(backend, member(case, b), other, trace=False, **how)
            for got, want in ((alone.out, done.out), (alone.lse, done.lse)):
                np.testing.assert_array_equal(got[0], want[b][:, -1:])


@pytest.mark.parametrize("window", [None, (300, 0)])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_on_a_cpu(page_size, window):
    case = case_of([700, 1, 256, 257, 513], page_size=page_size, dtype="float32", window=window)
    assert_same_bits(CPU, case, "decode_split", ["decode_split"])
    for num_splits in (1, 7):
        again, first = (check(CPU, case, "decode_split", n, config=SMALL) for n in (num_splits, None))
        np.testing.assert_array_equal(again.out, first.out)


#: Kernels, and what their caches are: pages of whole boxes, odd pages, 64 rows, e4m3.
EXECUTED = {
    "pages of the copy engine": ("decode_split_tma", {"page_size": 16}),
    "odd pages": ("decode_split", {"page_size": 3, "window": (300, 0)}),
    "several tokens of many heads": ("decode_split_tma", {"tokens": 5, "heads": 16, "spread": 9.0}),
    "appended": ("decode_split_tma", {"tokens": 2, "new": 2}),
}


@pytest.mark.parametrize("what", EXECUTED)
@backends("emulate")
def test_executed_kernels(backend, what):
    """Alone in a contiguous cache, by both ways of copying."""
    kernel, made = EXECUTED[what]
    case = case_of([257, 600] if made.get("new") else [257, 600, 1], **made)
    assert_same_bits(backend, case, kernel, ["decode_split", "decode_split_tma"])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", [x for x in kernels_of("decode") if "split" in x])
@backends("gpu")
def test_every_kernel(backend, kernel, head_dim):
    served(backend.device, kernel, head_dim)
    for made in ({}, {"page_size": 16, "tokens": 4, "heads": 16}, {"page_size": 64, "window": (300, 0)}):
        case = case_of([700, 257, 1, 513], head_dim=head_dim, fp8=cache_of(kernel), **made)
        first = check(backend, case, kernel, trace=False)
        moved = check(backend, in_order(case, order := [2, 0, 3, 1]), kernel, trace=False)
        np.testing.assert_array_equal(moved.out, first.out[order])
        if not cache_of(kernel):
            assert_same_bits(backend, case, kernel, ["decode_split"])


@backends("gpu")
def test_random_batches_around_one_sequence(backend):
    """1,000 random batches around one sequence, in pages: bitwise equal."""
    import cupy as cp

    rng, length, pages = np.random.default_rng(0), 2300, 512
    cache = [cp.asarray(rng.standard_normal((pages, 8, 16, 128)), cp.float16) for _ in "kv"]
    own = rng.permutation(pages)[:144].astype(np.int32)
    q, first = cp.asarray(rng.standard_normal((1, 32, 1, 128)), cp.float16), None
    for _ in range(1000):
        batch = int(rng.integers(1, 24))
        at = int(rng.integers(batch))
        lengths, table = (
            rng.integers(0, 2304, batch).astype(np.int32),
            rng.integers(0, pages, (batch, 144)).astype(np.int32),
        )
        lengths[at], table[at] = length, own
        queries = cp.asarray(rng.standard_normal((batch, 32, 1, 128)), cp.float16)
        queries[at] = q[0]
        splits = int(rng.integers(1, 9)) if rng.integers(2) else None
        given = {"cache_seqlens": cp.asarray(lengths), "block_table": cp.asarray(table), "num_splits": splits}
        out = cufa.flash_decode(queries, *cache, **given, invariant=True)[at].get()
        first = out if first is None else first
        np.testing.assert_array_equal(out, first)


@given(
    length=st.integers(0, 300_000),
    window=st.one_of(st.none(), st.integers(1, 5000)),
    block=st.sampled_from([8, 64, 256]),
)
@settings(max_examples=200, deadline=None)
def test_chunks_are_cut_at_fixed_keys(length, window, block):
    """Chunks join; inner borders are those of every other length; planned splits suffice."""
    ranges = chunk_ranges(length, block, window)
    assert ranges[-1][1] == length and len(ranges) <= most_chunks(length, block, window)
    assert ranges[0][0] == (0 if window is None else max(length - window, 0))
    for (_, last), (first, _) in itertools.pairwise(ranges):
        assert first == last == chunk_start(chunk_of(first))
    assert num_tiles(length, block, window) >= len(ranges)


def test_the_plan_names_the_chunks():
    plan = cufa.plan_decode((64, 32, 1, 128), (64, 8, 8192, 128), device="sm_90", invariant=True)
    assert (
        plan.num_splits == 20
        and "20 chunks of each sequence" in str(plan)
        and "invariant" in str(plan.problem)
    )
