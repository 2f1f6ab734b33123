"""FA3's pipeline on a CPU: it continues from item to item, through rings that its warpgroups share.

Few persistent blocks, many items, any order of warps and copies: no deadlock, and results within the bound.
A deadlock is found in every mode of execution, a race in checked mode.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from fa3_support import SPEC, check, check_ragged, examples, execute_on_blocks, execute_ragged, half, unseen
from lengths_support import packed, padded
from sampling import of_today
from support import (
    assert_attention,
    forward_operands,
    make_inputs,
    make_problem,
    plan_with_blocks,
    stalling_lengths,
)

from cufa import masks
from cufa.calls.shapes import make_problem as shaped
from cufa.gpu.architectures import Device
from cufa.measure.ladder import ladder
from cufa.plan.planner import make_plan
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.options import Options
from cufa.run.emulate.calls import Execution, run_plan
from cufa.schedule.schedule import Schedule

CONFIGS = pytest.mark.parametrize(
    ("config", "head_dim"),
    [pytest.param(c, c.max_head_dim, id=f"{i}-d{c.max_head_dim}") for i, c in enumerate(SPEC.configs)],
)
BANDS = pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
MAKE = {"packed": packed, "padded": padded}


@pytest.mark.sampled(fixed=1, dated=1)
@BANDS
@CONFIGS
def test_lengths_that_stall_a_wrong_ping_pong(config, head_dim, mask):
    """On one block and two, whichever consumer's slot comes late."""
    lengths = stalling_lengths(config)
    for seqlen_q, seqlen_k in of_today(lengths, f"{config} {mask}", fixed=3, dated=2):
        n = lengths.index((seqlen_q, seqlen_k))
        inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, head_dim, seed=n)
        orders = [(1, "ascending"), (1, "descending"), (2, n)]
        check(inputs, mask, config, [(blocks, Execution("plain", order)) for blocks, order in orders])


@pytest.mark.sampled(fixed=4, dated=3, pairs=[("kind", "mode")])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["plain", "checked"])
@pytest.mark.parametrize("kind", ["full", "causal", "listed tiles"])
@CONFIGS
def test_random_persistent_grids(config, head_dim, kind, mode, seed):
    """Checked: shorter, and the next item reads nothing that the previous one left."""
    rng = random.Random(f"{config} {kind} {mode} {seed}")
    longest = (520, 700) if mode == "plain" else (2 * config.block_q + 70, 4 * config.block_kv)
    heads, *lengths = rng.randint(1, 4), *(rng.randint(1, n) for n in longest)
    listed = rng.choice(list(examples(*lengths).values()))
    mask = {"full": FULL, "causal": CAUSAL}.get(kind, listed)
    heads, kv_heads = (4, 2) if mask is listed else (heads, rng.choice([1, heads]))
    inputs = make_inputs(2, heads, kv_heads, *lengths, head_dim, "bfloat16", seed=seed)
    copies = rng.choice(["early", "late"])
    orders = ["ascending", "descending", seed] if mode == "plain" else ["descending", seed]
    check(inputs, mask, config, [(rng.randint(1, 3), Execution(mode, order, copies)) for order in orders])


@CONFIGS
def test_rows_that_see_nothing_between_rows_that_do(config, head_dim):
    """Far more queries than keys: several items in a row have no tile to visit, and the next has again."""
    inputs = make_inputs(1, 3, 3, 5 * config.block_q, config.block_kv + 3, head_dim)
    runs = [(blocks, Execution("checked", order)) for blocks, order in ((1, "ascending"), (2, 3))]
    check(inputs, CAUSAL, config, runs)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_step_of_the_ladder(head_dim):
    """Techniques switched off one by one: no deadlock, and results within the bound. (Of each head dim's first
    tiling; a GPU tests all of them.)"""
    config = next(c for c in SPEC.configs if c.fits(head_dim))
    steps = list(dict.fromkeys(rung.config for rung in ladder("fa3", config)[:-1]))
    lengths = [*stalling_lengths(config)[::3], (2 * config.block_q + 5, 3 * config.block_kv + 5)]
    for step in of_today(steps, f"ladder {head_dim}"):
        for n, (seqlen_q, seqlen_k) in enumerate(lengths):
            inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, head_dim, seed=n)
            orders = [(1, "descending"), (2, n), (99, "ascending")]
            check(inputs, CAUSAL, step, [(blocks, Execution("plain", order)) for blocks, order in orders])


