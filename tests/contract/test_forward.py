"""The contract of the forward: out and lse within the bound of support.assert_attention of float64, for every kernel,
dtype, tiling and shape; zeros where a row sees no key; the same bits in every run; tiles as the schedule says.

Executed kernels run in checked mode: a race, a deadlock or an access out of range fails the test, too.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, backends, contract, variants
from cpu_support import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS, assert_visited
from support import (
    DTYPES,
    EPSILON,
    assert_attention,
    assert_every_row,
    assert_tiles,
    make_inputs,
    poisoned_like,
    uneven_rows,
)

import cufa
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.plan.dense import FORWARD
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import Execution, emulate

BOTH = (False, True)
PLAIN = Execution("plain")


def check(
    backend, spec, precision, q, k, v, *, trace=None, config=None, blocks=None, execution=None, **options
):
    """One call, held to float64; executed kernels are traced, and their tiles held to the schedule."""
    trace = backend is EMULATE if trace is None else trace
    config = SMALL if backend is CPU and config is None else config
    how = {"trace": trace, "config": config, "blocks": blocks, "execution": execution}
    done = backend.forward(q, k, v, algorithm=spec.algorithm, precision=precision, **how, **options)
    assert_attention(done.out, done.lse, q, k, v, precision=precision, **options)
    assert backend is CPU or done.plan is None or done.plan.spec is spec
    if trace:
        assert_tiles(done.plan, done.records)
    return done


def one_dtype(backend, spec, dtype, precision, *_) -> bool:
    """Of each kernel the first dtype, of float32 the exact precision."""
    return dtype == spec.dtypes[0] and precision != "tf32"


def smallest(spec: Kernel, head_dim: int = 64) -> TileConfig:
    """The config with the smallest tiles: the most tiles for the length."""
    fitting = fitting_configs(spec, head_dim, Device.typical("sm_90"))
    return min(fitting, key=lambda c: (c.block_q * c.block_kv, str(c)))


# --- Shapes -----------------------------------------------------------------------------------------------

#: (batch, heads, kv_heads, seqlen_q, seqlen_k) around the tiles of each backend.
SHAPES = {
    "cpu": [
        (2, 4, 2, *lengths)
        for lengths in [
            (1, 1), (1, 97), (97, 1), (15, 23), (16, 24), (17, 25), (31, 49), (53, 53), (5, 211), (211, 5), (48, 48)
        ]
    ],
    "emulate": [(2, 2, 1, 1, 1), (2, 4, 2, 1, 131), (2, 2, 1, 150, 17), (2, 3, 1, 67, 101)],
    "gpu": [
        (1, 2, 2, *lengths)
        for lengths in [
            (1, 1), (1, 1000), (1000, 1), (7, 13), (127, 129), (128, 128), (257, 63), (3, 2048), (2048, 3), (509, 521)
        ]
    ],
}  # fmt: skip


@pytest.mark.sampled(
    on="gpu", dated=20, pairs=[("spec", "shape"), ("spec", "dtype"), ("spec", "causal"), ("shape", "causal")]
)
@contract(
    "shape, causal",
    cpu=itertools.product(SHAPES["cpu"], BOTH),
    emulate=itertools.product(SHAPES["emulate"], [True]),
    gpu=itertools.product(SHAPES["gpu"], BOTH),
)
def test_lengths(backend, spec, dtype, precision, shape, causal):
    layout, head_dim = ("bhsd", 24) if backend is CPU else ("bshd", 64)
    inputs = make_inputs(*shape, head_dim, dtype, layout=layout, seed=shape[3])
    check(backend, spec, precision, *inputs, causal=causal, layout=layout)


@pytest.mark.sampled(on="gpu", dated=4, pairs=[("spec", "heads")])
@contract(
    "heads, causal",
    cpu=itertools.product([(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (12, 4)], BOTH),
    gpu=itertools.product([(1, 1), (6, 2), (8, 1), (5, 5)], [True]),
    serves=lambda backend, spec, dtype, *_: backend is GPU or dtype == "float32",
)
def test_grouped_heads(backend, spec, dtype, precision, heads, causal):
    """Query heads and key/value heads."""
    inputs = make_inputs(3, *heads, 70, 90, 64, dtype)
    check(backend, spec, precision, *inputs, causal=causal)
    if backend is CPU:  # several heads to a tile
        check(backend, spec, precision, *inputs, causal=causal, config=FORWARD.cpu_config)


@pytest.mark.sampled(on="gpu", dated=40)
@pytest.mark.sampled(on="emulate", fixed=6)
@contract(
    "head_dim",
    cpu=[8, 40, 72, 128, 256],
    emulate=[8, 40, 96, 128, 192, 256],
    gpu=range(8, 257, 8),
    serves=lambda backend, spec, dtype, *_: (
        backend is not CPU or (spec.algorithm, dtype) == ("fa2", "float32")
    ),
)
def test_head_dims(backend, spec, dtype, precision, head_dim):
    if backend is not GPU:
        inputs = make_inputs(1, 1, 1, 70, 90, head_dim, dtype)
        check(backend, spec, precision, *inputs, causal=True, trace=False)
        return
    # Layout and mask alternate over head dims: both are covered for every kernel, at half the compiles.
    layout = ("bhsd", "bshd")[head_dim // 8 % 2]
    for causal in BOTH if head_dim in (64, 128, 256, 40) else ((head_dim // 16) % 2 == 0,):
        inputs = make_inputs(2, 4, 2, 150, 203, head_dim, dtype, layout=layout, seed=head_dim)
        check(backend, spec, precision, *inputs, causal=causal, layout=layout)


def tilings(backend):
    configs = {(spec, config) for _, spec, *_ in variants(backend) for config in spec.configs}
    return itertools.product(sorted({config for _, config in configs}, key=str), BOTH)


@pytest.mark.sampled(on="gpu", dated=10, pairs=[("spec", "config"), ("spec", "dtype"), ("spec", "causal")])
@pytest.mark.sampled(on="emulate", fixed=24, dated=8, pairs=[("spec", "dtype"), ("spec", "precision")])
@contract(
    "config, causal",
    emulate=tilings(EMULATE),
    gpu=tilings(GPU),
    serves=lambda backend, spec, dtype, precision, config, causal: config in spec.configs,
)
def test_every_tiling(backend, spec, dtype, precision, config, causal):
    """Executed: two query blocks and three key blocks, the last ones ragged. Without a mask as a GPU runs it, causal
    with records of the tiles: one build per case. On a GPU: every edge of a tile, at both ends of its head dims."""
    bq, bk, least = config.block_q, config.block_kv, max(config.min_head_dim, 64)
    if backend is EMULATE:
        if config not in fitting_configs(spec, least, backend.device):
            pytest.skip(f"{config} does not fit head_dim {least} on sm_90")
        inputs = make_inputs(2, 2, 1, bq + 5, 2 * bk + 3, least, dtype)
        check(backend, spec, precision, *inputs, causal=causal, config=config, trace=causal)
        return
    edges = [
        (1, 1), (bq, bk), (bq - 1, bk + 1), (bq + 1, bk - 1), (2 * bq + 1, 3 * bk), (1, 2 * bk + 1),
        (bq, 1),
    ]  # fmt: skip
    for head_dim in sorted({least if config.max_head_dim >= 64 else 8, config.max_head_dim}):
        if config not in fitting_configs(spec, head_dim, backend.device):
            continue  # made for another architecture's shared memory
        for lengths in edges:
            inputs = make_inputs(1, 2, 1, *lengths, head_dim, dtype, seed=sum(lengths))
            done = check(backend, spec, precision, *inputs, causal=causal, config=config)
            assert done.plan.config == config


@pytest.mark.sampled(dated=2)
@contract(cpu=True)
def test_default_tiles(backend, spec, dtype, precision):
    inputs = make_inputs(1, 2, 1, 600, 1100, 64, dtype)
    check(backend, spec, precision, *inputs, causal=True, config=FORWARD.cpu_config)


@backends("gpu")
def test_any_shape(backend):
    @settings(max_examples=150)
    @given(
        variant=st.sampled_from(variants(GPU)),
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 4),
        lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
        head_dim=st.sampled_from([8, 40, 64, 96, 128]),
        causal=st.booleans(),
        layout=st.sampled_from(["bhsd", "bshd"]),
        spread=st.sampled_from([0.1, 1.0, 10.0]),
    )
    def run(variant, batch, kv_heads, groups, lengths, head_dim, causal, layout, spread):
        _, spec, dtype, precision = variant
        shape = batch, kv_heads * groups, kv_heads, *lengths, head_dim
        inputs = make_inputs(*shape, dtype, layout=layout, spread=spread)
        check(backend, spec, precision, *inputs, causal=causal, layout=layout)

    run()


# --- Masks and soft caps ----------------------------------------------------------------------------------

MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "causal top-left": Band(right=0, diagonal="top-left"),
    "causal, diagonal -13": Band(right=0, diagonal=-13),
    "own key only": Band(0, 0),
    "one to the left": Band(1, 0, "top-left"),
    "7 each way": Band(7, 7, diagonal=5),
    "wider than a tile": Band(130, 20),
    "left edge only": Band(left=40),
    "beyond the keys": Band(3, 3, diagonal=500),
}


def check_band(spec, precision, lengths, mask, seed=0, execution=None, dtype=None):
    """On the smallest tiles: every score one by one, the schedule and the kernel's records agree on every tile."""
    inputs = make_inputs(1, 2, 1, *lengths, 64, dtype or spec.dtypes[0], seed=seed)
    done = check(
        EMULATE, spec, precision, *inputs, mask=mask, config=smallest(spec), execution=execution, trace=True
    )
    assert_visited(done.plan, mask.dense(*lengths), done.records)


