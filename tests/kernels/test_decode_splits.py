"""How decode problems are cut: shares of a line of tiles, the planner's choice for a GPU, which tiles are read under a
window and first keys."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from decode_kernel_support import H200, assert_spans, configs, merged_by_a_launch, operands_of, plan_of
from decode_support import make_case
from hypothesis import given
from hypothesis import strategies as st

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.kernels.decode import MAX_CLUSTER, TWO_STAGES, items
from cufa.plan.planner import make_plan
from cufa.problem.integers import Integers
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, Band
from cufa.problem.problem import FromChunk, Kept, Problem
from cufa.run.emulate.calls import run_plan
from cufa.run.emulate.launch import Execution
from cufa.schedule.decode import (
    Shares,
    most_tiles,
    num_tiles,
    read_range,
    split_range,
    tiles_to_read,
    used_splits,
)

H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")


@given(st.integers(1, 10**6), st.integers(1, 5000), st.integers(1, 700), st.booleans())
def test_shares_cover_the_line_and_none_is_empty(total, num_shares, min_shares, ragged):
    shares = Shares.of(total, num_shares, min_shares, ragged)
    starts = [shares.start(i) for i in range(shares.used + 1)]
    assert starts[0] == 0 and starts[-1] == total and shares.used <= num_shares
    assert all(a < b for a, b in itertools.pairwise(starts))


def test_the_last_shares_of_a_ragged_batch_are_small():
    shares = Shares.of(80_000, 2112, 264, ragged=True)
    sizes = [shares.start(i + 1) - shares.start(i) for i in range(shares.used)]
    assert shares.used == 2112 and sum(sizes[1056:]) == 10_000
    equal = Shares.of(80_000, 132, 132, ragged=False)
    assert {equal.start(i + 1) - equal.start(i) for i in range(132)} == {606, 607}
    # Too few tiles for small ones: a wave of equal shares.
    few = Shares.of(1000, 2112, 264, ragged=True)
    assert few.used == 264 and not few.two_sizes


@pytest.mark.parametrize("kernel", ["decode_balanced_tma", "decode_balanced"])
def test_the_kernel_finds_shares_of_two_sizes(kernel):
    """The device side of Shares: starts, and which share a tile is in."""
    case = make_case([2100, 100, 900], heads=8, kv_heads=4, head_dim=16)
    plan, operands = plan_of(case, kernel, 16, configs(kernel, 16)[1]), operands_of(case)
    tiles = sum(num_tiles(n, plan.config.block_kv) for n in case.lengths) * 4
    assert Shares.of(tiles, plan.split.count, plan.split.least, ragged=True).two_sizes
    done = run_plan(plan, operands, Execution("plain"))
    case.check(operands["out"], operands["lse"])
    assert_spans(plan, case.lengths, done.records)


def problem(batch: int, heads: int, kv_heads: int, capacity: int, ragged: bool = False) -> Problem:
    shape, lengths = (batch, heads, kv_heads, 1, capacity, 128), Cached(given=ragged)
    return Problem(*shape, "bfloat16", CAUSAL, 128**-0.5, lengths=lengths, operation="decode")


@pytest.mark.parametrize(
    ("shape", "splits", "in_cluster"),
    [
        ((1, 32, 8, 1 << 10), 8, True),
        ((1, 32, 8, 32 << 10), 8, True),
        ((1, 32, 8, 128 << 10), 16, False),  # longer than half of the SMs can read in time
        ((8, 32, 8, 32 << 10), 2, True),  # pairs fill the GPU
        ((1, 32, 32, 32 << 10), 4, False),  # 32 clusters of 4 do not find room in every group of SMs
        ((16, 32, 8, 16 << 10), 1, False),
        ((1, 8, 1, 16 << 10), 19, False),  # a wave would be 64: the merge would take longer than the rest
    ],
)
def test_splits_as_measured_on_an_h200(shape, splits, in_cluster):
    plan = make_plan(problem(*shape), H200)
    assert (plan.split.kind, plan.split.count) == ("fixed", splits)
    assert plan.config.cluster_merge == in_cluster == (plan.launches[0].cluster > 1)
    assert len(plan.launches) == 1 and (plan.workspace == 0) == (in_cluster or splits == 1)


@pytest.mark.parametrize(
    ("shape", "rows", "splits", "in_cluster"),
    [
        ((1, 64, 1, 1 << 10), 16, 8, True),
        ((1, 64, 1, 16 << 10), 16, 8, True),
        ((1, 128, 4, 16 << 10), 16, 8, True),
        ((1, 32, 1, 64 << 10), 16, 32, False),
        ((1, 64, 1, 64 << 10), 64, 79, False),  # 100 MB would be read again
        ((4, 64, 1, 16 << 10), 64, 32, False),
        ((1, 32, 1, 256 << 10), 16, 64, False),  # 134 MB: two blocks
        ((8, 32, 1, 64 << 10), 64, 16, False),
    ],
)
def test_blocks_of_16_rows_read_short_caches_again(shape, rows, splits, in_cluster):
    """As measured on an H200 (2026-11-28): several blocks per key/value head against one of taller tiles."""
    plan = make_plan(problem(*shape), H200)
    found = plan.config.block_q, plan.split.count, plan.config.cluster_merge
    assert found == (rows, splits, in_cluster) and plan.split.kind == "fixed"
    assert make_plan(dataclasses.replace(problem(*shape), invariant=True), H200).config.block_q >= 32


def cut(asked: Problem, device: Device) -> tuple[str, int, int, int]:
    """Fixed splits or shares, how many, warps and stages."""
    plan = make_plan(asked, device)
    assert plan.spec.uses_copy_engine
    return plan.split.kind, plan.split.count, plan.config.num_warps, plan.config.num_stages


@pytest.mark.parametrize(
    ("shape", "slow", "usual"),
    [
        ((64, 32, 8, 8 << 10), ("fixed", 4, 8, 2), ("balanced", 132, 8, 3)),  # items of 4 MiB, in clusters
        ((64, 32, 8, 16 << 10), ("balanced", 132, 8, 2), ("balanced", 132, 8, 3)),  # not measured
        ((64, 32, 8, 4 << 10), ("fixed", 4, 8, 2), ("balanced", 132, 8, 3)),
        ((32, 32, 8, 4 << 10), ("fixed", 4, 8, 2), ("balanced", 132, 8, 3)),
        ((40, 32, 8, 4 << 10), ("fixed", 4, 8, 2), ("balanced", 132, 8, 3)),
        ((133, 1, 1, 2 << 10), ("balanced", 132, 8, 2), ("balanced", 264, 4, 3)),  # waves filled to 80%
        ((64, 32, 8, 1 << 10), ("fixed", 2, 8, 2), ("balanced", 264, 4, 3)),
        ((128, 32, 8, 2 << 10), ("fixed", 4, 8, 2), ("balanced", 264, 4, 3)),
        ((128, 32, 8, 512), ("balanced", 264, 4, 3), ("balanced", 264, 4, 3)),  # not measured
        ((8, 32, 8, 2 << 10), ("fixed", 4, 4, 3), ("fixed", 4, 4, 3)),  # fewer items than SMs
        ((16, 32, 8, 8 << 10), ("fixed", 4, 8, 2), ("fixed", 1, 8, 3)),
        ((8, 64, 8, 16 << 10), ("fixed", 2, 8, 2), ("fixed", 2, 8, 3)),
        ((8, 32, 8, 32 << 10), ("fixed", 2, 8, 2), ("fixed", 2, 8, 3)),
        ((1, 64, 8, 512 << 10), ("fixed", 16, 8, 2), ("fixed", 16, 8, 3)),
        ((16, 64, 1, 16 << 10), ("fixed", 8, 8, 3), ("fixed", 8, 8, 3)),  # tall tiles
    ],
)
def test_two_stages_and_whole_items_where_memory_is_slow(shape, slow, usual):
    """As measured on an H100; with an H200 as ever."""
    asked = problem(*shape)
    assert cut(asked, H100) == slow and cut(asked, H200) == usual
    others = [dataclasses.replace(asked, head_dim=64, scale=0.125)]
    others += [dataclasses.replace(asked, k_dtype="float8_e4m3", v_dtype="float8_e4m3")]
    others += [dataclasses.replace(asked, head_dim=256, scale=0.0625)]
    for other in others:
        assert cut(other, H100) == cut(other, H200)


def test_only_slow_memory_is_read_in_two_stages():
    """Where one block reads the keys of a head. On other cards, `cufa tune` and calls by name take these tiles, which
    are the last of the kernels' tiles."""
    for batch, capacity in itertools.product((1, 8, 32, 64, 128, 512), (512, 2048, 4096, 32 << 10)):
        for ragged in (False, True):
            plan = make_plan(problem(batch, 32, 8, capacity, ragged), H200)
            assert merged_by_a_launch(plan.config) != merged_by_a_launch(TWO_STAGES)
    for name in ("decode_split_tma", "decode_balanced_tma"):
        assert TWO_STAGES in KERNELS[name].configs
        assert not any(c.num_stages == 2 for c in KERNELS[f"{name}_fp8"].configs if c.block_q == 16)
    assert TWO_STAGES.merged_in_cluster() in KERNELS["decode_split_tma"].configs


