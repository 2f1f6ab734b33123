"""The float64 gradients against finite differences of the float64 reference, and the identities that they obey."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS
from support import DTYPES, make_inputs

from cufa import attention_reference, attention_reference_backward
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.reference import dense as reference

STEP = 1e-4


def loss(q, k, v, dout, dlse, **scores):
    """Linear in o and lse, with these derivatives. Rows that see nothing have lse -inf, which is constant."""
    o, lse = attention_reference(q, k, v, return_lse=True, **scores)
    of_o = (o * dout).sum()
    return of_o if dlse is None else of_o + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()


def differences(q, k, v, dout, dlse, **scores):
    """Gradients by moving one number at a time: central differences of fourth order."""
    found = []
    for x in (q, k, v):
        of_x = np.empty_like(x)
        for place in np.ndindex(x.shape):
            at = x[place]
            moved = []
            for steps in (-2, -1, 1, 2):
                x[place] = at + steps * STEP
                moved.append(loss(q, k, v, dout, dlse, **scores))
            x[place] = at
            of_x[place] = (moved[0] - 8 * moved[1] + 8 * moved[2] - moved[3]) / (12 * STEP)
        found.append(of_x)
    return found


def draw(q, seed=7):
    """dout and dlse for these queries."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(q.shape), rng.standard_normal(q.shape[:3])


@pytest.mark.sampled(dated=12, pairs=[("mask", "softcap"), ("mask", "seqlen_q"), ("mask", "heads")])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(2, 1), Band(0, None, -2)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (3, 5), (5, 3), (4, 4)])
def test_finite_differences(seqlen_q, seqlen_k, heads, kv_heads, mask, softcap, with_dlse):
    q, k, v = make_inputs(1, heads, kv_heads, seqlen_q, seqlen_k, 4, "float64")
    dout, dlse = draw(q)
    dlse = dlse if with_dlse else None
    scores = {"mask": mask, "softcap": softcap, "scale": 0.7}
    got = attention_reference_backward(dout, q, k, v, dlse=dlse, **scores)
    for x, y in zip(got, differences(q, k, v, dout, dlse, **scores), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9)


@given(BANDS, st.integers(1, 6), st.integers(1, 6), st.sampled_from([None, 0.5]), st.integers(0, 99))
@settings(max_examples=40)
def test_finite_differences_under_any_mask(mask, seqlen_q, seqlen_k, softcap, seed):
    q, k, v = make_inputs(1, 2, 1, seqlen_q, seqlen_k, 2, "float64", seed=seed)
    dout, dlse = draw(q, seed)
    got = attention_reference_backward(dout, q, k, v, dlse=dlse, mask=mask, softcap=softcap)
    expected = differences(q, k, v, dout, dlse, mask=mask, softcap=softcap)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8)


@given(BANDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from([(1, 1), (4, 2), (3, 1)]))
@settings(max_examples=60)
def test_identities(mask, seqlen_q, seqlen_k, heads):
    """Σ dS ∘ S is Σ dq ∘ q taken from the rows and Σ dk ∘ k taken from the columns. A row of dS sums to 0: where
    all keys are 1, dq is that sum times the scale. The weights of a row sum to 1."""
    q, k, v = make_inputs(2, *heads, seqlen_q, seqlen_k, 8, "float64")
    dout, _ = draw(q)
    dq, dk, _ = attention_reference_backward(dout, q, k, v, mask=mask)
    of_queries = (dq * q).sum(axis=(2, 3)).reshape(2, heads[1], -1).sum(axis=2)
    np.testing.assert_allclose(of_queries, (dk * k).sum(axis=(2, 3)), rtol=1e-10, atol=1e-10)
    k[..., 0] = 1
    dq, _, dv = attention_reference_backward(dout, q, k, v, mask=mask)
    np.testing.assert_allclose(dq[..., 0], 0, atol=1e-12)
    seen = mask.dense(seqlen_q, seqlen_k).any(axis=1)
    total = dout[:, :, seen].sum(axis=2).reshape(2, heads[1], -1, 8).sum(axis=2)
    np.testing.assert_allclose(dv.sum(axis=2), total, rtol=1e-10, atol=1e-10)


def test_a_loss_of_lse_alone_leaves_the_values_alone():
    q, k, v = make_inputs(1, 2, 1, 5, 7, 8, "float64")
    _, dlse = draw(q)
    dq, dk, dv = attention_reference_backward(np.zeros_like(q), q, k, v, causal=True, dlse=dlse)
    assert (dv == 0).all() and (dq != 0).any() and (dk != 0).any()