@pytest.mark.sampled(each="mask", dated=0)
@contract("mask", emulate=MASKS, serves=one_dtype)
def test_bands(backend, spec, dtype, precision, mask):
    for lengths in ((1, 1), (7, 200), (63, 65), (64, 64), (127, 7), (200, 127), (65, 200)):
        check_band(spec, precision, lengths, MASKS[mask])


@pytest.mark.sampled(fixed=2, dated=1)
@contract(emulate=True, serves=one_dtype)
def test_any_band(backend, spec, dtype, precision):
    lengths = st.tuples(st.integers(1, 200), st.integers(1, 300))

    @given(mask=BANDS, lengths=lengths, seed=st.integers(0, 9))
    @settings(max_examples=15)
    def run(mask, lengths, seed):
        execution = Execution("plain", schedule=seed)
        check_band(spec, precision, lengths, mask, seed, execution, spec.dtypes[-1])

    run()


@contract("mask", emulate=["full", "7 each way"], serves=one_dtype)
def test_soft_caps(backend, spec, dtype, precision, mask):
    """A cap that bends most scores, and one so large that it changes none by more than rounding."""
    inputs = make_inputs(1, 2, 1, 65, 200, 64, dtype)
    options = {"mask": MASKS[mask], "config": smallest(spec)}
    check(backend, spec, precision, *inputs, softcap=0.7, **options)
    plain = check(backend, spec, precision, *inputs, **options)
    options |= {"algorithm": spec.algorithm, "precision": precision, "softcap": 1e3}
    huge = backend.forward(*inputs, **options)
    np.testing.assert_allclose(huge.lse, plain.lse, atol=5e-4 if dtype == "float16" else 2e-4)
    np.testing.assert_allclose(huge.out.astype(float), plain.out.astype(float), atol=4e-3)


