"""Kernels of the backward executed on a CPU in checked mode: right against float64, no findings, tiles as scheduled, in
the order that :mod:`cufa.core.order` says."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from backward_support import NAMES, Case, assert_gradients, make_case
from support import DTYPES

import cufa
from cufa.core.architectures import Device
from cufa.core.mask import CAUSAL, FULL, Band
from cufa.executor.emulate import Emulation, emulate_backward
from cufa.kernels import kernels_of
from cufa.planner import fitting_configs

ARCHS = ("sm_90", "sm_80", "sm_86")
SPECS = list(kernels_of("backward").values())
VARIANTS = [
    pytest.param(s, d, None if p == "native" else p, id=f"{s.name}-{d}" + (f"-{p}" if p != "native" else ""))
    for s in SPECS
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]

#: Masks and determinism alternate over tilings: each build takes seconds.
MASKS = itertools.cycle(itertools.product((CAUSAL, FULL, Band(40, 10)), (False, True)))
CONFIGS = [
    pytest.param(
        s,
        c,
        d,
        None if p == "native" else p,
        *next(MASKS),
        id=f"{s.name}-{i}-{d}" + (f"-{p}" if p != "native" else ""),
    )
    for s in SPECS
    for i, c in enumerate(s.configs)
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]
EITHER = pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])


def check(spec, precision, case: Case, **options) -> Emulation:
    """One checked run: no findings, errors within bounds, the kernel's tile counters equal the schedule."""
    mode = options.pop("mode", "checked")
    run = emulate_backward(
        *case.arrays, **case.options, algorithm=spec.algorithm, precision=precision, mode=mode, **options
    )
    assert run.plan.spec is spec
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_gradients([run.results[name] for name in NAMES], case, precision)
    if options.get("trace", True):
        assert_tiles(run)
    return run


def assert_tiles(run: Emulation) -> None:
    """One record per key block and key/value head, saying what the schedule says."""
    problem, schedule, ranges = run.plan.problem, run.plan.schedule, run.plan.schedule.ranges
    heads, blocks = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    of_head = {
        "q_block": np.arange(blocks),
        "first_tile": ranges.first,
        "tiles_visited": ranges.count,
        "tiles_skipped": schedule.num_q_blocks - ranges.count,
        "first_clear": ranges.clear_first,
        "tiles_clear": ranges.clear,
    }
    assert len(run.records) == heads * blocks
    for field, expected in of_head.items():
        np.testing.assert_array_equal(run.records[field], np.tile(expected, heads), err_msg=field)
    of_batch = np.repeat(np.arange(problem.kv_heads), blocks)
    np.testing.assert_array_equal(run.records["head"], np.tile(of_batch, problem.batch))


@pytest.mark.parametrize(("spec", "config", "dtype", "precision", "mask", "deterministic"), CONFIGS)
def test_every_tiling(spec, config, dtype, precision, mask, deterministic):
    """Two query tiles and two key blocks, the last ones ragged; two heads share their keys."""
    head_dim = max(64, config.min_head_dim)
    arch = next((a for a in ARCHS if config in fitting_configs(spec, head_dim, Device.typical(a))), None)
    assert arch is not None, f"{config} fits no architecture"
    lengths = config.block_q + 5, config.block_kv + 3
    case = make_case(1, 2, 1, *lengths, head_dim, dtype, mask=mask, dlse=True)
    check(
        spec, precision, case, config=config, arch=arch, deterministic=deterministic, trace=False
    )  # as a GPU runs it


@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 192, 256])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_head_dims(spec, dtype, precision, head_dim):
    check(spec, precision, make_case(1, 1, 1, 70, 90, head_dim, dtype, causal=True), trace=False)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "mask",
    [
        Band(right=0, diagonal="top-left"),
        Band(0, 0),
        Band(7, 7, 5),
        Band(130, 20),
        Band(left=40),
        Band(3, 3, 500),
    ],
    ids=str,
)
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_masks_and_caps(spec, dtype, precision, mask, softcap):
    for lengths in ((200, 127), (65, 200)):
        case = make_case(1, 2, 2, *lengths, 64, dtype, mask=mask, softcap=softcap, dlse=True)
        check(spec, precision, case)


@EITHER
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_grouped_heads(spec, dtype, precision, heads, kv_heads, deterministic):
    case = make_case(2, heads, kv_heads, 90, 150, 64, dtype, causal=True)
    check(spec, precision, case, deterministic=deterministic)


EDGES = {  # batch, heads, kv_heads, seqlen_q, seqlen_k
    "one query, one key": (1, 1, 1, 1, 1),
    "one query": (2, 4, 2, 1, 131),
    "one key": (2, 4, 2, 131, 1),
    "many queries, few keys: rows that see none": (1, 2, 2, 150, 17),
    "primes": (1, 3, 1, 67, 101),
}


