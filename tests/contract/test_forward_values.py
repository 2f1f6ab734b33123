"""The contract of the forward for values that are large, tiny or not numbers, and memory of any alignment and size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, backends, contract
from forward_contract import BOTH, PLAIN, check
from support import (
    DTYPES,
    EPSILON,
    assert_attention,
    assert_every_row,
    make_inputs,
    poisoned_like,
    uneven_rows,
)

import cufa

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