@given(
    st.integers(1, 300),
    st.sampled_from([(1, 1), (8, 1), (32, 8), (40, 2), (64, 64)]),
    st.integers(1, 300_000),
)
def test_any_choice_can_be_launched(batch, heads, capacity):
    for device in (H200, H100, Device.typical("sm_80")):
        plan = make_plan(problem(batch, *heads, capacity), device)
        launch, tiles = plan.launches[0], num_tiles(capacity, plan.config.block_kv)
        assert launch.cluster in (1, launch.grid[0]) and launch.cluster <= MAX_CLUSTER
        assert plan.num_splits <= tiles * (
            items(plan.problem, plan.config) if plan.split.kind == "balanced" else 1
        )
        assert launch.shared_memory <= device.arch.shared_memory_per_block
        if launch.cluster > 1:
            room = device.num_sms * plan.config.blocks_per_sm
            many = plan.config.num_stages == 2 and items(plan.problem, plan.config) >= 0.9 * room
            assert many or launch.cluster * items(plan.problem, plan.config) <= (
                room if launch.cluster == 2 else room // 2
            )


@pytest.mark.parametrize("schedule", ["auto", "balanced"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "capacity"),
    [
        (2, 32, 8, 1024),
        (4, 32, 8, 1024),
        (8, 32, 8, 512),
        (4, 32, 8, 2560),
        (64, 32, 8, 65536),
        (3, 8, 1, 300),
    ],
)
def test_small_ragged_batches_keep_the_gpu_as_busy(schedule, batch, heads, kv_heads, capacity):
    """Full sequences, given as lengths: at least about half of the blocks that can run have work."""
    plan = make_plan(problem(batch, heads, kv_heads, capacity, ragged=True), H200, schedule)
    count = items(plan.problem, plan.config)
    tiles = num_tiles(capacity, plan.config.block_kv) * count
    blocks = plan.num_splits * count
    if plan.split.kind == "balanced":
        blocks = Shares.of(tiles, plan.split.count, plan.split.least, ragged=True).used
        assert f"at most {min(plan.num_splits, tiles):,} shares" in plan.reasons[-1]
    resident = H200.num_sms * plan.config.blocks_per_sm
    assert blocks >= min(resident, tiles) * (0.45 if plan.split.kind == "fixed" else 1)