def test_what_sees_nothing_or_is_not_seen_has_no_gradient():
    q, k, v = make_inputs(1, 2, 1, 9, 6, 8, "float64")
    mask = Band(1, 0, -2)  # rows 0, 1 and from 9 on see nothing; all keys are seen
    dout, dlse = draw(q)
    dq, _, _ = attention_reference_backward(dout, q, k, v, mask=mask, dlse=dlse)
    assert (dq[:, :, :2] == 0).all() and (dq[:, :, 3:8] != 0).any()
    _, dk, dv = attention_reference_backward(dout, q, k, v, mask=Band(None, 0, -7), dlse=dlse)
    assert (dk[:, :, 2:] == 0).all() and (dv[:, :, 2:] == 0).all() and (dv[:, :, 0] != 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_seen_plays_no_part(bad):
    """Bad numbers in keys and values, and in queries, their gradients and dlse, on either side of the mask."""
    q, k, v = make_inputs(1, 2, 2, 6, 6, 8, "float64")
    dout, dlse = draw(q)
    mask = Band(0, 0)
    clean = attention_reference_backward(dout, q, k, v, mask=mask, dlse=dlse)
    for x in (q, k, v, dout, dlse[..., None]):
        x[:, :, 4:] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = attention_reference_backward(dout, q, k, v, mask=mask, dlse=dlse)
    for x, y in zip(got, clean, strict=True):
        np.testing.assert_allclose(x[:, :, :4], y[:, :, :4], rtol=1e-14)
        assert np.isnan(x[:, :, 4:]).all()


def test_gradients_of_rows_that_see_nothing_are_not_read():
    q, k, v = make_inputs(1, 2, 1, 6, 3, 8, "float64")
    dout, dlse = draw(q)
    clean = attention_reference_backward(dout, q, k, v, causal=True, dlse=dlse)
    dout[:, :, :3], dlse[:, :, :3] = np.nan, np.inf
    got = attention_reference_backward(dout, q, k, v, causal=True, dlse=dlse)
    for x, y in zip(got, clean, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_widened_first(dtype):
    q, k, v = make_inputs(1, 2, 1, 5, 6, 8, dtype)
    dout = draw(q)[0].astype(q.dtype)
    wide = attention_reference_backward(*(x.astype(np.float64) for x in (dout, q, k, v)))
    for x, y in zip(attention_reference_backward(dout, q, k, v), wide, strict=True):
        np.testing.assert_array_equal(x, y)


def test_layout_bshd():
    q, k, v = make_inputs(2, 4, 2, 5, 7, 8, "float32")
    dout, dlse = draw(q)
    expected = attention_reference_backward(dout, q, k, v, causal=True, dlse=dlse)
    swapped = [x.swapaxes(1, 2) for x in (dout, q, k, v)]
    got = attention_reference_backward(*swapped, causal=True, dlse=dlse, layout="bshd")
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x.swapaxes(1, 2), y)


def test_row_chunks_do_not_show(monkeypatch):
    q, k, v = make_inputs(1, 2, 1, 21, 30, 8, "float64")
    dout, dlse = draw(q)
    whole = attention_reference_backward(dout, q, k, v, causal=True, dlse=dlse)
    monkeypatch.setattr(reference, "_ROWS", 4)
    for x, y in zip(attention_reference_backward(dout, q, k, v, causal=True, dlse=dlse), whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 0), (0, 3), (0, 0)])
def test_empty(seqlen_q, seqlen_k):
    q, k, v = make_inputs(1, 2, 1, seqlen_q, seqlen_k, 8, "float64")
    got = attention_reference_backward(np.full(q.shape, np.nan), q, k, v)
    for x, y in zip(got, (q, k, v), strict=True):
        assert x.shape == y.shape and (x == 0).all()


def test_shapes_that_do_not_fit():
    q, k, v = make_inputs(1, 2, 1, 3, 4, 8, "float64")
    with pytest.raises(ValueError, match=r"dout .* must have the shape of q"):
        attention_reference_backward(q[:, :, :2], q, k, v)
    with pytest.raises(ValueError, match="fit together"):
        attention_reference_backward(q, q, k, v[:, :, :2])
    for dlse in (np.ones(3), np.ones((1, 3, 2)), np.ones((2, 2, 3))):
        with pytest.raises(ValueError, match=r"dlse has shape .* one number per query, .* = \(1, 2, 3\)"):
            attention_reference_backward(q, q, k, v, dlse=dlse)