@pytest.mark.parametrize("kind", MAKE)
@CONFIGS
def test_lengths_in_any_order(config, head_dim, kind):
    """Sequences of every length, on all configs, whichever warp runs next."""
    names = of_today(["empty ones", "one query", "equal", "whole tiles"], f"lists {config} {kind}", fixed=0)
    for lengths in names:
        for options in ("causal", "window, softcap"):
            case = MAKE[kind](lengths, options, head_dim, "float16")
            run = execute_ragged(case, Execution("checked", len(lengths)), config)
            assert not run.findings, "\n".join(map(str, run.findings))
            check_ragged(case, run)


@pytest.mark.parametrize(
    "mask", [half(640), masks.shared_question(100, (250, 290)), masks.prefix(50), masks.causal()], ids=str
)
def test_the_longest_query_blocks_are_begun_first(mask):
    """By one persistent block: as the order says, which is that of the tiles visited."""
    config = SPEC.configs[0]
    inputs = make_inputs(1, 4, 2, 640, 640, 64, "bfloat16")
    problem, given = make_problem(*inputs, mask=mask), forward_operands(*inputs)
    plan = plan_with_blocks(problem, config, 1)
    order = SPEC.order(problem, plan.schedule, dataclasses.replace(plan.device, num_sms=1), config)
    of_batches = plan.schedule.visits[order.q_block].reshape(
        -1, plan.schedule.num_q_blocks * plan.heads_per_head_batch
    )
    assert (np.diff(of_batches) <= 0).all()
    run = run_plan(plan, given, Execution("plain"))
    by_start = run.records[np.argsort(run.records["start_ns"], kind="stable")]
    np.testing.assert_array_equal(by_start["q_block"], order.q_block)
    np.testing.assert_array_equal(by_start["head"], order.head)
    assert_attention(run.out, run.lse, *inputs, mask=mask)


def test_an_order_is_given_only_where_the_host_knows_one_of_all_heads():
    mask, config = half(1200), SPEC.configs[0]
    problem = make_problem(*make_inputs(2, 4, 2, 1200, 1200, 64, "bfloat16"), mask=mask)
    order = plan_with_blocks(problem, config, 2).block_order
    visits = Schedule.of(problem, config.block_q, config.block_kv, True).visits
    assert (
        sorted(order.values.tolist()) == list(range(len(visits)))
        and (np.diff(visits[order.values]) <= 0).all()
    )
    values = np.repeat(mask.intervals.values, 2, axis=1)  # the same, said of each sequence
    for other in (masks.causal(), masks.evict(np.full(1200, 1200)), Columns(mask.band, Integers(values))):
        assert plan_with_blocks(dataclasses.replace(problem, mask=other), config, 2).block_order is None


@pytest.mark.parametrize(("rows", "blocks"), [(60, 1), (60, 3), (300, 1), (300, 2), (300, 40)])
def test_the_next_launch_begins_with_the_first_item(rows, blocks):
    """What says which item is the next is left as it was found, however many blocks ask."""
    q, k, v = make_inputs(1, 1, 1, rows, 200, 64, "float16")
    mask = masks.evict(np.full(200, rows // 2, np.int32))
    run = execute_on_blocks((q, k, v), mask, SPEC.configs[0], blocks, Execution("checked"), launches=2)
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_attention(run.out, run.lse, q, k, v, mask=mask)


def test_a_block_that_sees_no_tile_reads_none():
    """Its K and V are zeros that the copy engine makes up: what is in the keys reaches nothing."""
    inputs, mask = unseen(SPEC.configs[1])
    run = execute_on_blocks(inputs, mask, SPEC.configs[1], 1, Execution("checked"), trace=True)
    assert not run.findings
    assert not run.out.any() and np.isneginf(run.lse).all()
    assert not run.records["tiles_visited"].any()


@pytest.mark.parametrize("mask", [masks.evict(np.full(2048, 2048, np.int32)), masks.prefix(1)], ids=str)
def test_head_batches_are_those_of_a_band(mask):
    """Also where another launch comes first: heads one by one would leave thread blocks idle a fifth of the time."""
    shapes = [(2, 32, 2048, 128), (2, 8, 2048, 128), (2, 8, 2048, 128)]
    device = Device.typical("sm_90")
    found = [make_plan(shaped(shapes, "bfloat16", Options(x)), device) for x in (mask, Band(right=0))]
    assert {plan.spec for plan in found} == {SPEC}
    of_mask, of_band = (plan.heads_per_head_batch for plan in found)
    assert of_mask == of_band > 8