@contract("lengths", cpu=[(60, 11)])
def test_rows_that_see_nothing_are_zeros(backend, spec, dtype, precision, lengths):
    done = check(backend, spec, precision, *make_inputs(2, 2, 1, *lengths, 8, dtype), causal=True)
    assert (done.out[:, :, :49] == 0).all() and (done.lse[:, :, :49] == -np.inf).all()


@contract(
    "mask, softcap",
    cpu=itertools.product(
        [Band(3, 0, 100), Band(3, 0, -100), Band(0, None, 7), Band(None, 0, -20)], [None, 2.0]
    ),
    serves=lambda backend, spec, dtype, *_: dtype == "float32",
)
def test_rows_that_a_mask_leaves_nothing(backend, spec, dtype, precision, mask, softcap):
    """All of them, the last or the first."""
    inputs = make_inputs(1, 2, 1, 50, 40, 8, dtype)
    done = check(backend, spec, precision, *inputs, mask=mask, softcap=softcap)
    nothing = ~mask.dense(50, 40).any(axis=1)
    assert nothing.any()
    assert (done.out[:, :, nothing] == 0).all() and np.isneginf(done.lse[:, :, nothing]).all()
    assert np.isfinite(done.lse[:, :, ~nothing]).all()


@backends("gpu")
def test_skipping_changes_no_result(backend):
    """The one change from v1 to v2 in isolation: masked tiles add nothing to a row."""
    inputs = make_inputs(1, 4, 4, 500, 700, 64, "bfloat16")
    skipped = backend.forward(*inputs, causal=True, algorithm="fa2", num_splits=1).out.astype(np.float32)
    computed = backend.forward(*inputs, causal=True, algorithm="fa2_noskip").out.astype(np.float32)
    np.testing.assert_allclose(skipped, computed, rtol=2**-7, atol=2**-9)


