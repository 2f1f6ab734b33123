"""Decoding where a window does not hide the first keys (streaming), or all tokens see them (prefix), in the kernels,
executed on a CPU in checked mode: right against float64 while every key that no token sees is NaN, spans as scheduled,
and nothing read of the tiles between."""

from __future__ import annotations

import numpy as np
import pytest
from decode_kernel_support import assert_spans, configs, operands_of, plan_of, splits
from decode_scores_support import assert_right, hidden, numbers_of_heads
from decode_support import make_case

import cufa
from cufa import masks
from cufa.problem.problem import Kept
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution
from cufa.schedule.decode import most_tiles, num_tiles, split_range, tiles_to_read, used_splits

#: One build of each branch; all numbers share it.
CASES = {
    # Pages of whole boxes, several tokens of which some are appended.
    "decode_split_tma": {"lengths": [3, 150, 700], "tokens": 3, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages; more appended than is seen; a head dim with half a k16 step.
    "decode_balanced": {"lengths": [40, 333, 600], "new": 40, "head_dim": 72, "page_size": 3},
    # 64 rows: warps share keys; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 700], "heads": 40, "kv_heads": 1, "head_dim": 64},
    "decode_split_fp8": {"lengths": [150, 2, 500], "head_dim": 80, "fp8": True, "tokens": 4},
}  # fmt: skip
MASKS = (
    masks.streaming(4, 60),
    masks.streaming(130, 20),
    masks.streaming(10_000, 3),
    masks.streaming(0, 100),
    masks.prefix(200),
)


def run(case, kernel, num_splits, config=None, mode="checked"):
    mask = case.options["mask"]
    given = hidden(case, mask)
    plan = plan_of(given, kernel, num_splits, config, mask=mask, softcap=case.options.get("softcap"))
    operands = operands_of(given)
    done = run_plan(plan, operands, Execution(mode), trace=mode == "checked")
    assert not done.findings, "\n".join(map(str, done.findings))
    assert_right(case, operands["out"], operands["lse"])
    if mode == "checked":
        assert_spans(plan, case.lengths, done.records)
    return done


@pytest.mark.parametrize("kernel", CASES)
def test_kernel(kernel):
    made = CASES[kernel]
    softcap = 2.0 if kernel == "decode_balanced" else None
    parts = 0
    for mask, num_splits in zip(MASKS, (3, 7, 2, 1, 4), strict=True):
        done = run(make_case(**made, mask=mask, softcap=softcap), kernel, splits(kernel, num_splits))
        parts = max(parts, int(done.records["q_block"].max()) + 1)
    assert parts > 1, "nothing was merged"


@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_split"])
def test_with_alibi_and_a_sink(kernel):
    """And sequences that fill the cache, whose splits the host counts."""
    few = numbers_of_heads("both", 2, 4)
    for mask in MASKS[:2]:
        case = make_case([500, 500], capacity=500, head_dim=64, mask=mask, **few)
        case.options["cache_seqlens"] = None
        run(case, kernel, 2)
    config = configs("decode_split_tma", 64)[0].merged_in_cluster()
    run(
        make_case([700, 3], tokens=2, head_dim=64, mask=masks.streaming(300, 200), **few),
        "decode_split_tma",
        4,
        config,
    )


def test_what_lies_between_is_not_read():
    """Whole tiles of it: of 2,000 keys those of three tiles."""
    mask = masks.streaming(4, 99)
    case = make_case([2048], heads=8, kv_heads=1, head_dim=64, capacity=2048, mask=mask)
    done = run(case, "decode_split_tma", 1, mode="counted")
    read = int(done.counters["decode_split"]["global_read_bytes"].sum())
    threads = done.plan.launches[0].num_threads
    tiles = num_tiles(2048, done.plan.config.block_kv, Kept(100, 4))
    assert tiles * done.plan.config.block_kv <= 128 + 128
    assert read - case.q.nbytes - 4 * threads == 2 * 64 * 2 * tiles * done.plan.config.block_kv


def test_tiles_are_those_of_both_ends():
    for length in range(0, 90, 3):
        for window in (None, 1, 8, 9, 33):
            for keys in (0, 1, 8, 17, 100):
                reach = Kept(window, keys)
                first, count = tiles_to_read(length, 8, reach)
                places = [t for t in range(max(1, -(-length // 8)))
                          if t * 8 < keys or window is None or (t + 1) * 8 > max(length - window, 0)]  # fmt: skip
                assert (first, count) == (0, len(places)) and count <= most_tiles(90, 8, reach)
                for num_splits in (1, 2, 5):
                    ranges = [split_range(length, num_splits, i, 8, reach) for i in range(num_splits)]
                    used = used_splits(length, num_splits, 8, reach)
                    assert sum(-(-(b - a) // 8) for a, b in ranges[:used]) == (count if length else 0)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (masks.streaming(np.array([3, 5]), 9), "one number of first keys for all sequences"),
        (masks.prefix(np.array([3, 5])), "one number of first keys for all sequences"),
        (masks.chunks(64), "serves band masks"),
    ],
)
def test_what_kernels_do_not_serve(mask, why):
    with pytest.raises(ValueError, match=why):
        cufa.plan_decode((2, 4, 1, 64), (2, 2, 300, 64), mask=mask, device="sm_90")
    assert "CPU" in str(cufa.plan_decode((2, 4, 1, 64), (2, 2, 300, 64), mask=mask, device="cpu"))
