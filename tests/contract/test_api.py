"""The public call on NumPy arrays: results, layouts, and an answer to everything that can be wrong."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from support import DTYPES, OnlyDLPack, assert_attention, make_inputs, poisoned_like

import cufa
from cufa.problem.mask import CAUSAL, FULL

ALGORITHMS = ("auto", "fa1", "fa2", "fa2_noskip", "naive")


pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result(dtype, algorithm, layout):
    q, k, v = make_inputs(2, 4, 2, 65, 97, 40, dtype, layout=layout)
    out, lse = cufa.flash_attention(q, k, v, causal=True, layout=layout, algorithm=algorithm, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == q.dtype and out.shape == q.shape
    assert_attention(out, lse, q, k, v, causal=True, layout=layout)


def test_out_is_written_and_returned():
    q, k, v = make_inputs(1, 2, 2, 33, 33, 16, "float32")
    out = poisoned_like(q)
    assert cufa.flash_attention(q, k, v, out=out) is out
    assert_attention(out, None, q, k, v)


def test_strided_inputs_and_out_are_used_in_place():
    fused = make_inputs(1, 6, 6, 50, 50, 24, "float32")[0]
    q, k, v = fused[:, :2], fused[:, 2:4], fused[:, 4:]
    out = np.full((1, 2, 100, 48), np.nan, np.float32)
    view = out[:, :, ::2, 8:32]
    cufa.flash_attention(q, k, v, out=view)
    assert_attention(view, None, q, k, v)
    view[...] = np.nan
    assert np.isnan(out).all(), "wrote outside of out"


def test_broadcast_and_reversed_inputs():
    q, k, v = make_inputs(2, 3, 3, 20, 30, 8, "float64")
    k = np.broadcast_to(k[:, :1], k.shape)
    v = v[:, :, ::-1]
    out = cufa.flash_attention(q, k, v)
    assert_attention(out, None, q, k, v)


@pytest.mark.parametrize("axis", ["batch", "heads", "seqlen_q", "seqlen_k"])
def test_zero_size_axes(axis):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 5, "seqlen_k": 5, axis: 0}
    b, h, sq, sk = sizes.values()
    q, k, v = make_inputs(b, h, h, sq, sk, 8, "float32")
    out, lse = cufa.flash_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (b, h, sq)
    assert (out == 0).all() and np.isneginf(lse).all()
    mine = np.full_like(q, 7)
    assert cufa.flash_attention(q, k, v, out=mine) is mine and (mine == 0).all()


@pytest.mark.parametrize("scale", [0, 0.0, 1e-3, 3, np.float32(0.25)])
def test_scale(scale):
    q, k, v = make_inputs(1, 1, 1, 30, 30, 16, "float32")
    out, lse = cufa.flash_attention(q, k, v, causal=True, scale=scale, return_lse=True)
    assert_attention(out, lse, q, k, v, causal=True, scale=float(scale))


def test_dlpack_producer_in_numpy_out():
    q, k, v = make_inputs(1, 1, 1, 16, 16, 8, "float32")
    out = cufa.flash_attention(OnlyDLPack(q), OnlyDLPack(k), OnlyDLPack(v))
    assert type(out) is np.ndarray
    assert_attention(out, None, q, k, v)


def _call(**changes):
    q, k, v = make_inputs(1, 4, 2, 8, 8, 16, "float32")
    options = {"q": q, "k": k, "v": v, **changes}
    return cufa.flash_attention(options.pop("q"), options.pop("k"), options.pop("v"), **options)


def _array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


BAD = [
    ({"q": [[1.0]]}, TypeError, r"q must be an array.*builtins\.list.*numpy\.asarray"),
    ({"k": None}, TypeError, r"k must be an array.*NoneType"),
    ({"q": _array(1, 4, 8)}, ValueError, r"q has shape \(1, 4, 8\).*four axes"),
    ({"q": _array(1, 4, 8, 16, dtype=np.int32)}, TypeError, r"q is int32.*\.astype\(numpy\.float32\)"),
    ({"k": _array(1, 2, 8, 16, dtype=np.float16)}, TypeError, r"k is float16 but q is float32.*astype\(q\.dtype\)"),
    ({"v": _array(1, 2, 9, 16)}, ValueError, r"v has shape \(1, 2, 9, 16\) but k has"),
    ({"k": _array(2, 2, 8, 16), "v": _array(2, 2, 8, 16)}, ValueError, r"k has batch 2 but q has 1"),
    ({"k": _array(1, 2, 8, 8), "v": _array(1, 2, 8, 8)}, ValueError, r"k has head_dim 8 but q has 16"),
    ({"k": _array(1, 3, 8, 16), "v": _array(1, 3, 8, 16)}, ValueError, r"4 heads and k has 3.*multiple"),
    ({"k": _array(1, 0, 8, 16), "v": _array(1, 0, 8, 16)}, ValueError, r"4 heads and k has 0"),
    ({x: _array(1, 2, 8, 12) for x in "qkv"}, ValueError, r"head_dim is 12.*multiple of 8.*pad"),
    ({x: _array(1, 2, 8, 264) for x in "qkv"}, ValueError, r"head_dim is 264.*from 8 to 256$"),
    ({x: _array(1, 2, 8, 0) for x in "qkv"}, ValueError, r"head_dim is 0.*from 8 to 256$"),
    ({"q": _array(1, 4, 8, 32)[..., ::2]}, ValueError, r"q has strides.*contiguous.*ascontiguousarray\(q\)"),
    ({"scale": float("nan")}, ValueError, r"scale=nan must be finite"),
    ({"scale": float("inf")}, ValueError, r"scale=inf.*finite"),
    ({"scale": -1.0}, ValueError, r"scale=-1\.0.*negate q"),
    ({"scale": "big"}, TypeError, r"scale must be a number"),
    ({"scale": "0.5"}, TypeError, r"scale must be a number or None, not '0\.5'"),
    ({"scale": True}, TypeError, r"scale must be a number or None, not True"),
    ({"scale": np.True_}, TypeError, r"scale must be a number or None, not np\.True_"),
    ({"scale": np.array(True)}, TypeError, r"scale must be a number"),
    ({"scale": 1e39}, ValueError, r"scale=1e\+39 is too large.*float32.*at most 2\.359e\+38"),
    ({"scale": 3e38}, ValueError, r"scale=3e\+38 is too large"),
    ({"q": np.ma.masked_array(_array(1, 4, 8, 16))}, TypeError, r"q is numpy\.ma\S*MaskedArray.*q\.filled"),
    ({"out": np.ma.masked_array(_array(1, 4, 8, 16))}, TypeError, r"out is numpy\.ma\S*MaskedArray"),
    ({"layout": "sbhd"}, ValueError, r"layout='sbhd'.*'bhsd'.*'bshd'"),
    ({"algorithm": "fa9"}, ValueError, r"algorithm='fa9'.*fa2"),
    ({"causal": "no"}, TypeError, r"causal must be True or False, not 'no'"),
    ({"causal": 2}, TypeError, r"causal must be True or False, not 2: other masks go to mask="),
    ({"causal": 1.0}, TypeError, r"causal must be .*not 1\.0"),
    ({"causal": None}, TypeError, r"causal must be .*not None"),
    ({"causal": np.ones((8, 8), bool)}, TypeError, r"causal must be .*not numpy\.ndarray: other masks"),
    ({"precision": "tf16"}, ValueError, r"precision='tf16'.*'tf32'"),
    ({"return_lse": "no"}, TypeError, r"return_lse must be True or False, not 'no'"),
    ({"return_lse": np.ones(2)}, TypeError, r"return_lse must be True or False, not numpy\.ndarray"),
    ({"algorithm": np.ones(2)}, ValueError, r"algorithm=array.* is not known"),
    ({"precision": np.ones(2)}, ValueError, r"precision=array.* is not known"),
    ({"scale": 10**400}, ValueError, r"scale=inf must be finite"),
    ({"device": "tpu"}, ValueError, r"device='tpu'.*'cuda'"),
    ({"device": "cuda"}, ValueError, r"device='cuda' but no usable GPU.*cufa doctor"),
    ({"out": _array(1, 4, 8, 8)}, ValueError, r"out has shape \(1, 4, 8, 8\) but the result has \(1, 4, 8, 16\)"),
    ({"out": _array(1, 4, 8, 16, dtype=np.float16)}, TypeError, r"out is float16 but the result is float32"),
    ({"out": "here"}, TypeError, r"out must be an array"),
    ({"out": np.broadcast_to(_array(1), (1, 4, 8, 16))}, ValueError, r"out"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input_names_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        _call(**changes)


def test_precision_is_for_float32_only():
    q, k, v = make_inputs(1, 1, 1, 8, 8, 8, "float16")
    with pytest.raises(ValueError, match=r"precision='tf32'.*float32 inputs only"):
        cufa.flash_attention(q, k, v, precision="tf32")


def test_read_only_out():
    out = _array(1, 4, 8, 16)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        _call(out=out)


def test_self_overlapping_out():
    out = np.lib.stride_tricks.as_strided(_array(1000), (1, 4, 8, 16), (0, 64, 4, 4))
    with pytest.raises(ValueError, match="elements share memory"):
        _call(out=out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_overlapping_an_input(name):
    q, k, v = make_inputs(1, 2, 2, 8, 8, 16, "float32")
    before = [x.copy() for x in (q, k, v)]
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        cufa.flash_attention(q, k, v, out={"q": q, "k": k, "v": v}[name])
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_interleaved_views_of_one_buffer_do_not_overlap():
    fused = np.random.default_rng(0).standard_normal((1, 4, 2, 10, 8)).astype(np.float32)
    q, k, v, out = (fused[:, i] for i in range(4))
    expected = cufa.flash_attention(q, k, v)
    np.testing.assert_array_equal(cufa.flash_attention(q, k, v, out=out), expected)


@pytest.mark.parametrize("form", [int, np.bool_, np.array, np.uint8])
def test_causal_in_other_words(form):
    q, k, v = make_inputs(1, 2, 2, 8, 8, 16, "float32")
    for causal in (False, True):
        expected = cufa.flash_attention(q, k, v, causal=causal)
        np.testing.assert_array_equal(cufa.flash_attention(q, k, v, causal=form(causal)), expected)
        assert cufa.plan(q, causal=form(causal)).problem.mask is (CAUSAL if causal else FULL)


def test_plan_takes_arrays_and_layouts():
    q, k, v = make_inputs(2, 8, 2, 100, 300, 64, "float16", layout="bshd")
    plan = cufa.plan(q, k, v, layout="bshd", device="sm_80")
    p = plan.problem
    assert (p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k) == (2, 8, 2, 100, 300)


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_plan_of_nothing_has_no_launch(axis, device):
    shape = tuple(0 if i == axis else n for i, n in enumerate((2, 4, 100, 64)))
    planned = cufa.plan(shape, causal=True, device=device)
    assert planned.launches == () and "without a launch" in str(planned)


def test_a_plan_of_numpys_integers_and_dtype_prints_as_that_of_pythons():
    shape, bfloat16 = (1, np.int64(8), np.int32(100), np.uint16(64)), np.dtype(ml_dtypes.bfloat16)
    for device in ("cpu", "sm_80", "sm_90"):
        planned = cufa.plan(shape, dtype=bfloat16, device=device)
        assert str(planned) == str(cufa.plan((1, 8, 100, 64), dtype="bfloat16", device=device))
        assert planned.problem.dtype == "bfloat16"


@pytest.mark.parametrize(
    "dtype", [np.float32, np.dtype("float16"), ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]
)
def test_a_plan_takes_types_of_elements(dtype):
    name, shape = np.dtype(dtype).name, (1, 8, 16, 64)
    for plan in (cufa.plan, cufa.plan_backward):
        assert plan(shape, dtype=dtype, device="cpu").problem.dtype == name
    decode = cufa.plan_decode(shape, shape, dtype=dtype, cache_dtype=dtype, device="cpu").problem
    assert (decode.dtype, decode.k_dtype) == (name, None)
    eight_bits = cufa.plan_decode(shape, shape, dtype=dtype, cache_dtype=np.uint8, device="cpu").problem
    assert eight_bits.k_dtype == "float8_e4m3"


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((1, 8, -5, 64), ValueError, "q has shape .* a size is at least 0"),
        ((1, 8, 2.5, 64), TypeError, "q has shape .* sizes are integers, not float"),
        ((1, 8, 2**31, 64), ValueError, "q has shape .* 32 bits"),
    ],
)
def test_a_plan_checks_shapes(shape, error, message):
    with pytest.raises(error, match=message):
        cufa.plan(shape, device="sm_90")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "sm_75"}, "sm_75 is not supported"),
        ({"device": "tpu"}, "'tpu' is not known"),
        ({"device": "sm_9²"}, "'sm_9²' is not known"),
        ({"device": np.ones(2)}, "device must be"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": 0}, "dtype='0' is not served"),
        ({"dtype": np.ones(2)}, "is not served"),
        ({"dtype": "float64", "device": "sm_90"}, "float64"),
    ],
)
def test_plan_says_what_it_cannot_do(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cufa.plan((1, 1, 64, 64), **options)


@pytest.mark.parametrize("threads", [0, -1, True, 2.0, "2"])
def test_threads_of_the_executor_are_a_number(threads):
    x = np.ones((1, 1, 16, 16), np.float16)
    with pytest.raises(ValueError, match=r"threads=.* must be an int from 1 up"):
        cufa.emulate(x, x, x, threads=threads)


def test_lse_is_written_where_the_caller_says():
    q = make_inputs(1, 2, 2, 9, 9, 8, "float32")[0]
    out, lse = np.full_like(q, np.nan), np.full((1, 2, 9), np.nan, np.float32)
    found = cufa.flash_attention(q, q, q, out=out, lse=lse, return_lse=True)
    assert found[0] is out and found[1] is lse
    assert_attention(out, lse, q, q, q)
    with pytest.raises(ValueError, match=r"lse= .*pass return_lse=True too"):
        cufa.flash_attention(q, q, q, lse=lse)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 9, 2\) but the result has"):
        cufa.flash_attention(q, q, q, lse=lse.swapaxes(1, 2), return_lse=True)
    x, cu = np.ascontiguousarray(q[0].swapaxes(0, 1)), [0, 9]
    assert cufa.flash_attention_varlen(x, x, x, cu, cu, lse=lse[0], return_lse=True)[1].base is lse


def test_tokens_and_heads_in_the_other_layouts_order_are_warned_of():
    q = np.zeros((1, 300, 8, 16), np.float32)
    with pytest.warns(UserWarning, match=r"300 heads of 8 tokens.*pass layout='bshd'"):
        cufa.flash_attention(q, q, q)
    with pytest.warns(UserWarning, match=r"300 heads of 8 tokens.*pass layout='bhsd'"):
        cufa.plan((1, 8, 300, 16), layout="bshd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cufa.flash_attention(q, q, q, layout="bshd")
        cufa.plan((1, 300, 256, 16))
        cufa.plan((1, 300, 8, 16), (1, 100, 8, 16))  # grouped heads


def test_plans_of_shapes_are_of_the_dtype_that_is_measured_beside_peers():
    shape = (1, 2, 64, 64)
    plans = cufa.plan(shape), cufa.plan_backward(shape), cufa.plan_decode((1, 2, 1, 64), shape)
    assert [x.problem.dtype for x in plans] == ["bfloat16"] * 3
    assert cufa.plan(np.zeros(shape, np.float16)).problem.dtype == "float16"


class Loud(np.ndarray):
    """As arrays with units: NumPy's functions do something else with them."""

    def __array_ufunc__(self, *ufunc, **how):
        raise AssertionError("a function of the subclass was called")


def test_a_subclass_is_read_as_a_plain_array():
    q = np.random.default_rng(0).standard_normal((1, 2, 8, 16), np.float32)
    loud = q.view(Loud)
    out = np.empty_like(q).view(Loud)
    cufa.flash_attention(loud, loud, loud, out=out, mask=cufa.masks.evict(np.full(8, 5).view(Loud)))
    expected = cufa.flash_attention(q, q, q, mask=cufa.masks.evict(np.full(8, 5)))
    np.testing.assert_array_equal(out.view(np.ndarray), expected)
