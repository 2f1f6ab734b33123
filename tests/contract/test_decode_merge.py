"""Merging partial attention: exact for any cut of the keys, safe where a part saw no key."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from backends import CPU, backends
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, EPSILON, make_inputs

import cufa
from cufa import attention_reference
from cufa.run.cpu.combine import combine


def parts_of(q, k, v, cuts, dtype=np.float64):
    """Attention over each run of keys between the cuts, in float64, then rounded."""
    edges = [0, *cuts, k.shape[2]]
    for first, last in itertools.pairwise(edges):
        out, lse = attention_reference(q, k[:, :, first:last], v[:, :, first:last], return_lse=True)
        yield out.astype(dtype), lse.astype(np.float64 if dtype == np.float64 else np.float32)


@given(
    length=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    spread=st.sampled_from([1, 30, 900]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_merging_any_parts_is_attention_over_all(length, cuts, spread, seed):
    """Empty parts among them. In float64, so that what is not rounding shows."""
    q, k, v = make_inputs(2, 4, 2, 3, length, 8, "float64", seed=seed, spread=spread)
    parts = list(parts_of(q, k, v, sorted(min(c, length) for c in cuts)))
    out, lse = parts[0]
    for other in parts[1:]:
        out, lse = cufa.merge_attention_states(out, lse, *other)
    expected, expected_lse = attention_reference(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-12)
    at_once, lse_at_once = combine(*(np.stack(x) for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(at_once, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(lse_at_once, expected_lse, rtol=1e-13, atol=1e-12)


def merged(backend, *states, **options):
    """By the public call, on the host."""
    return [backend.host(x) for x in cufa.merge_attention_states(*map(backend.array, states), **options)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
@backends("cpu", "gpu")
def test_one_rounding_to_the_dtype(backend, dtype, layout):
    q, k, v = make_inputs(2, 4, 2, 5, 40, 16, "float64")
    states = [x for part in parts_of(q, k, v, [13], DTYPES[dtype]) for x in part]
    if layout == "bshd":
        states[::2] = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in states[::2])
    out, lse = merged(backend, *states, layout=layout)
    assert out.dtype == DTYPES[dtype] and lse.dtype == states[1].dtype
    a, la, b, lb = (x.astype(np.float64) for x in states)
    total = np.logaddexp(la, lb)
    weights = (np.exp(x - total)[..., None] for x in (la, lb))
    wa, wb = (x.swapaxes(1, 2) if layout == "bshd" else x for x in weights)
    exact = a * wa + b * wb
    error = np.abs(out.astype(np.float64) - exact).max()
    rounding = EPSILON[dtype] / 2 + (8 * EPSILON["float32"] if dtype != "float64" else 1e-14)
    assert error <= np.abs(exact).max() * rounding
    np.testing.assert_allclose(lse, total, rtol=2 * EPSILON["float64" if dtype == "float64" else "float32"])


def test_order_does_not_matter():
    q, k, v = make_inputs(1, 2, 2, 3, 20, 8, "float64")
    a, b = parts_of(q, k, v, [9], np.float32)
    for x, y in zip(cufa.merge_attention_states(*a, *b), cufa.merge_attention_states(*b, *a), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 5.0])
@backends("cpu", "gpu")
def test_a_part_that_saw_nothing_plays_no_part(backend, garbage):
    rng = np.random.default_rng(0)
    out = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    lse = rng.standard_normal((2, 3, 4)).astype(np.float32)
    lse[0, 1] = -np.inf
    out[0, 1] = garbage
    nothing, empty = np.full_like(out, garbage), np.full_like(lse, -np.inf)
    found = merged(backend, out, lse, nothing, empty)
    out[0, 1] = 0  # nothing on either side: zeros, whatever was there
    for x, right in zip(found, (out, lse), strict=True):
        np.testing.assert_allclose(x, right, rtol=0 if backend is CPU else 4e-7)


def test_undefined_parts_stay_undefined():
    """A score of +inf or NaN gave a NaN row with lse +inf or NaN: so it is after merging."""
    out, lse = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    bad = np.array([np.inf, np.nan], np.float32)
    merged, merged_lse = cufa.merge_attention_states(out, lse, out, bad)
    assert np.isnan(merged).all() and not np.isfinite(merged_lse).any()


def test_inputs_are_not_written_and_no_warning_escapes():
    out, lse = np.full((1, 1, 1, 8), 6e4, np.float16), np.full((1, 1, 1), -np.inf, np.float32)
    for x in (out, lse):
        x.flags.writeable = False
    with np.errstate(all="raise"):
        merged, _ = cufa.merge_attention_states(out, lse, out, lse)
        cufa.merge_attention_states(out, np.float32([[[1e30]]]), out, np.float32([[[-1e30]]]))
    assert (merged == 0).all()


@backends("cpu", "gpu")
def test_any_number_of_axes_and_any_strides(backend):
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((6, 16)).astype(np.float32), rng.standard_normal(6).astype(np.float32)
    expected, expected_lse = cufa.merge_attention_states(out[:3], lse[:3], out[3:], lse[3:])
    out, lse = backend.array(out), backend.array(lse)
    states = out[2::-1, ::2][::-1], lse[2::-1][::-1], out[3:, ::2], lse[3:]
    found, found_lse = map(backend.host, cufa.merge_attention_states(*states))
    np.testing.assert_allclose(found, expected[:, ::2], rtol=0 if backend is CPU else 1e-6)
    np.testing.assert_allclose(found_lse, expected_lse, rtol=0 if backend is CPU else 1e-6)


O, L = np.zeros((1, 2, 3, 8), np.float32), np.zeros((1, 2, 3), np.float32)
BAD = [
    ({"out_a": [1.0]}, TypeError, r"out_a must be an array.*list"),
    ({"lse_b": None}, TypeError, r"lse_b must be an array.*NoneType"),
    ({"out_b": O[:, :1]}, ValueError, r"out_b has shape \(1, 1, 3, 8\) but out_a has \(1, 2, 3, 8\)"),
    ({"lse_b": L[:, :1]}, ValueError, r"lse_b has shape \(1, 1, 3\) but lse_a has"),
    ({"lse_a": L[..., :2], "lse_b": L[..., :2]}, ValueError, r"lse_a has shape \(1, 2, 2\).*takes \(1, 2, 3\)"),
    ({"layout": "bshd"}, ValueError, r"lse_a has shape \(1, 2, 3\).*'bshd' takes \(1, 3, 2\)"),
    ({"layout": "sbhd"}, ValueError, r"layout='sbhd'"),
    ({"out_b": O.astype(ml_dtypes.bfloat16)}, TypeError, r"out_b is bfloat16 but out_a is float32.*astype"),
    ({"out_a": O.astype(int), "out_b": O.astype(int)}, TypeError, r"out_a is int64.*float16, bfloat16"),
    ({"lse_a": L.astype(np.float16), "lse_b": L.astype(np.float16)}, TypeError, r"lse_a is float16.*float32"),
]  # fmt: skip


def test_results_of_the_other_layout_are_recognised():
    out, lse = np.zeros((2, 5, 3, 8), np.float32), np.zeros((2, 3, 5), np.float32)
    with pytest.raises(ValueError, match="pass layout='bshd'"):
        cufa.merge_attention_states(out, lse, out, lse)
    assert cufa.merge_attention_states(out, lse, out, lse, layout="bshd")[1].shape == lse.shape


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input_names_the_argument(changes, error, message):
    given = {"out_a": O, "lse_a": L, "out_b": O, "lse_b": L, **changes}
    layout = given.pop("layout", "bhsd")
    with pytest.raises(error, match=message):
        cufa.merge_attention_states(*given.values(), layout=layout)