# --- Values -----------------------------------------------------------------------------------------------

KINDS = ["huge", "equal", "zero_scale", "inf_scores", "minus_inf_scores", "minus_inf_first", "nan"]


@pytest.mark.sampled(on="gpu", dated=6, pairs=[("spec", "kind"), ("dtype", "kind")])
@contract("kind", cpu=KINDS, gpu=KINDS)
def test_unusual_values(backend, spec, dtype, precision, kind):
    """NaN where float64 has NaN, zeros where every score is -inf, numbers within the bound."""
    # Huge scores: only rows whose two largest are close show an error. Such rows are few, so a GPU takes many.
    lengths = (150, 180) if backend is GPU else (60, 70)
    q, k, v = make_inputs(16 if kind == "huge" and backend is GPU else 1, 2, 2, *lengths, 64, dtype)
    scale, middle = None, lengths[1] // 2
    if kind == "huge" and backend is CPU:
        q, k, v = make_inputs(1, 2, 2, 50, 70, 16, dtype, spread=3000.0)
    elif kind == "huge":
        q, k = (q * 40).astype(q.dtype), (k * 30).astype(k.dtype)  # scores up to about ±1e4
    elif kind == "equal":
        q[...] = 1
        k[...] = 0.5
    elif kind == "zero_scale":
        scale = 0.0
    elif kind == "nan":
        q[:, 1, 17, 5] = np.nan
    else:
        q, k = np.abs(q), np.abs(k)
    if kind == "inf_scores":
        k[:, :, middle, 3] = np.inf  # every row sees +inf: NaN, as in IEEE arithmetic
    elif kind == "minus_inf_scores":
        k[:, 0, middle : middle + 10, 3] = -np.inf
        k[:, 1, :, 3] = -np.inf  # a whole head whose scores are all -inf
    elif kind == "minus_inf_first":  # the running maximum stays at -inf for a while
        k[:, :, :middle] = -np.inf
    check(backend, spec, precision, q, k, v, causal=kind in ("equal", "zero_scale"), scale=scale)
    if backend is CPU and kind == "huge":
        check(backend, spec, precision, q, k, v, causal=True)


@pytest.mark.sampled(on="emulate", fixed=1, dated=1)
@contract(
    "head_dim, causal",
    emulate=itertools.product([64, 256], BOTH),
    gpu=itertools.product([64, 128, 256], BOTH),
    serves=lambda backend, spec, dtype, precision, *_: (
        (dtype, precision) == ("float32", "float32")
        and (backend is EMULATE or spec.algorithm in ("fa2", "naive"))
    ),
)
def test_float32_rows_of_very_different_size(backend, spec, dtype, precision, head_dim, causal):
    """Early causal rows see small values only, beside large ones in the same tile."""
    for seed in range(3):
        inputs = uneven_rows(head_dim=head_dim, seed=seed)
        how = {"execution": PLAIN, "trace": False} if backend is EMULATE else {}
        done = backend.forward(*inputs, causal=causal, algorithm=spec.algorithm, precision=precision, **how)
        assert_every_row(done.out, *inputs, causal)


@contract(
    "size",
    gpu=[0.0, 1e-30, 1e-26],
    serves=lambda backend, spec, dtype, precision, *_: (
        precision == "float32" and spec.algorithm != "fa2_noskip"
    ),
)
def test_tiny_values(backend, spec, dtype, precision, size):
    """float32 kernels compute in pairs of float16 with a unit, which must neither vanish nor overflow."""
    rng = np.random.default_rng(3)
    q, k, v = ((rng.standard_normal((1, 2, 150, 64)) * x).astype(np.float32) for x in (1, 1, size))
    out = backend.forward(q, k, v, causal=True, algorithm=spec.algorithm).out
    exact = cufa.attention_reference(q, k, v, causal=True)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