def test_splits_that_are_asked_for():
    """Merged in a cluster where one has room, and only then."""
    short = problem(1, 32, 8, 4096)
    assert make_plan(short, H200, num_splits=4).launches[0].cluster == 4
    assert make_plan(short, H200, num_splits=12).launches[0].cluster == 1
    assert make_plan(dataclasses.replace(short, batch=64), H200, num_splits=4).launches[0].cluster == 1
    (config,) = [c for c in configs("decode_split_tma", 128) if c.cluster_merge][:1]
    plan = make_plan(short, H200, num_splits=20, config=config, kernel="decode_split_tma")
    assert plan.num_splits == plan.launches[0].cluster == MAX_CLUSTER


# --- Windows and first keys -------------------------------------------------------------------------------


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


def test_tiles_are_those_from_the_first_tokens_chunk_on():
    for length, size, tokens, new in itertools.product(range(0, 90, 3), (1, 7, 8, 33, 200), (1, 4), (0, 20)):
        reach = FromChunk(size, tokens, new)
        first = max(length - tokens, 0) // size * size
        assert read_range(length, reach) == (min(first, max(length - new, 0)), length)
        assert num_tiles(length, 8, reach) <= most_tiles(90, 8, reach)
        for num_splits in (1, 2, 5):
            used = used_splits(length, num_splits, 8, reach)
            ranges = [split_range(length, num_splits, i, 8, reach) for i in range(num_splits)]
            assert [k for r in ranges[:used] for k in range(*r)] == list(range(*read_range(length, reach)))


def test_numbers_of_each_sequence_are_planned_as_the_most():
    """The kernel then reads fewer keys of other sequences. Numbers on a GPU may be the whole cache."""
    numbers = masks.streaming(np.array([4, 700]), 255)
    one = dataclasses.replace(problem(2, 32, 8, 4096), mask=numbers)
    assert one.uneven and one.kernel_reach == Kept(256, 700) and one.kernel_reach_of(0) == Kept(256, 4)
    assert one.visible_capacity == 956
    unknown = dataclasses.replace(one, mask=Band(255, 0, keep=Integers(None, (2,), "0" * 16)))
    assert unknown.uneven and unknown.visible_capacity == 4096
    assert not dataclasses.replace(one, mask=masks.streaming(700, 255)).uneven


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


@pytest.mark.parametrize(
    "mask", [masks.streaming(np.array([3, 5]), 9), masks.global_window(2, 9, 0), masks.chunks(64)], ids=str
)
@pytest.mark.parametrize("schedule", ["auto", "fixed", "balanced"])
def test_every_schedule_serves_chunks_and_numbers_of_each_sequence(mask, schedule):
    shapes, how = ((2, 4, 1, 64), (2, 2, 300, 64)), {"mask": mask, "schedule": schedule}
    assert cufa.plan_decode(*shapes, device="sm_90", **how).spec.uses_copy_engine
    assert "CPU" in str(cufa.plan_decode(*shapes, device="cpu", **how))
