"""The float64 reference against the definition written out as one array program (``support.written_out``)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS
from support import DTYPES, make_inputs, written_out

import cufa
from cufa import attention_reference
from cufa.reference import dense as reference


@given(
    BANDS,
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from([4, 2, 1]),
    st.sampled_from([None, 0.5, 20.0]),
)
def test_definition(mask, seqlen_q, seqlen_k, kv_heads, softcap):
    q, k, v = make_inputs(2, 4, kv_heads, seqlen_q, seqlen_k, 8, "float64")
    o, lse = attention_reference(q, k, v, mask=mask, softcap=softcap, scale=0.7, return_lse=True)
    seen = mask.dense(seqlen_q, seqlen_k)
    expected_o, expected_lse = written_out(q, k, v, seen=seen, scale=0.7, cap=softcap)
    np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)
    assert o.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_widened_first(dtype):
    q, k, v = make_inputs(1, 2, 1, 5, 6, 8, dtype)
    wide = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_array_equal(attention_reference(q, k, v), wide)


def test_layout_bshd():
    q, k, v = make_inputs(2, 4, 2, 5, 7, 8, "float32")
    expected, expected_lse = attention_reference(q, k, v, causal=True, return_lse=True)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    o, lse = attention_reference(*swapped, causal=True, return_lse=True, layout="bshd")
    np.testing.assert_array_equal(o.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_scale_defaults_to_the_papers():
    q, k, v = make_inputs(1, 1, 1, 4, 4, 16, "float64")
    np.testing.assert_array_equal(attention_reference(q, k, v), attention_reference(q, k, v, scale=0.25))


@pytest.mark.parametrize("causal", [False, True])
def test_row_chunks_do_not_show(monkeypatch, causal):
    """Rows are worked on in chunks to bound memory."""
    q, k, v = make_inputs(1, 1, 1, 21, 30, 8, "float64")
    whole = attention_reference(q, k, v, causal=causal, return_lse=True)
    monkeypatch.setattr(reference, "_ROWS", 4)
    for chunked, expected in zip(
        attention_reference(q, k, v, causal=causal, return_lse=True), whole, strict=True
    ):
        np.testing.assert_allclose(chunked, expected, rtol=1e-14, atol=1e-15)


def test_no_keys_at_all():
    q = np.ones((1, 2, 3, 8))
    nothing = np.ones((1, 2, 0, 8))
    o, lse = attention_reference(q, nothing, nothing, return_lse=True)
    assert (o == 0).all()
    assert (lse == -np.inf).all()


def test_scores_of_minus_infinity_only():
    q, k, v = make_inputs(1, 1, 1, 2, 3, 8, "float64")
    q[0, 0, 1] = -np.inf
    k[...] = np.abs(k)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, lse = attention_reference(q, k, v, return_lse=True)
    assert (o[0, 0, 1] == 0).all() and lse[0, 0, 1] == -np.inf
    assert np.isfinite(o[0, 0, 0]).all() and np.isfinite(lse[0, 0, 0])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinite_and_nan_scores_give_nan_rows(bad):
    q, k, v = make_inputs(1, 1, 1, 3, 4, 8, "float64")
    q[...], k[...] = np.abs(q), np.abs(k)
    q[0, 0, 1, 0] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, lse = attention_reference(q, k, v, return_lse=True)
    assert np.isnan(o[0, 0, 1]).all() and np.isnan(lse[0, 0, 1])
    assert np.isfinite(o[0, 0, [0, 2]]).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_keys_that_are_not_seen_play_no_part(bad):
    q, k, v = make_inputs(1, 2, 2, 6, 6, 8, "float64")
    expected = attention_reference(q, k, v, causal=True, return_lse=True)
    k[:, :, 4:], v[:, :, 4:] = bad, bad
    o, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(o[:, :, :4], expected[0][:, :, :4], rtol=1e-14)
    np.testing.assert_allclose(lse[:, :, :4], expected[1][:, :, :4], rtol=1e-14)
    assert np.isnan(o[:, :, 4:]).all()


def test_inputs_are_left_alone():
    inputs = make_inputs(1, 2, 1, 3, 4, 8, "float64")
    before = [x.copy() for x in inputs]
    attention_reference(*inputs, causal=True)
    for x, y in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 4, 3, 8), (1, 3, 3, 8), (1, 3, 3, 8)),
        ((1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 2, 8)),
        ((1, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
        ((1, 4, 3, 8), (1, 4, 3, 16), (1, 4, 3, 16)),
        ((4, 3, 8), (4, 3, 8), (4, 3, 8)),
    ],
)
def test_shapes_that_do_not_fit(q, k, v):
    with pytest.raises(ValueError, match=r"fit together|4 axes"):
        attention_reference(np.ones(q), np.ones(k), np.ones(v))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": "x"}, TypeError, "q is no array of numbers"),
        ({"scale": "x"}, TypeError, "scale must be a number"),
        ({"scale": [1, 2]}, TypeError, "scale must be a number"),
        ({"scale": -1}, ValueError, "scale=-1.0 must be finite and at least 0"),
        ({"alibi_slopes": "x"}, TypeError, "alibi_slopes is no array of numbers"),
        ({"sink": [[1], [1, 2]]}, TypeError, "sink is no array of numbers"),
        ({"seqlens_k": ["x"]}, TypeError, "seqlens_k is no array of numbers"),
        ({"seqlens_q": [2.5]}, ValueError, "seqlens_q must be 1 integers from 0 to 3"),
    ],
)
def test_what_is_wrong_is_named_as_by_the_call(changes, error, message):
    x = np.ones((1, 1, 3, 8))
    with pytest.raises(error, match=message):
        attention_reference(**{"q": x, "k": x, "v": x, **changes})


def test_unknown_layout():
    x = np.ones((1, 1, 1, 8))
    with pytest.raises(ValueError, match="layout='sbhd'"):
        attention_reference(x, x, x, layout="sbhd")


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "cache_seqlens", "k_scale"])
def test_masks_of_numpys_arrays_are_refused_not_ignored(name):
    """As by the calls that are tested against it."""
    q, cache = np.ones((1, 2, 1, 8)), np.ones((1, 2, 4, 8))
    given = {"q": q, "k_cache": cache, "v_cache": cache, "k_new": q, "v_new": q}
    given |= {"cache_seqlens": np.array([3]), "k_scale": np.ones(2)}
    assert np.isfinite(cufa.decode_reference(**given)).all()
    given[name] = np.ma.masked_array(given[name], mask=True)
    with pytest.raises(TypeError, match=rf"{name} is numpy\.ma\S*MaskedArray.*{name}\.filled"):
        cufa.decode_reference(**given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_masks_are_refused_by_attention_too(name):
    given = dict.fromkeys("qkv", np.ones((1, 1, 4, 8)))
    given[name] = np.ma.masked_array(given[name], mask=True)
    for call in (cufa.attention_reference, lambda **x: cufa.attention_reference_backward(given["q"], **x)):
        with pytest.raises(TypeError, match=r"whose mask attention does not read"):
            call(**given)