@contract("below", emulate=BOTH)
def test_scores_as_large_as_promised(backend, spec, dtype, precision, below):
    """Within ±2e7 (see flash_attention) a row is the value of its best key, and nothing overflows."""
    q, k, v = make_inputs(1, 1, 1, 100, 90, 64, dtype)
    if below:
        q, k = abs(q), -abs(k)
    scores = q[0, 0].astype(float) @ k[0, 0].astype(float).T
    options = {"scale": 2e7 / abs(scores).max(), "algorithm": spec.algorithm, "precision": precision}
    done = backend.forward(q, k, v, execution=PLAIN, **options)
    first, second = np.sort(scores)[:, -1], np.sort(scores)[:, -2]
    clear = first - second > 1e-3 * abs(scores).max()  # tf32 rounds scores
    assert clear.mean() > 0.5
    assert np.isfinite(done.out.astype(float)).all() and np.isfinite(done.lse).all()
    best = v[0, 0].astype(float)[scores.argmax(1)]
    np.testing.assert_allclose(done.out[0, 0].astype(float)[clear], best[clear], rtol=1e-2, atol=1e-3)


@contract("", cpu=True, emulate=True, gpu=True, serves=lambda backend, spec, dtype, *_: dtype != "float64")
def test_values_as_large_as_promised(backend, spec, dtype, precision):
    """|v| * seqlen_k below 3.4e38, and float16 up to 65,472 (see flash_attention), where rounding raises the weights of
    all keys but one by almost 2**-11."""
    keys = 128
    weight = 8 * np.log(0.5 + 1.1 * 2**-12) if dtype == "float16" else 0.0
    q, k, v = (np.zeros((1, 1, n, 64), DTYPES[dtype]) for n in (4, keys, keys))
    q[..., :2] = 1
    k[..., 1:, 0] = weight
    k[..., 1:, 1] = weight - k[..., 1:, 0].astype(float)
    v[...] = 65472 if dtype == "float16" else 3.3e38 / keys
    out = backend.forward(q, k, v, algorithm=spec.algorithm, precision=precision).out
    np.testing.assert_allclose(
        out.astype(float),
        cufa.attention_reference(q, k, v),
        rtol=32 * EPSILON[dtype] + (precision == "tf32") * 2**-10,
    )


