"""Every kernel on a GPU against float64: dtypes, head dims, tilings, edges, poison, counters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    assert_attention,
    assert_every_row,
    assert_tiles,
    forward_operands,
    make_inputs,
    make_problem,
    poisoned_like,
    uneven_rows,
)  # fmt: skip

import cufa
from cufa.kernels import kernels_of
from cufa.plan.planner import fitting_configs, make_plan

pytestmark = pytest.mark.gpu

HEAD_DIMS = range(8, 257, 8)
SPECS = list(kernels_of("forward").values())
VARIANTS = [
    (s, d, p) for s in SPECS for d in s.dtypes for p in s.precisions if (p == "native") == (d != "float32")
]


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def cuda():
    from cufa.run.cuda import backend as cuda

    return cuda


def run(cp, q, k, v, **options):
    """On the GPU into a poisoned output; NumPy in, NumPy out."""
    q, k, v = (cp.asarray(x) for x in (q, k, v))
    out = poisoned_like(q, cp)
    _, lse = cufa.flash_attention(q, k, v, out=out, return_lse=True, **options)
    return cp.asnumpy(out), cp.asnumpy(lse)


def check(cp, q, k, v, *, causal=False, scale=None, layout="bhsd", **options):
    out, lse = run(cp, q, k, v, causal=causal, scale=scale, layout=layout, **options)
    assert_attention(
        out, lse, q, k, v, causal=causal, scale=scale, layout=layout, precision=options.get("precision")
    )


def options_of(spec, precision):
    return {"algorithm": spec.algorithm, "precision": None if precision == "native" else precision}


def run_config(cp, cuda, spec, config, precision, q, k, v, causal):
    """One registered tiling, whatever the planner would have chosen."""
    problem = dataclasses.replace(make_problem(q, k, v, causal), precision=precision)
    plan = make_plan(problem, cuda.current_device(), spec.algorithm, config=config)
    given = forward_operands(*(cp.asarray(x) for x in (q, k, v)), cp)
    cuda.run(plan, given)
    return plan, cp.asnumpy(given["out"]), cp.asnumpy(given["lse"])


@pytest.mark.sampled(dated=40)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_head_dims_and_layouts(cp, spec, dtype, precision, head_dim):
    # Layout and mask alternate over head dims: both are covered for every kernel, at half the compiles.
    layout = ("bhsd", "bshd")[head_dim // 8 % 2]
    for causal in (False, True) if head_dim in (64, 128, 256, 40) else ((head_dim // 16) % 2 == 0,):
        q, k, v = make_inputs(2, 4, 2, 150, 203, head_dim, dtype, layout=layout, seed=head_dim)
        check(cp, q, k, v, causal=causal, layout=layout, **options_of(spec, precision))


CONFIGS = [(s, d, p, c) for s, d, p in VARIANTS for c in s.configs]


@pytest.mark.sampled(dated=10, pairs=[("spec", "config"), ("spec", "dtype"), ("spec", "causal")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("spec", "dtype", "precision", "config"), CONFIGS, ids=lambda x: getattr(x, "name", str(x))
)
def test_every_tiling_at_its_edges(cp, cuda, spec, dtype, precision, config, causal):
    for head_dim in sorted(
        {max(config.min_head_dim, 64) if config.max_head_dim >= 64 else 8, config.max_head_dim}
    ):
        if config not in fitting_configs(spec, head_dim, cuda.current_device()):
            continue  # made for another architecture's shared memory
        bq, bk = config.block_q, config.block_kv
        for sq, sk in [
            (1, 1),
            (bq, bk),
            (bq - 1, bk + 1),
            (bq + 1, bk - 1),
            (2 * bq + 1, 3 * bk),
            (1, 2 * bk + 1),
            (bq, 1),
        ]:
            q, k, v = make_inputs(1, 2, 1, sq, sk, head_dim, dtype, seed=sq + sk)
            plan, out, lse = run_config(cp, cuda, spec, config, precision, q, k, v, causal)
            assert plan.config == config
            assert_attention(out, lse, q, k, v, causal=causal, precision=precision)


EDGES = [
    (1, 1),
    (1, 1000),
    (1000, 1),
    (7, 13),
    (127, 129),
    (128, 128),
    (257, 63),
    (3, 2048),
    (2048, 3),
    (509, 521),
]


@pytest.mark.sampled(
    dated=20, pairs=[("spec", "seqlen_q"), ("spec", "dtype"), ("spec", "causal"), ("seqlen_q", "causal")]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_lengths(cp, spec, dtype, precision, seqlen_q, seqlen_k, causal):
    q, k, v = make_inputs(1, 2, 2, seqlen_q, seqlen_k, 64, dtype, seed=seqlen_q)
    check(cp, q, k, v, causal=causal, **options_of(spec, precision))


@pytest.mark.sampled(dated=4, pairs=[("spec", "heads")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 1), (5, 5)])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_grouped_heads(cp, spec, dtype, precision, heads, kv_heads):
    q, k, v = make_inputs(3, heads, kv_heads, 70, 90, 64, dtype)
    check(cp, q, k, v, causal=True, **options_of(spec, precision))


@pytest.mark.sampled(dated=6, pairs=[("spec", "kind"), ("dtype", "kind")])
@pytest.mark.parametrize("kind", ["huge", "equal", "zero_scale", "inf_scores", "minus_inf_scores", "nan"])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_unusual_values(cp, spec, dtype, precision, kind):
    # Huge scores: only rows whose two largest are close show an error. Many rows, for there are few such.
    q, k, v = make_inputs(16 if kind == "huge" else 1, 2, 2, 150, 180, 64, dtype)
    scale = None
    if kind == "huge":
        q, k = (q * 40).astype(q.dtype), (k * 30).astype(k.dtype)  # scores up to about ±1e4
    elif kind == "equal":
        q[...] = 1
        k[...] = 0.5
    elif kind == "zero_scale":
        scale = 0.0
    elif kind == "inf_scores":
        q, k = np.abs(q), np.abs(k)
        k[:, :, 100, 3] = np.inf  # every row sees +inf: NaN, as in IEEE arithmetic
    elif kind == "minus_inf_scores":
        q, k = np.abs(q), np.abs(k)
        k[:, 0, 100:110, 3] = -np.inf
        k[:, 1, :, 3] = -np.inf  # a whole head whose scores are all -inf
    else:
        q[:, 1, 17, 5] = np.nan
    check(cp, q, k, v, causal=kind in ("equal", "zero_scale"), scale=scale, **options_of(spec, precision))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("algorithm", ["fa2", "naive"])
def test_float32_rows_of_very_different_size(cp, algorithm, head_dim, causal):
    """Early causal rows see small values only, beside large ones in the same tile."""
    for seed in range(3):
        inputs = uneven_rows(head_dim=head_dim, seed=seed)
        out, _ = run(cp, *inputs, causal=causal, algorithm=algorithm)
        assert_every_row(out, *inputs, causal)


@pytest.mark.sampled(dated=6, pairs=[("spec", "offset"), ("dtype", "offset")])
@pytest.mark.parametrize("offset", [0, 8, 4, 2, 1], ids=lambda n: f"{n}_elements")
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_views_into_poisoned_buffers(cp, spec, dtype, precision, offset):
    """Misaligned slices of larger buffers; everything around q, k and v is NaN, around out a sentinel."""
    arrays_ = make_inputs(2, 2, 2, 75, 101, 40, dtype)
    inputs = []
    for x in arrays_:
        b, h, s, d = x.shape
        buffer = cp.full((b, h, s + 9, d + 24 + offset), cp.nan, x.dtype)
        view = buffer[:, :, 5 : 5 + s, offset : offset + d]
        view[...] = cp.asarray(x)
        inputs.append(view)
    b, h, s, d = arrays_[0].shape
    buffer = cp.full((b, h, s + 9, d + 24 + offset), 7, arrays_[0].dtype)
    out = buffer[:, :, 5 : 5 + s, offset : offset + d]
    out[...] = cp.nan
    options = options_of(spec, precision)
    if spec.uses_copy_engine and offset * out.itemsize % 16:
        with pytest.raises(ValueError, match="16-byte aligned rows"):
            cufa.flash_attention(*inputs, causal=True, out=out, **options)
        options["algorithm"] = "auto"  # finds another kernel
    _, lse = cufa.flash_attention(*inputs, causal=True, out=out, return_lse=True, **options)
    assert_attention(cp.asnumpy(out), cp.asnumpy(lse), *arrays_, causal=True, precision=precision)
    out[...] = 7
    assert bool((buffer == 7).all()), "wrote outside of out"


@pytest.mark.sampled(dated=4, pairs=[("spec", "causal"), ("seqlen_q", "causal")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (300, 300), (129, 400), (400, 129), (64, 1000), (513, 512)]
)
@pytest.mark.parametrize("spec", [s for s in SPECS if s.algorithm != "naive"], ids=lambda s: s.name)
def test_tile_counters_equal_the_schedule(cp, cuda, spec, seqlen_q, seqlen_k, causal):
    q, k, v = (cp.asarray(x) for x in make_inputs(2, 2, 1, seqlen_q, seqlen_k, 64, spec.dtypes[0]))
    problem = make_problem(q, k, v, causal)
    for config in fitting_configs(spec, 64, cuda.current_device()):
        plan = make_plan(problem, cuda.current_device(), spec.algorithm, config=config)
        records = cuda.trace(plan, forward_operands(q, k, v, cp))
        assert_tiles(plan, records)
        assert (records["end_ns"] >= records["start_ns"]).all() and (records["start_ns"] > 0).all()


@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_repeats_are_bit_identical(cp, spec, dtype, precision):
    q, k, v = make_inputs(4, 8, 4, 333, 777, 64, dtype)
    first, first_lse = run(cp, q, k, v, causal=True, **options_of(spec, precision))
    for _ in range(5):
        again, lse = run(cp, q, k, v, causal=True, **options_of(spec, precision))
        assert again.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


def test_skipping_changes_no_result(cp):
    """The one change from v1 to v2 in isolation: masked tiles add nothing to a row."""
    q, k, v = make_inputs(1, 4, 4, 500, 700, 64, "bfloat16")
    skipped, _ = run(cp, q, k, v, causal=True, algorithm="fa2", num_splits=1)
    computed, _ = run(cp, q, k, v, causal=True, algorithm="fa2_noskip")
    np.testing.assert_allclose(
        skipped.astype(np.float32), computed.astype(np.float32), rtol=2**-7, atol=2**-9
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec_dtype=st.sampled_from(VARIANTS),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    seqlen_q=st.integers(1, 400),
    seqlen_k=st.integers(1, 400),
    head_dim=st.sampled_from([8, 40, 64, 96, 128]),
    causal=st.booleans(),
    layout=st.sampled_from(["bhsd", "bshd"]),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_any_shape(
    cp, spec_dtype, batch, kv_heads, groups, seqlen_q, seqlen_k, head_dim, causal, layout, spread
):
    spec, dtype, precision = spec_dtype
    q, k, v = make_inputs(
        batch, kv_heads * groups, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, layout=layout, spread=spread
    )
    check(cp, q, k, v, causal=causal, layout=layout, **options_of(spec, precision))


def test_broadcast_and_reversed_inputs(cp):
    """Strides that the copy engine does not take: auto goes on with a kernel that does."""
    q, k, v = make_inputs(2, 3, 3, 60, 80, 64, "float16")
    k = np.broadcast_to(k[:, :1], k.shape)
    views = cp.asarray(q), cp.broadcast_to(cp.asarray(k[:, :1]), k.shape), cp.asarray(v)[:, :, ::-1]
    for _ in range(2):
        out, lse = cufa.flash_attention(*views, causal=True, return_lse=True)
        assert_attention(cp.asnumpy(out), cp.asnumpy(lse), q, k, v[:, :, ::-1], causal=True)


@pytest.mark.alone
def test_more_than_2_to_the_31_elements(cp):
    """Offsets past 2³¹ elements: along the batch axis, and inside one head through a huge row stride."""
    b, h, s, d = 33000, 8, 64, 128
    small = cp.random.default_rng(0).standard_normal((64, h, s, d), dtype=cp.float32).astype(cp.float16)
    q = cp.empty((b, h, s, d), cp.float16)
    for start in range(0, b, 64):
        q[start : start + 64] = small[: min(64, b - start)]
    assert q.size > 2**31
    out = poisoned_like(q, cp)
    cufa.flash_attention(q, q, q, out=out, causal=True)
    tail = cp.asnumpy(q[-1:])
    assert_attention(cp.asnumpy(out[-1:]), None, tail, tail, tail, causal=True)
    del q, out
    rows = cp.full((40, 2**26 + 64), cp.nan, cp.float16)
    x = rows[None, None, :, -64:]
    x[...] = small[:1, :1, :40, :64]
    host = cp.asnumpy(x)
    assert_attention(cp.asnumpy(cufa.flash_attention(x, x, x)), None, host, host, host)
