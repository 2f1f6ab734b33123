"""cufa.quantize: e4m3 with scales, rotation, the mean key, transposed values."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import cufa
from cufa.problem import float8

RNG = np.random.default_rng(45)
CU = np.array([0, 5, 5, 300, 690], np.int32)
HALF_ULP = 2.0**-4
"""The largest relative error of rounding to e4m3, of normal numbers; of subnormal ones it is 2^-10 times the scale."""


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def assert_round_trip(x, x8, scale, role, lengths=slice(None), **layout):
    """Within half a unit of the last place of the numbers that e4m3 holds."""
    back = cufa.dequantize(x8, scale, role=role, **layout)
    error = np.abs(back - x.astype(np.float64))[lengths]
    bound = np.maximum(np.abs(x.astype(np.float64)) * HALF_ULP, np.max(scale) * 2.0**-10)[lengths]
    assert (error <= bound * (1 + 1e-6)).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("per", float8.MODES)
def test_round_trip_and_shapes_of_scales(per, role, dtype):
    x = normal(2, 3, 333, 64, dtype=dtype)
    block = 64 if role == "q" else float8.key_tile(64)
    shapes = {"tensor": (), "head": (2, 3), "block": (2, 3, -(-333 // block)), "token": (2, 3, 333)}
    x8, scale = cufa.quantize(x, role=role, per=per)
    assert scale.shape == shapes[per] and scale.dtype == np.float32
    if role == "v":
        assert x8.shape == x.shape and x8.seqlen == 333 and x8.data.shape == (2, 3, 64, 384)
    else:
        assert x8.shape == x.shape and x8.dtype == ml_dtypes.float8_e4m3fn
        largest = np.abs(x8.astype(np.float32)).max(axis=(2, 3))
        assert (largest == 448).all() if per != "tensor" else largest.max() == 448
    assert_round_trip(x, x8, scale, role)


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("per", float8.MODES)
def test_packed_sequences_are_quantised_one_by_one(per, role):
    x = normal(700, 3, 96)
    x[690:] = np.nan
    x8, scale = cufa.quantize(x, role=role, per=per, cu_seqlens=CU)
    back = cufa.dequantize(x8, scale, role=role, cu_seqlens=CU)
    assert (back[690:] == 0).all()
    for start, stop in itertools.pairwise(CU):
        if per != "tensor" and stop > start:
            alone, of_it = cufa.quantize(x[None, start:stop], role=role, per=per, layout="bshd")
            np.testing.assert_array_equal(
                back[None, start:stop], cufa.dequantize(alone, of_it, role=role, layout="bshd")
            )
    assert_round_trip(x, x8, scale, role, slice(0, 690), cu_seqlens=CU)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_padding_is_not_read(role):
    x = normal(2, 300, 3, 128)
    x[0, 100:] = np.nan
    x8, scale = cufa.quantize(x, role=role, layout="bshd", seqlens=[100, 300], smooth=role == "k")
    alone, of_it = cufa.quantize(x[:1, :100], role=role, layout="bshd", smooth=role == "k")
    back = cufa.dequantize(x8, scale, role=role, layout="bshd")
    assert (back[0, 100:] == 0).all()
    np.testing.assert_array_equal(back[:1, :100], cufa.dequantize(alone, of_it, role=role, layout="bshd"))


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 128, 256])
def test_rotation_leaves_scores_unchanged(head_dim):
    """Exactly orthogonal but for rounding in float32, and with another seed not."""
    from cufa.calls.quantize import _signs
    from cufa.run.cpu.quantize import rotated

    q, k = normal(1, 2, 40, head_dim), normal(1, 2, 50, head_dim)
    signs = _signs(7, "q", head_dim)
    assert set(signs) == {1.0, -1.0}
    scores = q.astype(np.float64) @ k.astype(np.float64).mT
    square = head_dim & -head_dim
    turned = rotated(q.copy(), signs).astype(np.float64) @ rotated(k.copy(), signs).mT / square
    np.testing.assert_allclose(turned, scores, atol=1e-4)
    other = (
        rotated(q.copy(), signs).astype(np.float64) @ rotated(k.copy(), _signs(8, "k", head_dim)).mT / square
    )
    assert np.abs(other - scores).max() > 1


def test_rotation_spreads_outliers():
    """A column that is large in queries and keys alike rounds by up to 1/16 of its product; rotated, errors average."""
    q, k = (normal(1, 1, 512, 128) for _ in "qk")
    q[..., 5] *= 30
    k[..., 5] *= 30
    exact = q.astype(np.float64) @ k.astype(np.float64).mT

    def error(seed):
        both = [cufa.quantize(x, role=role, rotate=seed) for x, role in ((q, "q"), (k, "k"))]
        a, b = (cufa.dequantize(*x, role=role) for x, role in zip(both, "qk", strict=True))
        return np.sqrt(np.mean((a @ b.mT - exact) ** 2))

    assert error(3) < error(None) / 4


def test_smoothing_subtracts_the_mean_key():
    k = normal(2, 3, 1000, 64) + 50 * normal(2, 3, 1, 64)
    k8, scale = cufa.quantize(k, role="k", smooth=True)
    back = cufa.dequantize(k8, scale, role="k")
    np.testing.assert_allclose(back, k - k.mean(axis=2, keepdims=True, dtype=np.float64), atol=0.3)
    assert scale.max() < 6 / 448


def test_the_order_of_keys_is_that_of_the_fragments():
    """PTX ISA: thread t of a quad has columns 8j + 2t and 8j + 2t + 1 of accumulator tile j, and as the 8-bit A operand
    of 32 k registers with k = 4t ... 4t + 3 and 16 + 4t ... 16 + 4t + 3."""
    for t in range(4):
        in_accumulator = [8 * j + 2 * t + e for j in range(4) for e in range(2)]
        as_operand = [first + 4 * t + i for first in (0, 16) for i in range(4)]
        assert float8.KEY_ORDER[as_operand].tolist() == in_accumulator


def test_values_are_transposed_in_this_order():
    v = normal(1, 2, 70, 32)
    values, _ = cufa.quantize(v, role="v")
    rows = values.rows().view(np.uint8)
    for position in range(128):
        key = position // 32 * 32 + float8.KEY_ORDER[position % 32]
        wanted = rows[0, :, key] if key < 70 else 0
        np.testing.assert_array_equal(values.data[0, :, :, position], wanted)


def test_zeros_and_tiny_numbers_have_scales_that_are_normal():
    x = np.zeros((1, 2, 4, 16), np.float32)
    x[0, 1] = 1e-44
    x8, scale = cufa.quantize(x, role="k")
    assert scale.tolist() == [[1.0, np.float32(2.0**-126)]]
    assert not x8[0, 0].astype(np.float32).any()


def test_rounding_in_place_is_that_of_e4m3():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    between = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, between, np.nextafter(between, 448), np.nextafter(between, -448)])
    wanted = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(float8.round_to_e4m3(x.astype(np.float32)), wanted)


X = np.ones((1, 2, 8, 32), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        (X, {"role": "o"}, ValueError, "role='o'"),
        (X, {"role": "k", "per": "row"}, ValueError, "per='row'"),
        (X, {"role": "v", "rotate": 1}, ValueError, "values are not rotated"),
        (X, {"role": "k", "rotate": -1}, ValueError, "rotate=-1"),
        (X, {"role": "q", "smooth": True}, ValueError, "only a mean key"),
        (X, {"role": "k", "smooth": "yes"}, TypeError, "smooth"),
        (X.astype(np.float64), {"role": "k"}, TypeError, "x is float64"),
        (X[..., :24], {"role": "k"}, ValueError, "head_dim is 24"),
        (X[0], {"role": "k"}, ValueError, "x has shape"),
        (X, {"role": "k", "cu_seqlens": [0, 8]}, ValueError, "x has shape"),
        (X, {"role": "k", "seqlens": [9]}, ValueError, r"seqlens\[0\] is 9"),
        (X[0], {"role": "k", "seqlens": [2], "cu_seqlens": [0, 2]}, ValueError, "pass one of them"),
        (X[0], {"role": "k", "cu_seqlens": [0, 3]}, ValueError, r"cu_seqlens\[-1\] is 3 but x has 2 rows"),
        (X[0], {"role": "k", "cu_seqlens": [[0]]}, ValueError, r"cu_seqlens has shape \(1, 1\)"),
        (X, {"role": "k", "layout": "sbhd"}, ValueError, "layout='sbhd'"),
        (X.swapaxes(2, 3), {"role": "k"}, ValueError, "strides"),
        (np.where(X == 1, np.nan, X), {"role": "k"}, ValueError, "inf or NaN"),
        ([1.0], {"role": "k"}, TypeError, "x must be an array"),
    ],
)
def test_errors_name_the_argument(x, options, error, words):
    with pytest.raises(error, match=words):
        cufa.quantize(x, **options)


def test_dequantize_takes_arrays_of_the_host(monkeypatch):
    monkeypatch.setattr("cufa.calls.quantize.is_device_array", lambda x: True)
    with pytest.raises(TypeError, match=r"there dequantize takes dtype='bfloat16'"):
        cufa.dequantize(X, 1.0, role="k")
    with pytest.raises(ValueError, match="layout='sbhd'"):
        cufa.dequantize(X, 1.0, role="k", layout="sbhd", dtype="float16")


def test_a_rotated_sequence_may_be_empty():
    k8, _ = cufa.quantize(X[0], role="k", cu_seqlens=[0, 0, 2], rotate=1)
    assert k8.shape == (2, 8, 32)