# --- Memory -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(pairs=[("dtype", "alignment")])
@contract(
    "alignment",
    emulate=[8, 4, 2],
    serves=lambda backend, spec, dtype, precision, alignment: (
        not spec.uses_copy_engine and alignment >= DTYPES[dtype].itemsize
    ),
)
def test_narrow_copies(backend, spec, dtype, precision, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    extra = alignment // DTYPES[dtype].itemsize
    wide = make_inputs(1, 2, 2, 70, 90, 64 + extra, dtype)
    done = check(backend, spec, precision, *(x[..., extra:] for x in wide), causal=True)
    assert done.plan.problem.alignment == alignment


@pytest.mark.sampled(dated=6, pairs=[("spec", "offset"), ("dtype", "offset")])
@contract("offset", gpu=[0, 8, 4, 2, 1])
def test_views_into_poisoned_buffers(backend, spec, dtype, precision, offset, cp):
    """Misaligned slices of larger buffers; everything around q, k and v is NaN, around out a sentinel."""
    arrays_ = make_inputs(2, 2, 2, 75, 101, 40, dtype)

    def around(x, value):
        b, h, s, d = x.shape
        buffer = cp.full((b, h, s + 9, d + 24 + offset), value, x.dtype)
        return buffer, buffer[:, :, 5 : 5 + s, offset : offset + d]

    inputs = [around(x, cp.nan)[1] for x in arrays_]
    for view, x in zip(inputs, arrays_, strict=True):
        view[...] = cp.asarray(x)
    buffer, out = around(arrays_[0], 7)
    out[...] = cp.nan
    options = {"algorithm": spec.algorithm, "precision": precision, "causal": True, "out": out}
    if spec.uses_copy_engine and offset * out.itemsize % 16:
        with pytest.raises(ValueError, match="16-byte aligned rows"):
            cufa.flash_attention(*inputs, **options)
        options["algorithm"] = "auto"  # finds another kernel
    _, lse = cufa.flash_attention(*inputs, return_lse=True, **options)
    assert_attention(out.get(), lse.get(), *arrays_, causal=True, precision=precision)
    out[...] = 7
    assert bool((buffer == 7).all()), "wrote outside of out"


@backends("gpu")
def test_broadcast_and_reversed_inputs(backend, cp):
    """Strides that the copy engine does not take: auto goes on with a kernel that does."""
    q, k, v = make_inputs(2, 3, 3, 60, 80, 64, "float16")
    k = np.broadcast_to(k[:, :1], k.shape)
    views = cp.asarray(q), cp.broadcast_to(cp.asarray(k[:, :1]), k.shape), cp.asarray(v)[:, :, ::-1]
    for _ in range(2):
        out, lse = cufa.flash_attention(*views, causal=True, return_lse=True)
        assert_attention(out.get(), lse.get(), q, k, v[:, :, ::-1], causal=True)


@pytest.mark.alone
@backends("gpu")
def test_more_than_2_to_the_31_elements(backend, cp):
    """Offsets past 2³¹ elements: along the batch axis, and inside one head through a huge row stride."""
    b, h, s, d = 33000, 8, 64, 128
    small = cp.random.default_rng(0).standard_normal((64, h, s, d), dtype=cp.float32).astype(cp.float16)
    q = cp.empty((b, h, s, d), cp.float16)
    for start in range(0, b, 64):
        q[start : start + 64] = small[: min(64, b - start)]
    assert q.size > 2**31
    out = poisoned_like(q, cp)
    cufa.flash_attention(q, q, q, out=out, causal=True)
    tail = q[-1:].get()
    assert_attention(out[-1:].get(), None, tail, tail, tail, causal=True)
    del q, out
    rows = cp.full((40, 2**26 + 64), cp.nan, cp.float16)
    x = rows[None, None, :, -64:]
    x[...] = small[:1, :1, :40, :64]
    host = x.get()
    assert_attention(cufa.flash_attention(x, x, x).get(), None, host, host, host)


# --- The same bits, counters ------------------------------------------------------------------------------


@contract(emulate=True, gpu=True)
def test_same_bits_in_every_run(backend, spec, dtype, precision):
    """Executed: whatever order warps run in, and whenever copies land."""
    shape = (1, 2, 1, 100, 200, 64) if backend is EMULATE else (4, 8, 4, 333, 777, 64)
    inputs = make_inputs(*shape, dtype)
    orders = [None] * 5
    first_order = None
    if backend is EMULATE:
        first_order = Execution("checked", copies="early", threads=1)
        orders = [Execution("checked", order, "late", 2) for order in ("ascending", "descending", 1, 2)]
    first = check(backend, spec, precision, *inputs, causal=True, execution=first_order)
    for order in orders:
        again = check(backend, spec, precision, *inputs, causal=True, execution=order)
        assert again.out.tobytes() == first.out.tobytes() and again.lse.tobytes() == first.lse.tobytes()


@pytest.mark.sampled(dated=4, pairs=[("spec", "causal"), ("lengths", "causal")])
@contract(
    "lengths, causal",
    gpu=itertools.product([(1, 1), (300, 300), (129, 400), (400, 129), (64, 1000), (513, 512)], BOTH),
    serves=lambda *variant: one_dtype(*variant) and variant[1].algorithm != "naive",
)
def test_tile_counters_equal_the_schedule(backend, spec, dtype, precision, lengths, causal):
    inputs = make_inputs(2, 2, 1, *lengths, 64, dtype)
    for config in fitting_configs(spec, 64, backend.device):
        done = check(backend, spec, precision, *inputs, causal=causal, config=config, trace=True)
        records = done.records
        assert (records["end_ns"] >= records["start_ns"]).all() and (records["start_ns"] > 0).all()


@contract("causal", emulate=BOTH, serves=one_dtype)
def test_counters(backend, spec, dtype, precision, causal):
    """Products and bytes follow from the tiles visited."""
    q, k, v = make_inputs(1, 2, 2, 256, 256, 64, dtype)
    run = emulate(q, k, v, algorithm=spec.algorithm, precision=precision, causal=causal, mode="counted")
    assert run.totals["bank_conflicts"] == 0 or spec.name == "naive"
    assert run.totals["global_write_bytes"] >= run.out.nbytes + run.lse.nbytes
    assert run.totals["global_read_bytes"] >= q.nbytes + k.nbytes + v.nbytes
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    if precision is None and spec.name != "naive":
        config = run.plan.config
        products = run.totals["tiles_visited"] * 2 * config.block_q * config.block_kv * 64
        # A warpgroup of FA3 skips tiles of its own 64 rows.
        least = products / 2 if spec.name == "fa3_forward" else products
        assert least <= run.totals["products"] <= products
        assert run.totals["exponentials"] >= run.totals["products"] / 128