@EITHER
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_edges(spec, dtype, precision, shape, deterministic):
    check(spec, precision, make_case(*shape, 64, dtype, causal=True), deterministic=deterministic)


def test_rows_that_see_nothing_are_not_read():
    """Whatever their gradients are."""
    case = make_case(1, 2, 1, 150, 60, 64, "bfloat16", causal=True, dlse=True)
    case.dlse[:, :, :90] = np.nan
    check(SPECS[0], None, case)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_narrow_copies(spec, dtype, precision, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    if alignment < DTYPES[dtype].itemsize:
        pytest.skip(f"{dtype} is never aligned to {alignment} bytes only")
    extra = alignment // DTYPES[dtype].itemsize
    case = make_case(1, 2, 2, 70, 90, 64, dtype, causal=True)
    wide = {
        name: np.concatenate([x[..., :extra], x], axis=-1)[..., extra:]
        for name, x in ((n, getattr(case, n)) for n in ("dout", "q", "k", "v", "out"))
    }
    run = check(spec, precision, dataclasses.replace(case, **wide))
    assert run.plan.problem.alignment == alignment


def test_layout_bshd():
    case = make_case(2, 4, 2, 70, 90, 64, "float16", causal=True)
    arrays = (*(np.ascontiguousarray(x.swapaxes(1, 2)) for x in case.arrays[:5]), case.lse)
    run = cufa.emulate_backward(*arrays, causal=True, layout="bshd", mode="checked")
    assert not run.findings
    assert_gradients([run.results[name].swapaxes(1, 2) for name in NAMES], case)


@EITHER
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_same_bits_in_every_order(spec, dtype, precision, deterministic):
    """Whatever order warps run in, and whenever copies land: dk and dv, and if that is asked for dq."""
    case = make_case(1, 2, 1, 150, 300, 64, dtype, causal=True)
    first = check(spec, precision, case, deterministic=deterministic, copies="early", threads=1)
    for schedule in ("descending", 1, 2):
        run = check(
            spec, precision, case, deterministic=deterministic, schedule=schedule, copies="late", threads=2
        )
        for name in NAMES if deterministic else NAMES[1:]:
            same = run.results[name].view(np.uint8), first.results[name].view(np.uint8)
            np.testing.assert_array_equal(*same, err_msg=name)


@EITHER
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(300, 0)], ids=str)
@pytest.mark.parametrize(("heads", "seqlen"), [(3, 700), (200, 200)])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_key_blocks_are_taken_in_the_order_that_is_written_down(spec, heads, seqlen, mask, deterministic):
    """200 heads are more than share the L2 cache: they are launched in groups."""
    dtype, head_dim = spec.dtypes[0], 64 if heads == 3 else 256
    case = make_case(1, heads, heads, seqlen, seqlen, head_dim, dtype, mask=mask)
    run = emulate_backward(*case.arrays, mask=mask, algorithm=spec.algorithm, deterministic=deterministic)
    order = spec.order(run.plan.problem, run.plan.schedule, 132)
    expected = set(zip(range(len(order)), order.q_block.tolist(), order.head.tolist(), strict=True))
    assert {tuple(map(int, (r["thread_block"], r["q_block"], r["head"]))) for r in run.records} == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_counters(spec):
    """Bytes follow from the arrays, products from the tiles visited: five of a tile each."""
    case = make_case(1, 2, 2, 256, 256, 64, spec.dtypes[0], causal=True)
    run = check(spec, None, case, mode="counted")
    assert run.totals["bank_conflicts"] == 0
    assert run.totals["global_write_bytes"] >= sum(x.nbytes for x in run.results.values())
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    config = run.plan.config
    per_tile = 5 * config.block_q * config.block_kv * 64
    assert run.totals["products"] == run.totals["tiles_visited"] * per_tile


def test_arguments_are_checked_as_the_calls_are():
    case = make_case(1, 2, 1, 20, 30, 64, "float16")
    with pytest.raises(TypeError, match="q is float64"):
        emulate_backward(*(x.astype(np.float64) for x in case.arrays))
    with pytest.raises(ValueError, match="lse has shape"):
        emulate_backward(*case.arrays[:5], case.lse[:, :, 1:])
    with pytest.raises(TypeError, match="deterministic must be"):
        emulate_backward(*case.arrays, deterministic="yes")
    with pytest.raises(ValueError, match="nothing to execute"):
        emulate_backward(*(x[:, :, :0] if x.shape[2] == 20 else x for x in case.arrays))
