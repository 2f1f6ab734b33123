"""Windows and softcap in the decode kernels, executed on a CPU in checked mode: right against brute force in
float64 while every key that no token sees is NaN, in pages that the block table no longer names; spans as
scheduled. The CPU path is held to the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from decode_kernel_support import (
    H200,
    assert_spans,
    configs,
    operands_of,
    plan_of,
    problem_of,
    splits,
)
from decode_support import NAN_BITS, Case, make_case
from support import EPSILON

from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Cached
from cufa.problem.mask import Band
from cufa.problem.problem import Problem
from cufa.run.cpu import decode as cpu_decode
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution
from cufa.schedule.decode import (  # fmt: skip
    most_tiles,
    num_tiles,
    read_range,
    split_range,
    tiles_to_read,
    used_splits,
)

LEFTS = (0, 1, 15, 16, 100)
WILD_PAGE = -7


def expected(case: Case, left: int, softcap: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Token t of T sees keys n - T + t - left … n - T + t of n."""
    _, heads, tokens, head_dim = case.q.shape
    out, lse = np.zeros(case.q.shape), np.full(case.q.shape[:3], -np.inf)
    for b, n in enumerate(case.lengths):
        k, v = (case.sequence(b, name)[0].astype(np.float64) for name in ("k", "v"))
        for h in range(heads):
            for t in range(tokens):
                own = n - tokens + t
                seen = slice(max(own - left, 0), max(own + 1, 0))
                s = k[h * len(k) // heads, seen] @ case.q[b, h, t].astype(np.float64) / np.sqrt(head_dim)
                s = s if softcap is None else softcap * np.tanh(s / softcap)
                if s.size:
                    p = np.exp(s - s.max())
                    out[b, h, t] = p @ v[h * len(v) // heads, seen] / p.sum()
                    lse[b, h, t] = s.max() + np.log(p.sum())
    return out, lse


def check(case: Case, answer: tuple[np.ndarray, np.ndarray], out: np.ndarray, lse: np.ndarray) -> None:
    """P and O are rounded to the dtype, once each."""
    values = max((np.abs(case.sequence(b, "v")).max(initial=0) for b in range(len(case.lengths))), default=0)
    bound = 1.5 * EPSILON[str(case.q.dtype)] * float(values) + 1e-6
    np.testing.assert_allclose(out.astype(np.float64), answer[0], rtol=0, atol=bound)
    np.testing.assert_allclose(lse, answer[1], rtol=2.0**-18, atol=2.0**-14)


def hide(case: Case, left: int) -> Case:
    """The call with NaN in place of the cached keys that no token sees; pages of nothing else are given back."""
    caches, table = [case.k_cache.copy(), case.v_cache.copy()], case.options.get("block_table")
    options, size = dict(case.options), case.k_cache.shape[2]
    if table is not None:
        table = options["block_table"] = table.copy()
    for b, n in enumerate(case.lengths):
        unseen = max(n - case.q.shape[2] - left, 0)
        for cache in caches:
            poison = NAN_BITS if cache.dtype == np.uint8 else np.nan
            if table is None:
                cache[b, :, :unseen] = poison
            else:
                for position in range(unseen):
                    cache[table[b, position // size], :, position % size] = poison
        if table is not None:
            reach = problem_of(case, Band(left, 0)).reach
            table[b, : read_range(n, reach)[0] // size] = WILD_PAGE
    return Case(case.q, *caches, options, case.lengths)


def run(case, kernel, left, num_splits, softcap=None, config=None, full=False, mode="checked", **options):
    """``full``: sequences fill the cache, and no lengths are given."""
    answer, hidden = expected(case, left, softcap), hide(case, left)
    if full:
        hidden.options["cache_seqlens"] = None
    plan = plan_of(hidden, kernel, splits(kernel, num_splits), config, mask=Band(left, 0), softcap=softcap)
    assert plan.problem.mask_kind == "band"
    operands = operands_of(hidden)
    done = run_plan(plan, operands, Execution(mode, **options), trace=mode == "checked")
    assert not done.findings, "\n".join(map(str, done.findings))
    check(case, answer, operands["out"], operands["lse"])
    if mode == "checked":
        assert_spans(plan, case.lengths, done.records)
        for record in done.records:
            length = case.lengths[record["batch"]]
            first, count = tiles_to_read(length, plan.config.block_kv, plan.problem.reach)
            assert first <= record["first_tile"]
            assert record["first_tile"] + record["tiles_visited"] <= first + count
    return done, operands


#: One build of each branch; all windows share it.
CASES = {
    # Pages of whole boxes, several tokens of which some are appended.
    "decode_split_tma": {"lengths": [2, 9, 150, 333], "tokens": 4, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages; more appended than is seen; a head dim with half a k16 step.
    "decode_balanced": {"lengths": [40, 333, 41, 150], "new": 40, "head_dim": 72, "page_size": 3},
    # 64 rows: warps share keys; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 1, 333], "heads": 40, "kv_heads": 1, "head_dim": 64},
    # Several blocks of rows, of which one stores what is appended.
    "decode_split": {
        "lengths": [20, 150, 333], "tokens": 4, "new": 20, "heads": 40, "kv_heads": 1, "head_dim": 64
    },
    "decode_split_tma_fp8": {
        "lengths": [0, 1, 150, 333], "tokens": 4, "head_dim": 128, "fp8": True, "dtype": "bfloat16"
    },
    "decode_split_fp8": {"lengths": [150, 2, 333], "head_dim": 80, "fp8": True, "new": 1, "page_size": 16},
}  # fmt: skip
SOFTCAPPED = ("decode_balanced", "decode_split_tma_fp8")


@pytest.mark.parametrize("kernel", CASES)
def test_kernel(kernel):
    case, softcap = make_case(**CASES[kernel]), 1.5 if kernel in SOFTCAPPED else None
    parts = 0
    for left, num_splits in zip(LEFTS, (2, 3, 1, 7, 4), strict=True):
        done, _ = run(case, kernel, left, num_splits, softcap)
        parts = max(parts, int(done.records["q_block"].max()) + 1)
    assert parts > 1, "nothing was merged"


@pytest.mark.parametrize("full", [False, True])
def test_splits_merged_in_a_cluster(full):
    """Softcapped; and with sequences that fill the cache, whose splits the host counts."""
    case = make_case([420] if full else [420, 0, 3, 260], head_dim=64, capacity=420 if full else None)
    config = configs("decode_split_tma", 64)[1].merged_in_cluster()
    for left, num_splits in ((0, 2), (63, 2), (64, 3), (100, 2), (300, 4)):
        for order in ("ascending", 1):
            run(case, "decode_split_tma", left, num_splits, 0.7, config, full, schedule=order)


def test_a_window_reads_what_it_sees():
    """In groups of 16 keys, and nothing of what lies before."""
    case = make_case([500], heads=8, kv_heads=1, head_dim=64, capacity=500)
    for left, keys in ((0, 4), (99, 100), (300, 308)):
        done, _ = run(case, "decode_split_tma", left, 1, mode="counted")
        read = int(done.counters["decode_split"]["global_read_bytes"].sum())
        threads = done.plan.launches[0].num_threads  # each reads its sequence's length
        assert read - case.q.nbytes - 4 * threads == 2 * 64 * 2 * keys


@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_split"])
def test_all_new_tokens_are_stored(kernel):
    """Those that no token sees too."""
    case = make_case([70, 41, 150], tokens=2, new=40, head_dim=64, page_size=16)
    _, operands = run(case, kernel, 3, 2)
    for b, n in enumerate(case.lengths):
        for i in range(40):
            page = operands["block_table"][b, (n - 40 + i) // 16]
            for x in ("k", "v"):
                stored = operands[f"{x}_cache"][page, :, (n - 40 + i) % 16]
                np.testing.assert_array_equal(stored, case.options[f"{x}_new"][b, :, i])


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_cpu_path(schedule, page_size):
    small = TileConfig(block_q=4, block_kv=8, num_warps=0)
    case = make_case([5, 101, 64, 7], tokens=4, new=5, page_size=page_size)
    for left in LEFTS[:-1]:
        for num_splits, softcap in ((1, None), (3, 2.0), (12, None)):
            problem = problem_of(case, Band(left, 0), softcap)
            plan = make_plan(problem, None, schedule, small, num_splits=num_splits)
            operands = operands_of(hide(case, left))
            cpu_decode.run(plan, operands, num_threads=1)
            check(case, expected(case, left, softcap), operands["out"], operands["lse"])


def test_splits_cover_what_is_read():
    for length in range(70):
        for reach in (1, 2, 8, 9, 16, 33):
            first, count = tiles_to_read(length, 8, reach)
            assert count == num_tiles(length, 8, reach) <= most_tiles(69, 8, reach)
            for num_splits in (1, 2, 3, 9):
                ranges = [split_range(length, num_splits, i, 8, reach) for i in range(num_splits)]
                used = used_splits(length, num_splits, 8, reach)
                keys = [k for r in ranges[:used] for k in range(*r)]
                assert keys == list(range(*read_range(length, reach)))
                assert all(a == b for a, b in ranges[used:])
                assert first * 8 <= keys[0] if keys else length == 0


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize(("batch", "ragged"), [(1, False), (4, False), (64, False), (1, True)])
def test_a_window_is_planned_like_a_cache_as_long(batch, kv_heads, ragged):
    """1024 keys of 128k. Where lengths differ, a window may begin and end in the midst of a tile: one more."""
    short = Problem(
        batch, 32, kv_heads, 1, 1 << 10, 128, "bfloat16", lengths=Cached(given=ragged), operation="decode"
    )  # fmt: skip
    window = dataclasses.replace(short, seqlen_k=1 << 17, mask=Band(1023, 0))
    plan, of_short = make_plan(window, H200), make_plan(short, H200)
    assert plan.spec == of_short.spec and plan.config == of_short.config
    assert window.kv_bytes() == short.kv_bytes() == window.kv_bytes([10**5] * batch)
    if not ragged:
        assert plan.split == of_short.split


def test_a_window_as_long_as_the_cache_is_none():
    short = Problem(1, 8, 8, 1, 1024, 64, "float16", lengths=Cached(), operation="decode")
    for left, tokens, kind in ((1023, 1, "full"), (1023, 2, "causal"), (1022, 1, "band")):
        assert dataclasses.replace(short, mask=Band(left, 0), seqlen_q=tokens).mask_kind == kind
