"""cufa.quantize on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8_support import ROLES, bits, device_array

import cufa
from cufa.calls.quantize import QuantizedValues
from cufa.problem import float8

pytestmark = pytest.mark.gpu
CU = [0, 5, 5, 300, 690]


def normal(*shape: int, dtype: str = "bfloat16", seed: int = 45) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 2).astype(getattr(ml_dtypes, dtype, dtype))


def assert_same_bits(cp: Any, x: np.ndarray, close: bool = False, **options: Any) -> None:
    """``close``: a mean key may differ in its last bit."""
    found, scale = cufa.quantize(device_array(cp, x), **options)
    right, right_scale = cufa.quantize(x, **options)
    assert isinstance(scale, cp.ndarray) and scale.dtype == np.float32 and scale.shape == right_scale.shape
    if isinstance(right, QuantizedValues):
        assert found.shape == right.shape and found.layout == right.layout
        np.testing.assert_array_equal(bits(found.get().rows()), bits(right.rows()))
    else:
        assert isinstance(found, cp.ndarray) and found.dtype == np.uint8 and found.shape == right.shape
    if close:
        np.testing.assert_allclose(scale.get(), right_scale, rtol=3e-7)
        steps = bits(found).astype(int) - bits(right)
        assert abs(steps).max() <= 1 and (steps != 0).mean() < 1e-3
    else:
        np.testing.assert_array_equal(scale.get(), right_scale)
        np.testing.assert_array_equal(bits(found), bits(right))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("per", float8.MODES)
def test_the_bits_of_the_cpu(cp, per, role, dtype):
    for head_dim, rotate in ((64, None), (128, 3), (80, 3), (256, None)):
        turn = {"rotate": rotate} if role != "v" else {}
        assert_same_bits(cp, normal(2, 3, 333, head_dim, dtype=dtype), role=role, per=per, **turn)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_every_head_dim(cp, head_dim):
    for role, turn in (("k", {"rotate": 5}), ("v", {})):
        assert_same_bits(cp, normal(1, 2, 300, head_dim), role=role, **turn)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("per", float8.MODES)
def test_packed_and_padded_sequences(cp, per, role):
    x = normal(700, 3, 96)
    x[690:] = np.nan
    assert_same_bits(cp, x, role=role, per=per, cu_seqlens=CU)
    x = normal(3, 300, 2, 64)
    x[0, 100:], x[1] = np.nan, np.nan
    options = {"role": role, "per": per, "layout": "bshd"}
    assert_same_bits(cp, x, seqlens=[100, 0, 300], **options)
    there, lengths = device_array(cp, x), np.array([100, 0, 300], np.int32)
    first, second = (cufa.quantize(there, seqlens=y, **options) for y in (lengths, cp.asarray(lengths)))
    np.testing.assert_array_equal(bits(first[0]), bits(second[0]))
    np.testing.assert_array_equal(first[1].get(), second[1].get())


def test_a_mean_key(cp):
    for shape, lengths in (
        ((2, 2, 9000, 128), {}),
        ((2, 700, 3, 64), {"layout": "bshd"}),
        ((2, 3, 700, 48), {"seqlens": [3, 500]}),
    ):
        assert_same_bits(cp, normal(*shape), True, role="k", smooth=True, rotate=2, **lengths)
    assert_same_bits(cp, normal(700, 3, 96), True, role="k", smooth=True, cu_seqlens=CU)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_more_blocks_than_a_gpu_runs_at_once(cp, per, role):
    assert_same_bits(cp, normal(1, 1, 70_000, 64), role=role, per=per)
    assert_same_bits(cp, normal(3, 16, 2000, 128), role=role, per=per)


def test_streams_side_by_side(cp):
    """Blocks of several calls share the GPU."""
    there = device_array(cp, normal(2, 32, 8192, 128))
    right, right_scale = cufa.quantize(there, role="k", rotate=1)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(6)]
    cp.cuda.Device().synchronize()
    found = []
    for _ in range(3):
        for stream in streams:
            with stream:
                found.append(cufa.quantize(there, role="k", rotate=1))
    cp.cuda.Device().synchronize()
    for k8, scale in found:
        assert (scale == right_scale).all() and (k8 == right).all()


def test_strides(cp):
    wide = device_array(cp, normal(2, 150, 4, 72))
    for x in (wide[..., :64], wide[:, ::-2, :, 1:65], wide[:, :, ::2, 8:40]):
        host = x.view("i2").get().view(ml_dtypes.bfloat16)
        for role in ROLES:
            found, scale = cufa.quantize(x, role=role, layout="bshd")
            right, right_scale = cufa.quantize(host, role=role, layout="bshd")
            np.testing.assert_array_equal(scale.get(), right_scale)
            np.testing.assert_array_equal(bits(found), bits(right))


def test_empty_arrays_and_zeros(cp):
    for shape in ((0, 2, 8, 32), (2, 2, 0, 32), (1, 2, 8, 32)):
        for role in ROLES:
            assert_same_bits(cp, np.zeros(shape, np.float16), role=role)


def test_inf_and_nan_reach_the_scale(cp):
    x = normal(1, 2, 64, 64, dtype="float32")
    x[0, 0, 3, 3], x[0, 1, 3, 3] = np.inf, np.nan
    _, scale = cufa.quantize(cp.asarray(x), role="k")
    assert np.isinf(scale.get()[0, 0]) and np.isnan(scale.get()[0, 1])


def test_quantised_in_a_graph(cp):
    """Scales and e4m3 of what the array holds at the replay."""
    x, host = device_array(cp, normal(1, 2, 1000, 64)), normal(1, 2, 1000, 64, seed=1)
    options = {"role": "k", "rotate": 1, "smooth": True}
    cufa.quantize(x, **options)
    with cp.cuda.Stream(non_blocking=True) as stream:
        cufa.quantize(x, **options)  # fills the stream's pool
        stream.synchronize()
        stream.begin_capture()
        found, scale = cufa.quantize(x, **options)
        graph = stream.end_capture()
        x.view("i2").set(host.view("i2"), stream=stream)
        graph.launch(stream)
        stream.synchronize()
        right, right_scale = cufa.quantize(host, **options)
        np.testing.assert_allclose(scale.get(), right_scale, rtol=3e-7)
        assert (bits(found) != bits(right)).mean() < 1e-3
        stream.begin_capture()
        with pytest.raises(ValueError, match="seqlens is a NumPy array"):
            cufa.quantize(x, role="k", seqlens=[7])
        stream.end_capture()


def test_lengths_are_where_x_is(cp):
    with pytest.raises(TypeError, match="seqlens"):
        cufa.quantize(normal(1, 2, 8, 32), role="k", seqlens=cp.asarray([3], np.int32))
