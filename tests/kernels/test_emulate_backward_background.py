"""Hopper's backward where thread blocks do the passes before and after beside their tiles: gradients, and the strips
that are left to the launches before and after."""

from __future__ import annotations

import dataclasses

import pytest
from backward_support import NAMES, assert_gradients, make_case
from planted_runs import small_batches

from cufa import plan_backward
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import emulate_backward
from cufa.schedule import key_order

#: Linked items, dQ added from registers: tiles of 128 rows and of 64. Not linked: dQ added by the copy engine.
LONG, SHORT, STAGED = (x for x in KERNELS["fa3_backward"].configs if x.persistent)


@pytest.fixture
def few_heads_a_batch():
    with small_batches():
        yield


def run(head_dim=64, batch=1, dtype="bfloat16", mask=CAUSAL, **how):
    case = make_case(batch, 6, 3, 140, 150, head_dim, dtype, mask=mask, dlse=True, seed=head_dim)
    config = next(x for x in (LONG, SHORT, STAGED) if x.fits(head_dim))
    options = {"mode": "checked", "trace": False, "config": config, **how}
    return case, emulate_backward(*case.arrays, algorithm="fa3", **case.options, **options)


@pytest.mark.usefixtures("few_heads_a_batch")
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(30, 10)], ids=str)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (72, "float16"), (128, "bfloat16")])
@pytest.mark.sampled(fixed=2, dated=1)
def test_gradients(head_dim, dtype, mask):
    case, found = run(head_dim, 2, dtype, mask)
    assert found.findings == ()
    assert_gradients([found.results[name] for name in NAMES], case)


@pytest.mark.usefixtures("few_heads_a_batch")
@pytest.mark.parametrize("schedule", ["descending", 7])
def test_in_any_order_of_warps_and_copies(schedule):
    case, found = run(schedule=schedule, copies="late")
    assert found.findings == ()
    assert_gradients([found.results[name] for name in NAMES], case)


@pytest.mark.usefixtures("few_heads_a_batch")
@pytest.mark.parametrize("lead", [1, 2])
def test_head_batches_of_two_heads(monkeypatch, lead):
    monkeypatch.setattr(key_order, "_BATCH_ITEMS", 4)
    monkeypatch.setattr(key_order, "_UNEVEN_LEAD", lead)
    case, found = run(batch=2, schedule=3)
    assert dataclasses.astuple(key_order.head_batches(found.plan.problem, 2)) == (2, 2, lead, 2)
    assert found.findings == ()
    assert_gradients([found.results[name] for name in NAMES], case)


@pytest.mark.usefixtures("few_heads_a_batch")
def test_passes_have_what_is_left():
    """The prepare pass, the persistent blocks and the convert pass handle all head batches."""
    problem = plan_backward((1, 6, 140, 64), (1, 3, 150, 64), causal=True, device="sm_90").problem
    assert dataclasses.astuple(key_order.head_batches(problem, 2)) == (1, 1, 1, 1)
    plan = make_plan(problem, Device.typical("sm_90"), "fa3", LONG)
    strips = 2 * 16  # of a key/value head: two query heads of 140 rows
    assert [launch.grid[0] * 4 for launch in plan.launches[::2]] == [strips, 2 * strips]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "window", "runs_on"),
    [
        ((8, 16, 2048), 16, (None, 0), False),
        ((16, 16, 1024), 16, (None, 0), True),
        ((4, 16, 4096), 16, (511, 0), True),
        ((4, 16, 4096), 16, (None, 0), False),
        ((2, 32, 4096), 8, (None, 0), False),
        ((2, 32, 8192), 8, (1023, 0), False),
        ((1, 16, 16384), 16, (None, 0), False),
        ((4, 8, 1024), 8, (None, 0), False),
    ],
)
def test_where_key_blocks_are_few_or_take_long_each_has_a_thread_block(shape, kv_heads, window, runs_on):
    batch, heads, seqlen = shape
    q, k = (batch, heads, seqlen, 128), (batch, kv_heads, seqlen, 128)
    plan = plan_backward(q, k, window=window, dtype="bfloat16", device="sm_90")
    assert plan.config.persistent == plan.launches[1].persistent == runs_on
    assert (plan.launches[1].grid[0] < batch * kv_heads * seqlen // 128) == runs_on


def test_a_head_batch_keeps_every_sm_busy():
    """GQA 32/8 at 4k: dQ of one head fills the share of the L2 cache, and its key blocks a quarter of the SMs."""
    q, k = (8, 32, 4096, 128), (8, 8, 4096, 128)
    problem = plan_backward(q, k, causal=True, dtype="bfloat16", device="sm_90").problem
    batches = key_order.head_batches(problem, 32)
    assert batches.size * 32 >= 132
