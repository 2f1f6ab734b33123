"""Decode kernels executed on a CPU in checked mode: right against float64 with unused memory poisoned, no
findings, spans as scheduled, the same bits in every order. Every config and dtype is for the GPU's tests;
here is one build of each branch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from decode_kernel_support import assert_spans, configs, operands_of, plan_of, splits
from decode_support import make_case

from cufa.kernels.decode import TWO_STAGES, items
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution

CASES = {
    # Pages of whole boxes, appended tokens, several query tokens; many splits.
    "decode_split_tma": {"lengths": [150, 3, 200], "tokens": 3, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages, a head dim with half a k16 step, merged in the same launch.
    "decode_balanced": {"lengths": [150, 1, 260], "tokens": 2, "new": 1, "head_dim": 72, "page_size": 3},
    # 64 rows: warps share keys; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 90], "heads": 40, "kv_heads": 1, "head_dim": 64},
    "decode_split_tma_fp8": {"lengths": [150, 1, 200], "head_dim": 128, "fp8": True, "dtype": "bfloat16"},
    "decode_split_fp8": {"lengths": [150, 2], "head_dim": 80, "fp8": True, "new": 1, "page_size": 16},
}


def run(case, kernel, num_splits, mode="checked", launches=1, config=None, merges=False, **options):
    """``merges``: some item has several parts, or the case would not show how they are merged."""
    plan, operands = plan_of(case, kernel, num_splits, config), operands_of(case)
    done = run_plan(plan, operands, Execution(mode, **options), trace=True, launches=launches)
    assert not done.findings, "\n".join(map(str, done.findings))
    case.check(operands["out"], operands["lse"])
    assert_spans(plan, case.lengths, done.records)
    assert not merges or len(done.records) > items(plan.problem, plan.config)
    return plan, operands


@pytest.mark.parametrize("kernel", CASES)
def test_kernel(kernel):
    """Whatever the number of splits; the workspace serves two launches in a row."""
    case = make_case(**CASES[kernel])
    for num_splits in (1, 2, 3, 7):
        launches = 1 + (num_splits == 2)
        run(case, kernel, splits(kernel, num_splits), launches=launches, merges=num_splits > 2)


@pytest.mark.parametrize("kernel", ["decode_split_tma", "decode_balanced"])
def test_same_bits_in_every_order(kernel):
    case = make_case(**CASES[kernel])
    number = splits(kernel, 4)
    _, first = run(case, kernel, number, merges=True, copies="early", threads=1)
    for order in ("descending", 1, 2):
        _, again = run(case, kernel, number, schedule=order, copies="late", threads=2)
        np.testing.assert_array_equal(again["out"].view(np.uint8), first["out"].view(np.uint8))
        np.testing.assert_array_equal(again["lse"], first["lse"])
        np.testing.assert_array_equal(again["k_cache"].view(np.uint8), first["k_cache"].view(np.uint8))


@pytest.mark.parametrize("kernel", ["decode_balanced_tma", "decode_balanced"])
def test_shares_that_end_one_item_and_begin_another(kernel):
    """Merged by a launch of its own, when all parts have been left where they are kept."""
    case = make_case([150, 260, 90, 200], head_dim=64)
    config = dataclasses.replace(configs(kernel, 64)[0], fold_combine=False)
    for number in (3, 5, 7):
        run(case, kernel, splits(kernel, number), config=config, merges=True)


@pytest.mark.parametrize("wild", [-7, 10**6])
def test_a_wild_entry_of_the_block_table_stays_within_the_cache(wild):
    case = make_case([200, 100], head_dim=64, page_size=16)
    operands = operands_of(case)
    operands["block_table"] = operands["block_table"].copy()
    operands["block_table"][0, 3] = wild
    done = run_plan(plan_of(case, "decode_split", 2), operands, Execution("checked"), trace=False)
    assert not done.findings, "\n".join(map(str, done.findings))
    assert not np.isnan(operands["lse"][1]).any()


@pytest.mark.parametrize("name", ["decode_split_tma", "decode_split_tma_fp8"])
def test_splits_merged_in_a_cluster(name):
    """Whatever the number of blocks and of splits without keys; the same bits in every order."""
    case, kernel = make_case(**{**CASES[name], "lengths": [900, 3, 200]}), name
    config = configs(kernel, case.q.shape[3])[0].merged_in_cluster()
    for num_splits in (1, 2, 3, 8):
        plan, first = run(case, kernel, num_splits, config=config, copies="early")
        assert [launch.cluster for launch in plan.launches] == [num_splits]
        for order in ("descending", 1, 2) if num_splits == 8 else (3,):
            _, again = run(case, kernel, num_splits, config=config, schedule=order, copies="late", threads=1)
            np.testing.assert_array_equal(again["out"].view(np.uint8), first["out"].view(np.uint8))
            np.testing.assert_array_equal(again["lse"], first["lse"])


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        ("decode_split_tma", TWO_STAGES),
        ("decode_split_tma", TWO_STAGES.merged_in_cluster()),
        ("decode_balanced_tma", TWO_STAGES),
    ],
    ids=["splits", "splits in a cluster", "shares"],
)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_rings_of_two_stages(kernel, config, head_dim):
    """As an H100 has them: each buffer is filled again and again, and one item follows another."""
    case = make_case([900, 3, 200], head_dim=head_dim, dtype="bfloat16")
    for number in (1, 2):
        run(case, kernel, splits(kernel, number), config=config, copies="late")


def test_appended_tokens_are_stored():
    case = make_case(**CASES["decode_split_tma"])
    _, operands = run(case, "decode_split_tma", 2)
    table, new = case.options["block_table"], case.options["k_new"]
    for b, n in enumerate(case.lengths):
        for i in range(2):
            position = n - 2 + i
            stored = operands["k_cache"][table[b, position // 16], :, position % 16]
            np.testing.assert_array_equal(stored, new[b, :, i])


def test_lengths_beyond_the_cache_are_taken_as_its_capacity():
    case = make_case([200, 100], head_dim=64, page_size=16, capacity=208)
    case.options["cache_seqlens"][0] = 10**6
    operands = operands_of(case)
    done = run_plan(plan_of(case, "decode_split_tma", 2), operands, Execution("checked"))
    # Of the 13 pages that 208 tokens take, the last may be a wild number: what is read then is some page.
    assert not done.findings and not np.isnan(operands["lse"][1]).any()


def test_counters():
    """Bytes follow from the keys: each is read once, whatever the group. Rows of 128 bytes: no bank
    conflicts."""
    case = make_case([512], heads=8, kv_heads=1, head_dim=64, capacity=512)
    plan, operands = plan_of(case, "decode_split_tma", 1), operands_of(case)
    done = run_plan(plan, operands, Execution("counted"), trace=False)
    read = int(done.counters["decode_split"]["global_read_bytes"].sum())
    lengths = 4 * plan.launches[0].num_threads  # every thread reads its sequence's
    assert read == plan.problem.kv_bytes([512]) + case.q.nbytes + lengths
    conflicts = int(done.counters["decode_split"]["bank_conflicts"].sum())
    assert conflicts == 0
