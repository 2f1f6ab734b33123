"""Gradients of a score function's arrays with ``deterministic=True``: the same bits, whatever the order in which thread
blocks add, and within the bounds of float64."""

from __future__ import annotations

import numpy as np
import pytest
from support import DTYPES

import cufa
from cufa import masks

KERNELS = [
    ("fa2", "float16", 64), ("fa2", "bfloat16", 136), ("fa2", "float32", 64), ("fa3", "bfloat16", 64),
    ("fa3", "float16", 128),
]  # fmt: skip
MASKS = {"full": masks.full(), "causal": masks.causal(), "prefix": masks.prefix(9)}
SIZE = {"float16": 6e-3, "bfloat16": 3e-2, "float32": 3e-5}


def relative(s, b, h, i, j, table):
    return s / 2 + table[h, np.clip(j - i, -20, 19) + 20]


def product(s, b, h, i, j, u, w):
    return s + u[h, j % 7] * w[b, i % 5]


def case(kind, dtype, head_dim, mask, factor=1.0, rows=150, keys=210):
    """(arrays of a backward call, options, float64's results)"""
    rng = np.random.default_rng(3)
    q, dout = (rng.standard_normal((2, 4, rows, head_dim)).astype(DTYPES[dtype]) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, keys, head_dim)).astype(DTYPES[dtype]) for _ in range(2))
    dout *= factor
    options = {"mask": MASKS[mask], "gradients": ("table",), "deterministic": True}
    if kind == "product":
        arrays = {"u": rng.standard_normal((4, 7)), "w": rng.standard_normal((2, 5))}
        options |= {"gradients": ("w", "u")}
        options["score"] = cufa.score(product, **{name: x.astype(np.float32) for name, x in arrays.items()})
    elif kind == "bias":
        options |= {
            "bias": rng.standard_normal((1, 4, rows, keys)).astype(np.float32),
            "gradients": ("bias",),
        }
    else:
        options["score"] = cufa.score(relative, table=rng.standard_normal((4, 40)).astype(np.float32))
    known = {name: x for name, x in options.items() if name not in ("gradients", "deterministic")}
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **known)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    return (
        given,
        options,
        cufa.attention_reference_backward(dout, q, k, v, gradients=options["gradients"], **known),
    )


def check(found, expected, dtype):
    for x, exact in zip(found, expected, strict=True):
        assert x.shape == exact.shape
        size = max(np.abs(exact).max(), np.abs(expected[0]).max())
        np.testing.assert_allclose(x.astype(np.float64), exact, atol=SIZE[dtype] * size, rtol=0)


@pytest.mark.emulate
@pytest.mark.sampled(fixed=3, dated=1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["relative", "product", "bias"])
@pytest.mark.parametrize(("algorithm", "dtype", "head_dim"), KERNELS)
def test_no_order_of_blocks_changes_a_bit(algorithm, dtype, head_dim, kind, mask):
    given, options, expected = case(kind, dtype, head_dim, mask)
    bits = set()
    for schedule in ("ascending", "descending", 3):
        done = cufa.emulate_backward(
            *given, algorithm=algorithm, mode="checked", schedule=schedule, **options
        )
        assert not done.findings
        check(done.results.values(), expected, dtype)
        bits.add(b"".join(x.tobytes() for x in done.results.values()))
    assert len(bits) == 1


@pytest.mark.emulate
@pytest.mark.parametrize("factor", [2.0**-90, 2.0**70, np.inf])
def test_gradients_of_any_size(factor):
    """Far from 1 as well, and NaN where an addend is infinite or NaN."""
    given, options, expected = case("relative", "float32", 64, "causal", min(factor, 1e30))
    if factor == np.inf:
        given[0][0, 1, 3] = np.inf
    done = cufa.emulate_backward(*given, algorithm="fa2", **options)
    found = [*done.results.values()]
    if factor == np.inf:
        rows = np.isnan(found[3]).any(axis=1)
        assert rows.tolist() == [False, True, False, False]
        assert np.isfinite(found[3][[0, 2, 3]]).all()
    else:
        check(found[3:], expected[3:], "float32")


@pytest.mark.gpu
@pytest.mark.sampled(fixed=9, dated=3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["relative", "product", "bias"])
@pytest.mark.parametrize(("algorithm", "dtype", "head_dim"), KERNELS)
def test_on_a_gpu(cp, algorithm, dtype, head_dim, kind, mask):
    given, options, expected = case(kind, dtype, head_dim, mask, rows=700, keys=900)
    there = [cp.asarray(x) for x in given]
    bits = set()
    for _ in range(10):
        found = [x.get() for x in cufa.flash_attention_backward(*there, algorithm=algorithm, **options)]
        bits.add(b"".join(x.tobytes() for x in found))
    check(found, expected, dtype)
    assert len(bits) == 1


def test_a_fixed_order_takes_workspace():
    how = {"score": cufa.score(relative, table=np.ones((4, 40), np.float32)), "gradients": ("table",)}
    how |= {"dtype": "float16", "device": "sm_90"}
    plans = [cufa.plan_backward((1, 4, 64, 64), deterministic=x, **how) for x in (True, False)]
    assert plans[0].spec.name == plans[1].spec.name
    assert plans[0].workspace - plans[1].workspace >= 80 * 160  # a sum for each element
    assert "80 bytes of workspace for each element" in str(plans[0])
    assert "exact sums" not in str(plans[1])
