"""When the forward splits keys, and into how many: the planner's choice and what it says of it."""

from __future__ import annotations

import dataclasses
import math

import pytest

import cufa
from cufa.gpu.architectures import COMPILED_ARCHITECTURES, Device
from cufa.kernels import KERNELS
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Cached, Padded
from cufa.problem.mask import CAUSAL, FULL
from cufa.problem.problem import Problem

LONG = (1, 8, 8192, 128)


def plan(q=(1, 32, 128, 128), k=LONG, *, device="sm_90", dtype="bfloat16", **options):
    return cufa.plan(q, k, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("keys", [2048, 8192, 131072])
@pytest.mark.parametrize("queries", [16, 64, 128])
def test_few_queries_over_many_keys_fill_the_gpu(algorithm, queries, keys):
    found = plan((1, 32, queries, 128), (1, 8, keys, 128), algorithm=algorithm, causal=True)
    if (algorithm, queries, keys) == ("fa3", 128, 2048):  # 23.5 µs in one launch, 26.1 in four parts (H200)
        assert found.num_splits == 1
        return
    assert found.num_splits > 1
    main, merge = found.launches
    blocks, room = math.prod(main.grid), 132 * found.config.blocks_per_sm
    assert 0.45 * room < blocks <= room
    assert main.grid[:2] == (found.config.query_items(found.problem), found.num_splits)
    assert merge.entry == f"{algorithm}_combine"
    assert merge.grid[0] * 256 >= 32 * queries * 32
    assert merge.dependent == (algorithm == "fa3")


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize(
    "q", [(16, 16, 1024, 128), (1, 16, 16384, 128), (4, 32, 4096, 64), (16, 8, 1024, 256)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_what_fills_the_gpu_has_one_launch(algorithm, q, causal):
    found = plan(q, q, algorithm=algorithm, causal=causal)
    assert found.split is None
    assert len(found.launches) == 1
    assert not found.workspace
    assert found.config in found.spec.configs


def test_heads_that_share_keys_share_a_tile_where_queries_are_few():
    """16 queries of 4 heads are 64 rows; a head for each key has nothing to share."""
    packed = plan((1, 32, 16, 128))
    assert packed.config.packed_heads == 4
    assert packed.launches[0].grid[0] == 8
    alone = plan((1, 8, 16, 128))
    assert alone.config.packed_heads == 1
    assert plan((1, 32, 128, 128)).config.packed_heads == 1


def over_cache(batch, queries, keys, head_dim, heads=32):
    cache = Cached(16, keys // 16, batch * keys // 16, True)
    problem = Problem(
        batch, heads, 8, queries, keys, head_dim, "bfloat16", CAUSAL, 0.1,
        lengths=Padded((queries,) * batch, (keys,) * batch, cache=cache),
    )  # fmt: skip
    return make_plan(problem, Device.typical(90)).config


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("keys", [1024, 8192, 131072])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_tiles_of_few_queries_over_a_cache_are_not_half_empty(batch, keys, head_dim):
    """64 rows took 0.75 of the time of 128 (8 x 64 over 8k, d128, H100); 128 queries fill 128 rows."""
    for queries in (1, 16, 17, 64):
        assert over_cache(batch, queries, keys, head_dim).block_q == 64, queries
    if batch > 1 and keys > 1024 and head_dim > 64:  # head dim 64: not measured
        assert over_cache(batch, 128, keys, head_dim).block_q == 128


def test_causal_queries_that_are_few_beside_their_keys_come_in_rounds():
    """192 rows left a second round half empty: 968 µs, with 128 rows 710 (H100)."""
    found = plan((1, 32, 1024, 128), (1, 8, 32768, 128), causal=True)
    assert found.config.block_q == 128 and found.split is None
    assert (
        plan((4, 32, 160, 128), (4, 8, 2048, 128), causal=True).config.block_q == 192
    )  # 41 µs, with 128 rows 53


def test_the_plan_says_splits_bytes_and_why():
    found = plan()
    text = str(found)
    assert f"splits     fixed: the keys of each query block in {found.num_splits} splits" in text
    rows, slot = found.config.block_q, (128 + 4) * 4
    assert found.workspace == found.config.query_items(found.problem) * found.num_splits * rows * slot
    assert f"workspace  {found.workspace:,} B: of each split" in text
    assert "is expected to take 0." in text


def test_what_is_asked_for_is_done():
    assert plan(num_splits=1).split is None
    assert plan((16, 16, 1024, 128), (16, 16, 1024, 128), num_splits=3).num_splits == 3
    most = plan(k=(1, 8, 200, 128), num_splits=50)
    assert most.num_splits == math.ceil(200 / most.config.block_kv)
    assert any("num_splits is reduced to" in reason for reason in most.reasons)
    config = KERNELS["fa2_forward"].split_configs[0]
    named = make_plan(plan(q=(1, 8, 128, 64), k=(1, 8, 8192, 64)).problem, Device.typical(90), "fa2", config)
    assert named.config == config
    assert named.num_splits > 1


def test_e4m3_keys_are_split():
    """Two heads of a query group share a tile: in one launch 16 work items of 132 SMs."""
    problem = Problem(
        1, 32, 8, 64, 131072, 128, "float8_e4m3", CAUSAL, 0.1, out_dtype="bfloat16", scales=("head",) * 3
    )
    gpu = Device.typical(90)
    assert make_plan(problem, gpu).num_splits > 1
    for changes in ({}, {"head_dim": 64}, {"mask": FULL}, {"values_in_rows": True}):
        found = make_plan(dataclasses.replace(problem, **changes), gpu, num_splits=8)
        assert (
            found.num_splits == 8 and found.config.packed_heads == 2 and found.launches[-2].grid == (16, 8, 1)
        )
    found = make_plan(problem, gpu, num_splits=8)
    assert found.workspace == 16 * 8 * found.config.slot_bytes(128)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"algorithm": "naive"}, "naive"),
        ({"dtype": "float32"}, "fa2_forward_f32"),
        ({"algorithm": "fa1"}, "fa1_forward"),
    ],
)
def test_kernels_that_split_no_keys_say_so(options, kernel):
    with pytest.raises(ValueError, match=f"{kernel} has no config that splits keys"):
        plan(num_splits=4, **options)
    assert plan(num_splits=1, **options).split is None


