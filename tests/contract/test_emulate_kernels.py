"""Every kernel executed on a CPU in checked mode: right against float64, no findings, tiles as scheduled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sampling import of_today
from support import (
    DTYPES,
    assert_attention,
    assert_every_row,
    assert_tiles,
    forward_operands,
    make_inputs,
    make_problem,
    uneven_rows,
)  # fmt: skip

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of
from cufa.plan.planner import fitting_configs, make_plan
from cufa.run.emulate.calls import Execution, emulate, run_plan

ARCH = "sm_90"
SPECS = list(kernels_of("forward").values())
VARIANTS = [
    pytest.param(s, d, None if p == "native" else p, id=f"{s.name}-{d}" + (f"-{p}" if p != "native" else ""))
    for s in SPECS
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]
CONFIGS = [
    pytest.param(s, c, d, None if p == "native" else p, id=f"{s.name}-{i}-{d}-{p}")
    for s in SPECS
    for i, c in enumerate(s.configs)
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def check(spec, precision, q, k, v, *, layout="bhsd", causal=False, **options):
    """One checked run: no findings, error within bounds, the kernel's tile counters equal the schedule."""
    run = emulate(
        q, k, v, algorithm=spec.algorithm, precision=precision, layout=layout, causal=causal, arch=ARCH,
        mode=options.pop("mode", "checked"), **options,
    )  # fmt: skip
    assert run.plan.spec is spec
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_attention(run.out, run.lse, q, k, v, causal=causal, layout=layout, precision=precision)
    if options.get("trace", True):
        assert_tiles(run.plan, run.records)
    return run


@pytest.mark.sampled(fixed=24, dated=8, pairs=[("spec", "dtype"), ("spec", "precision")])
@MASKS
@pytest.mark.parametrize(("spec", "config", "dtype", "precision"), CONFIGS)
def test_every_tiling(spec, config, dtype, precision, causal):
    """Two query blocks and three key blocks, the last ones ragged; two sequences, in which two heads share their keys.
    Without a mask as a GPU runs it, causal with records of the tiles: one build per case. A day has half of them."""
    head_dim = max(64, config.min_head_dim)
    if config not in fitting_configs(spec, head_dim, Device.typical(ARCH)):
        pytest.skip(f"{config} does not fit head_dim {head_dim} on {ARCH}")
    shape = (2, 2, 1, config.block_q + 5, 2 * config.block_kv + 3, head_dim)
    inputs = make_inputs(*shape, dtype)
    check(spec, precision, *inputs, causal=causal, config=config, trace=causal)


@pytest.mark.sampled(fixed=6)
@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 192, 256])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_head_dims(spec, dtype, precision, head_dim):
    check(spec, precision, *make_inputs(1, 1, 1, 70, 90, head_dim, dtype), causal=True, trace=False)


