"""Plans that depend on the card: head batches if memory is slow, and FlashAttention-2's tiles by the count of SMs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cufa.gpu.architectures import ARCHITECTURES, Device
from cufa.kernels import KERNELS
from cufa.measure.suites import make
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.problem.problem import Problem
from cufa.schedule import key_order

DEVICES = [Device.typical(capability) for capability in ARCHITECTURES]
H200 = Device.typical(90)
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")

# --- Heads that persistent blocks work on side by side ----------------------------------------------------


@pytest.mark.parametrize("name", ["H200", "NVIDIA H200", "NVIDIA H20", "NVIDIA GH200 480GB", "another card"])
def test_memory_is_slow_on_an_h100_only(name):
    assert H100.slow_memory and dataclasses.replace(H200, name="NVIDIA H100 PCIe").slow_memory
    assert not dataclasses.replace(H200, name=name).slow_memory
    assert not any(device.slow_memory for device in DEVICES)


@pytest.mark.parametrize(
    ("batch", "seqlen", "head_dim", "usual", "slow"),
    [
        (16, 1024, 256, 12, 2),  # 1, 3 and 11 would take 4.6 % longer than 12, 2 takes 1.5 %
        (4, 4096, 256, 32, 1),  # 32 heads do not fit in the L2 cache, what fits takes 3.3 % longer
        (1, 16384, 256, 8, 8),  # what fits takes 1.8 times as long
        (16, 1024, 128, 44, 44),  # measured with wide heads alone
        (2, 8192, 256, 16, 16),
        (32, 512, 128, 66, 66),
        (16, 4096, 256, 6, 1),  # 128 heads with 512 MB of keys and values: what fits takes 2.8 % longer
    ],
)
def test_head_batches_are_small_where_memory_is_slow(batch, seqlen, head_dim, usual, slow):
    """Only the H100 has slow memory. The plan's order agrees with the head batch size in the kernel's parameters."""
    heads = 8 if head_dim == 256 else 16
    asked = make(batch, heads, seqlen, head_dim, "bfloat16", CAUSAL)
    for device, size in ((H200, usual), (H100, slow)):
        plan = make_plan(asked, device, "fa3")
        assert plan.heads_per_head_batch == size
        taken, blocks = plan.order, plan.schedule.num_q_blocks
        of_batch = taken.head[: blocks * size].reshape(blocks, size)
        assert (of_batch == np.arange(size)).all()
        assert (taken.head[blocks * size :] >= size).all()


def heads_of(plan) -> int:
    return plan.problem.batch * plan.problem.heads


# --- Heads that Hopper's backward works on together ---------------------------------------------------------


def backward_of(batch, heads, seqlen, head_dim, mask: Mask = CAUSAL, **changed) -> Problem:
    asked = make(batch, heads, seqlen, head_dim, "bfloat16", mask)
    return dataclasses.replace(asked, operation="backward", **changed)


def told(plan: Plan) -> dict[str, int | float]:
    """Kernel parameters about head batches."""
    scalars = OPERATIONS["backward"].scalars(plan, {})
    return {name: scalars[name] for name in key_order.HeadBatches(1, 1, 1, 1).scalars()}


def assert_consistent(plan: Plan) -> None:
    """The order agrees with the head batches in the kernel's parameters. With persistent blocks, the prepare and
    convert passes have the row strips that these blocks leave to them."""
    batches = key_order.HeadBatches(*map(int, told(plan).values()))
    heads, blocks = heads_of(plan), plan.schedule.num_kv_blocks
    for batch in range(batches.whole + 1):
        first, end = batch * batches.size, (batch + 1) * batches.size if batch < batches.whole else heads
        taken = plan.order.head[first * blocks : end * blocks]
        assert set(taken) == set(range(first, end))
        if plan.problem.later_rows_see_more:
            assert (taken[: end - first] == np.arange(first, end)).all()
    of_head = -(-plan.problem.seqlen_q // plan.config.block_q) * plan.config.block_q // 16
    before = behind = heads
    if plan.launches[1].persistent:
        before, behind = batches.size * batches.before, heads - batches.size * batches.converted
    passes = [launch.grid[0] * launch.num_threads // 32 for launch in plan.launches[::2]]
    assert passes == [before * of_head, behind * of_head]  # a warp a strip


@pytest.mark.parametrize(
    ("shape", "usual", "slow", "persistent"),
    [
        ((16, 16, 1024, 128), 24, 2, True),
        ((8, 16, 2048, 128), 12, 2, False),
        ((4, 16, 4096, 128), 6, 2, False),
        ((1, 16, 16384, 128), 2, 2, False),
        ((16, 8, 1024, 256), 12, 2, False),
        ((4, 8, 4096, 256), 3, 2, False),
        ((1, 8, 16384, 256), 1, 1, False),  # never more than elsewhere
        ((16, 10, 1024, 192), 16, 2, False),
        ((4, 10, 4096, 192), 4, 2, False),
        ((16, 20, 1024, 104), 29, 2, True),
    ],
)
def test_slow_memory_has_head_batches_of_two_without_query_groups(shape, usual, slow, persistent):
    """With small batches, each key block has a thread block. On an H200, batches keep their usual size."""
    asked = backward_of(*shape)
    for device, size, expected in ((H200, usual, persistent), (H100, slow, False)):
        plan = make_plan(asked, device, "fa3")
        assert told(plan)["heads_per_head_batch"] == size
        assert plan.config.persistent == plan.launches[1].persistent == expected
        assert_consistent(plan)


@pytest.mark.parametrize(
    "asked",
    [
        backward_of(16, 21, 1024, 96),
        backward_of(16, 32, 1024, 64),
        backward_of(2, 32, 4096, 128, kv_heads=8),
        backward_of(16, 16, 1024, 128, FULL),
        backward_of(16, 16, 1024, 128, Band(255, 0)),
        backward_of(16, 16, 1024, 128, Band(None, 0, prefix=300)),
        backward_of(2, 16, 1024, 256, kv_heads=2),
    ],
    ids=str,
)
def test_slow_memory_leaves_other_head_batches_as_they_are(asked):
    found, usual = (make_plan(asked, device, "fa3") for device in (H100, H200))
    assert (found.config, found.launches, found.workspace) == (usual.config, usual.launches, usual.workspace)
    assert (found.order.head == usual.order.head).all() and (found.order.q_block == usual.order.q_block).all()
    scalars = OPERATIONS["backward"].scalars
    assert scalars(found, {}) == scalars(usual, {})


def test_a_fixed_addition_order_has_the_same_head_batches_on_any_card():
    """Q, dO and dQ of a head take 4 MiB: a batch of 24 MiB has six heads."""
    asked, size = backward_of(4, 16, 4096, 128, deterministic=True), 6
    for device in (H100, H200):
        plan = make_plan(asked, device, "fa3")
        blocks = plan.schedule.num_kv_blocks
        assert set(plan.order.head[: size * blocks]) == set(range(size))
        assert (plan.order.q_block[:size] == blocks - 1).all()  # from right to left


def test_persistent_blocks_have_the_usual_head_batches_on_any_card():
    """A config with persistent blocks that the planner would not choose: launches, order and parameters agree."""
    config = next(x for x in KERNELS["fa3_backward"].configs if x.fits(128) and x.persistent)
    asked = backward_of(16, 16, 1024, 128)
    found, usual = (make_plan(asked, device, "fa3", config) for device in (H100, H200))
    assert found.launches[1].persistent and found.launches == usual.launches
    assert told(found) == told(usual) and told(found)["heads_per_head_batch"] > 2
    assert (found.order.head == usual.order.head).all()
    assert_consistent(found)
    capped = make_plan(
        dataclasses.replace(asked, softcap=30.0), H100, "fa3"
    )  # persistent blocks do not serve a soft cap
    assert not capped.launches[1].persistent and told(capped)["heads_per_head_batch"] == 2
    assert_consistent(capped)


# --- FlashAttention-2 where each thread block has an SM for itself -------------------------------------------


def tiles(batch, seqlen, head_dim, mask: Mask, device: Device = H200) -> tuple[int, int, int]:
    """(block_q, block_kv, num_splits) of the planned config."""
    plan = make_plan(make(batch, 8, seqlen, head_dim, "bfloat16", mask), device, "fa2")
    return plan.config.block_q, plan.config.block_kv, plan.num_splits


@pytest.mark.parametrize("device", [H200, H100], ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "mask", "expected"),
    [
        (512, 64, CAUSAL, (64, 128)),
        (1024, 64, FULL, (64, 128)),
        (1024, 64, CAUSAL, (64, 128)),
        (1024, 128, FULL, (64, 64)),
        (2048, 64, FULL, (128, 64)),
        (2048, 64, CAUSAL, (64, 64)),  # 256 blocks
        (2048, 128, FULL, (128, 64)),
        (2048, 128, CAUSAL, (64, 64)),
    ],
)
def test_few_blocks_have_wide_tiles_and_no_splits(seqlen, head_dim, mask, expected, device):
    assert tiles(1, seqlen, head_dim, mask, device) == (*expected, 1)


def test_a_short_causal_call_is_not_split_on_an_h100():
    """Four splits took 36.7 µs; the full call, unsplit, takes 26.8."""
    plan = make_plan(make(1, 8, 1024, 128, "bfloat16", CAUSAL), H100, "fa2")
    assert plan.spec.name == "fa2_forward"
    assert plan.num_splits == 1


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(("batch", "seqlen"), [(8, 2048), (4, 4096), (32, 1024)])
def test_many_blocks_share_their_sms(batch, seqlen, head_dim, mask):
    assert tiles(batch, seqlen, head_dim, mask) == (128, 64, 1)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_wide_tiles_are_for_as_many_blocks_as_there_are_sms(mask, head_dim):
    for num_sms in (64, 132):
        device = dataclasses.replace(H200, num_sms=num_sms)
        for seqlen in range(128, 4097, 128):
            plan = make_plan(make(1, 8, seqlen, head_dim, "bfloat16", mask), device, "fa2", num_splits=1)
            rows, keys = plan.config.block_q, plan.config.block_kv
            assert keys <= 64 or 8 * -(-seqlen // rows) <= num_sms
            assert keys == 128 or head_dim > 64 or 8 * -(-seqlen // 64) > num_sms
    assert tiles(1, 512, 64, FULL, dataclasses.replace(H200, num_sms=64)) == (64, 128, 1)
    assert tiles(1, 1024, 64, CAUSAL, dataclasses.replace(H200, num_sms=64)) == (64, 64, 1)