def test_keys_of_padded_sequences_and_irregular_masks_are_split():
    """Into no more splits than an array has tiles; heads share no tile."""
    for options in ({"seqlens_k": [8000]}, {"mask": cufa.masks.prefix(3)}):
        found = plan((1, 32, 16, 128), num_splits=400, **options)
        assert found.num_splits == 8192 // found.config.block_kv
        assert found.config.packed_heads == 1
        assert plan((1, 32, 16, 128), **options).num_splits > 1
    with pytest.raises(
        ValueError, match="fa3_forward splits keys without bits that depend on the sequence alone"
    ):
        plan(num_splits=4, cache_seqlens=[99], invariant=True)


def test_what_is_refused():
    """Splits with tiles that have none, and numbers that are none."""
    problem, whole = plan().problem, KERNELS["fa2_forward"].configs[1]
    with pytest.raises(ValueError, match="does not split keys"):
        make_plan(problem, Device.typical(90), "fa2", whole, num_splits=2)
    assert make_plan(problem, Device.typical(90), "fa2", whole).split is None
    for value, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="num_splits"):
            plan(num_splits=value)


def test_a_cpu_keeps_keys_together_and_says_so():
    found = plan(device="cpu", num_splits=4)
    assert found.split is None
    assert "num_splits=4 is for GPUs" in found.reasons[-1]


@pytest.mark.parametrize("arch", COMPILED_ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
def test_every_architecture_and_head_dim_splits(arch, head_dim):
    found = plan((1, 8, 64, head_dim), (1, 8, 32768, head_dim), device=f"sm_{arch}")
    assert found.num_splits > 1
    assert found.spec.fitting((found.config,), head_dim, Device.typical(arch))