@pytest.mark.sampled(pairs=[("dtype", "alignment")])
@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize(
    ("spec", "dtype", "precision"), [v for v in VARIANTS if not v.values[0].uses_copy_engine]
)
def test_narrow_copies(spec, dtype, precision, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    if alignment < DTYPES[dtype].itemsize:
        pytest.skip(f"{dtype} is never aligned to {alignment} bytes only")
    extra = alignment // DTYPES[dtype].itemsize
    wide = make_inputs(1, 2, 2, 70, 90, 64 + extra, dtype)
    run = check(spec, precision, *(x[..., extra:] for x in wide), causal=True)
    assert run.plan.problem.alignment == alignment


@MASKS
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("name", ["fa2_forward_f32", "fa1_forward_f32", "naive"])
def test_float32_rows_of_very_different_size(name, head_dim, causal):
    """Early causal rows see small values only, beside large ones in the same tile."""
    for seed in range(3):
        inputs = uneven_rows(head_dim=head_dim, seed=seed)
        run = check(KERNELS[name], "float32", *inputs, causal=causal, mode="plain", trace=False)
        assert_every_row(run.out, *inputs, causal)


EDGES = {  # batch, heads, kv_heads, seqlen_q, seqlen_k: in each, sequences and heads that share keys
    "one query, one key": (2, 2, 1, 1, 1),
    "decode": (2, 4, 2, 1, 131),
    "many queries, few keys: rows that see none": (2, 2, 1, 150, 17),
    "primes": (2, 3, 1, 67, 101),
}


@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_edges(spec, dtype, precision, shape):
    check(spec, precision, *make_inputs(*shape, 64, dtype, layout="bshd"), causal=True, layout="bshd")


@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_same_bits_in_every_order(spec, dtype, precision):
    """Whatever order warps run in, and whenever copies land."""
    q, k, v = make_inputs(1, 2, 1, 100, 200, 64, dtype)
    first = check(spec, precision, q, k, v, causal=True, copies="early", threads=1)
    for schedule in ("ascending", "descending", 1, 2):
        run = check(spec, precision, q, k, v, causal=True, schedule=schedule, copies="late", threads=2)
        np.testing.assert_array_equal(run.out.view(np.uint8), first.out.view(np.uint8))
        np.testing.assert_array_equal(run.lse, first.lse)


@MASKS
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_counters(spec, causal):
    """Products and bytes follow from the tiles visited."""
    precision = "float32" if spec.dtypes == ("float32",) else None
    q, k, v = make_inputs(1, 2, 2, 256, 256, 64, spec.dtypes[0])
    run = check(spec, precision, q, k, v, causal=causal, mode="counted")
    assert run.totals["bank_conflicts"] == 0 or spec.name == "naive"
    assert run.totals["global_write_bytes"] >= run.out.nbytes + run.lse.nbytes
    assert run.totals["global_read_bytes"] >= q.nbytes + k.nbytes + v.nbytes
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    if precision is None and run.plan.spec.name != "naive":
        config = run.plan.config
        per_tile = 2 * config.block_q * config.block_kv * 64
        products = run.totals["tiles_visited"] * per_tile
        if spec.name == "fa3_forward":  # a warpgroup skips tiles of its own 64 rows
            assert products / 2 < run.totals["products"] <= products
        else:
            assert run.totals["products"] == products
        assert run.totals["exponentials"] >= run.totals["products"] / 128


def _is_persistent(spec, config) -> bool:
    return spec.launches(make_problem(*make_inputs(1, 1, 1, 8, 8, 64)), config, 0, None)[0].persistent


PERSISTENT = [
    pytest.param(s, c, d, id=f"{s.name}-{i}-d{d}")
    for s in SPECS
    for d in (64, 128, 256)
    for i, c in enumerate(s.configs)
    if c in fitting_configs(s, d, Device.typical(ARCH)) and _is_persistent(s, c)
]


@pytest.mark.sampled(fixed=1, dated=1)
@MASKS
@pytest.mark.parametrize(("spec", "config", "head_dim"), PERSISTENT)
def test_persistent_blocks(spec, config, head_dim, causal):
    """Fewer blocks than items: a pipeline that runs on from item to item never stalls."""
    shapes = (1, 2, 1, 300, 700), (1, 2, 1, 384, 384), (1, 3, 1, 100, 900)
    for shape in of_today(shapes, f"{config} {head_dim} {causal}"):
        q, k, v = make_inputs(*shape, head_dim, "float16")
        plan = make_plan(make_problem(q, k, v, causal), Device.typical(ARCH), spec.algorithm, config)
        for blocks in (1, 2):
            launch = dataclasses.replace(plan.launches[0], grid=(blocks, 1, 1))
            fewer = dataclasses.replace(plan, launches=(launch,))
            run = run_plan(fewer, forward_operands(q, k, v), Execution("checked"), trace=False)
            assert not run.findings, "\n".join(map(str, run.findings))
            assert_attention(run.out, run.lse, q, k, v, causal=causal)


@pytest.mark.parametrize("below", [False, True], ids=["around 0", "below 0"])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_scores_as_large_as_promised(spec, dtype, precision, below):
    """Within ±2e7 (see flash_attention) a row is the value of its best key, and nothing overflows."""
    q, k, v = make_inputs(1, 1, 1, 100, 90, 64, dtype)
    if below:
        q, k = abs(q), -abs(k)
    scores = q[0, 0].astype(float) @ k[0, 0].astype(float).T
    scale = 2e7 / abs(scores).max()
    options = {"algorithm": spec.algorithm, "precision": precision, "arch": ARCH, "mode": "plain"}
    run = emulate(q, k, v, scale=scale, **options)
    first, second = np.sort(scores)[:, -1], np.sort(scores)[:, -2]
    clear = first - second > 1e-3 * abs(scores).max()  # tf32 rounds scores
    assert clear.mean() > 0.5
    assert np.isfinite(run.out.astype(float)).all() and np.isfinite(run.lse).all()
    best = v[0, 0].astype(float)[scores.argmax(1)]
    np.testing.assert_allclose(run.out[0, 0].astype(float)[clear], best[clear], rtol=1e-2, atol=1e-3)
