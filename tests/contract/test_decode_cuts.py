"""The contract of decoding, however the keys are cut: splits and shares of any number, merged in a cluster, by the same
launch or by a launch of their own; the same bits in every order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from backends import backends
from decode_contract import BOTH, CASES, check, each
from decode_kernel_support import cache_of, configs, served
from decode_support import make_case, numbers_of_heads

from cufa import masks
from cufa.kernels.decode import TWO_STAGES, items
from cufa.run.emulate.calls import Execution


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@backends("cpu")
def test_every_number_of_splits(backend, dtype, page_size):
    """1 to the number of tiles and beyond: the answer does not depend on it, beyond rounding."""
    case = make_case([101, 8, 64], tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 16):
        check(backend, case, "decode_split", num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@backends("cpu")
def test_every_number_of_shares(backend, dtype, page_size):
    """1 to one a tile, and more shares than tiles. Six query rows: two blocks of them."""
    case = make_case([51, 0, 9, 1, 16], heads=6, kv_heads=2, tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 60):
        check(backend, case, "decode_balanced", num_splits)


@each("gpu")
def test_every_number_of_splits_on_a_gpu(backend, kernel):
    case = make_case([1000, 64, 1], fp8=cache_of(kernel), head_dim=64)
    config = served(backend.device, kernel, 64)[0]
    for num_splits in range(1, -(-1000 // config.block_kv) + 3):
        check(backend, case, kernel, num_splits)


@pytest.mark.parametrize("full", BOTH)
@pytest.mark.parametrize("name", ["decode_split_tma", "decode_split_tma_fp8"])
@backends("emulate")
def test_splits_merged_in_a_cluster(backend, name, full):
    """Whatever the number of blocks and of splits without keys; the same bits in every order. And with sequences that
    fill the cache, whose splits the host counts."""
    fp8 = "fp8" in name
    made = {"head_dim": 128 if fp8 else 64, "fp8": fp8, "dtype": "bfloat16" if fp8 else "float16"}
    config = configs(name, made["head_dim"])[fp8 or 1 if full else 0].merged_in_cluster()
    few = numbers_of_heads("both", 1 if full else 3, 4)
    if full:
        kinds = [
            make_case([420], capacity=420, window=(left, 0), softcap=0.7, **made) for left in (0, 64, 300)
        ]
        kinds += [make_case([500], capacity=500, mask=masks.streaming(130, 20), **few, **made)]
        for case in kinds:
            case.options["cache_seqlens"] = None
    else:
        kinds = [make_case([900, 3, 200], tokens=2, **made), make_case([1100, 3, 200], **made, **few)]
    for case, num_splits in itertools.product(kinds, (1, 2, 8)):
        outs = set()
        for order in ("ascending", 1):
            how = {"config": config, "execution": Execution("checked", order, "late", 1)}
            done = check(backend, case, name, num_splits, **how)
            outs.add((done.out.tobytes(), done.lse.tobytes()))
        assert len(outs) == 1
        assert [launch.cluster for launch in done.plan.launches] == [done.plan.num_splits]


@each("emulate", kernels=["decode_split_tma", "decode_balanced"])
def test_same_bits_in_every_order(backend, kernel):
    case = make_case(**CASES[kernel])
    first = check(backend, case, kernel, 4, execution=Execution("checked", copies="early", threads=1))
    for order in ("descending", 1, 2):
        again = check(backend, case, kernel, 4, execution=Execution("checked", order, "late", 2))
        for name, x in again.results.items():
            assert x.tobytes() == first.results[name].tobytes(), name


@each("emulate", kernels=["decode_split_tma", "decode_balanced_tma", "decode_balanced"])
def test_parts_merged_by_a_launch_of_their_own(backend, kernel):
    """When all parts have been left where they are kept; shares that end one item and begin another."""
    few = numbers_of_heads("both", 4, 4)
    config = dataclasses.replace(configs(kernel, 64)[0], fold_combine=False)
    for case in (make_case([150, 260, 90, 200], head_dim=64, **more) for more in ({}, few)):
        for number in (3, 5, 7):
            done = check(backend, case, kernel, number, config=config)
            assert len(done.plan.launches) == 2
            assert len(done.records) > items(done.plan.problem, done.plan.config)


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        ("decode_split_tma", TWO_STAGES),
        ("decode_split_tma", TWO_STAGES.merged_in_cluster()),
        ("decode_balanced_tma", TWO_STAGES),
    ],
    ids=["splits", "splits in a cluster", "shares"],
)
@backends("emulate")
def test_rings_of_two_stages(backend, kernel, config, head_dim):
    """As an H100 has them: each buffer is filled again and again, and one item follows another."""
    case = make_case([900, 3, 200], head_dim=head_dim, dtype="bfloat16")
    for number in (1, 2):
        check(backend, case, kernel, number, config=config, execution=Execution("checked", copies="late"))


@each("gpu")
def test_spans_are_those_of_the_schedule(backend, kernel):
    case = make_case([3000, 0, 700, 64, 1], heads=8, kv_heads=4, fp8=cache_of(kernel), head_dim=64)
    served(backend.device, kernel, 64)
    for num_splits in (1, 3, 40):
        check(backend, case, kernel, num_splits, trace=True)
