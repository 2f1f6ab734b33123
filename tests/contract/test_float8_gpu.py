"""Attention with inputs of e4m3 on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8_support import ROLES, bits, device_array

import cufa
from cufa.calls.quantize import QuantizedValues
from cufa.kernels import KERNELS

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS = 4, 2
FP8 = pytest.mark.parametrize("kernel", ["fa3_forward_fp8", "fa2_forward_fp8"], indirect=True)


@pytest.fixture
def kernel(request, cp, monkeypatch):
    """Forward calls of the test use this kernel, which other GPUs may lack."""
    spec = KERNELS[request.param]
    if not spec.runs_on(int(cp.cuda.Device().compute_capability)):
        pytest.skip(f"{spec.name} does not run on this GPU")
    for name in ("flash_attention", "flash_attention_varlen"):
        monkeypatch.setattr(cufa, name, functools.partial(getattr(cufa, name), algorithm=spec.algorithm))
    return spec


def inputs(head_dim: int, seqlen_q: int = 200, seqlen_k: int = 500, batch: int = 2) -> list[Any]:
    rng = np.random.default_rng(head_dim + seqlen_q)
    heads = (HEADS, seqlen_q), (KV_HEADS, seqlen_k), (KV_HEADS, seqlen_k)
    return [rng.standard_normal((batch, h, n, head_dim)).astype(np.float32) for h, n in heads]


def quantized(x: list[Any], per: tuple[str, str, str] = ("head",) * 3, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role, array, mode in zip(ROLES, x, per, strict=True):
        found[role], found[f"{role}_scale"] = cufa.quantize(array, role=role, per=mode, **options)
    return found


def in_rows(cp: Any, given: dict[str, Any]) -> dict[str, Any]:
    """On the GPU, as bytes, values in rows."""
    found = given | {"v": given["v"].rows()}
    return {name: cp.asarray(x.view(np.uint8) if name in ROLES else x) for name, x in found.items()}


def transposed(cp: Any, given: dict[str, Any]) -> dict[str, Any]:
    v, scale = given["v"], cp.asarray(given["v_scale"])
    return in_rows(cp, given) | {"v": dataclasses.replace(v, data=cp.asarray(v.data), scale=scale)}


def error(found: Any, right: Any) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - right) / np.linalg.norm(right))


def check(cp: Any, given: dict[str, Any], allowed: float = 8e-3, **options: Any) -> tuple[Any, Any]:
    """Values in rows and transposed give the same bits; out and lse are those of the CPU: weights round alike but for
    scores that differ in their last bits, and tensor cores keep about 14 bits. Results are written to NaN."""
    call = cufa.flash_attention_varlen if "cu_seqlens_q" in options else cufa.flash_attention
    right, right_lse = call(**given, **options, return_lse=True, out_dtype="float32", device="cpu")
    found = []
    for there in (in_rows(cp, given), transposed(cp, given)):
        out = device_array(cp, np.full(right.shape, np.nan, ml_dtypes.bfloat16))
        lse = cp.full(right_lse.shape, np.nan, np.float32)
        assert call(**there, **options, return_lse=True, out=out, lse=lse) == (out, lse)
        found.append((out.view("i2").get(), lse.get()))
    (out, lse), (other, other_lse) = found
    np.testing.assert_array_equal(out, other)
    np.testing.assert_array_equal(lse, other_lse)
    out = out.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isfinite(out).all() and error(out, right) < allowed
    np.testing.assert_allclose(lse, right_lse, atol=1e-3)
    return out, lse


@FP8
@pytest.mark.parametrize("accumulate", ["row", 2, "tile"])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_dense(cp, kernel, head_dim, accumulate):
    check(cp, quantized(inputs(head_dim)), causal=head_dim % 32 == 0, accumulate=accumulate)


@FP8
@pytest.mark.parametrize("per", [("tensor",) * 3, ("block", "block", "head"), ("head", "block", "tensor")])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_scales(cp, kernel, head_dim, per):
    given = quantized(inputs(head_dim, 333, 777), per)
    check(cp, given, window=(300, 40))
    out, _ = check(cp, given, softcap=5.0, accumulate="tile")
    exact = [cufa.dequantize(given[role], given[f"{role}_scale"], role=role) for role in ROLES]
    assert error(out, cufa.attention_reference(*exact, softcap=5.0)) < 0.035


@FP8
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (64, 0)}], ids=["full", "causal", "window"]
)
def test_padded_and_packed(cp, kernel, head_dim, options):
    """Padding is NaN, in keys and values too."""
    x = inputs(head_dim, 300, 400, 3)
    lengths = [300, 7, 130], [400, 0, 129]
    for y, seqlens in zip(x, (lengths[0], lengths[1], lengths[1]), strict=True):
        for b, n in enumerate(seqlens):
            y[b, :, n:] = 0
    given = quantized(x)
    for b, n in enumerate(lengths[1]):
        given["k"][b, :, n:] = np.nan
    check(cp, given, seqlens_k=lengths[1], **options | {"softcap": 20.0})
    for b, n in enumerate(lengths[0]):
        given["q"][b, :, n:] = np.nan
    check(cp, given, seqlens_q=lengths[0], seqlens_k=lengths[1], **options)
    packed = [y[0].swapaxes(0, 1) for y in inputs(head_dim, 437, 800, 1)]
    cu = [0, 300, 307, 430], [0, 400, 400, 790]
    for per in (("head",) * 3, ("block", "block", "head")):
        given = {}
        for role, y, begins, mode in zip(ROLES, packed, (cu[0], cu[1], cu[1]), per, strict=True):
            given[role], given[f"{role}_scale"] = cufa.quantize(y, role=role, per=mode, cu_seqlens=begins)
        check(cp, given, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
        there = transposed(cp, given)
        out = cufa.flash_attention_varlen(**there, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
        begins = [cp.asarray(y, np.int32) for y in cu]
        other = cufa.flash_attention_varlen(
            **there, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], **options
        )
        np.testing.assert_array_equal(bits(out), bits(other))


@FP8
def test_strides_layouts_and_dtypes(cp, kernel):
    given = quantized(inputs(64))
    there = in_rows(cp, given)
    right = cufa.flash_attention(**there, causal=True)
    turned = there | {role: cp.ascontiguousarray(there[role].swapaxes(1, 2)) for role in ROLES}
    out = cufa.flash_attention(**turned, causal=True, layout="bshd")
    np.testing.assert_array_equal(bits(out.swapaxes(1, 2).copy()), bits(right))
    half = cufa.flash_attention(**there, causal=True, out_dtype="float16")
    assert half.dtype == np.float16
    wide = right.view("i2").get().view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(half.get().astype(np.float32), wide, atol=2e-2)
    v, _ = cufa.quantize(cp.asarray(inputs(64)[2]), role="v")
    other = cufa.flash_attention(**there | {"v": v, "v_scale": None}, causal=True)
    np.testing.assert_array_equal(bits(other), bits(right))
    host = given | {"v": given["v"].rows()}
    for device in (None, "cuda"):
        np.testing.assert_array_equal(
            bits(cufa.flash_attention(**host, causal=True, device=device)), bits(right)
        )
    assert isinstance(cufa.flash_attention(**host, out_dtype="float32"), np.ndarray)


@FP8
def test_calls_that_look_alike(cp, kernel):
    """Rows and transposed values of one shape; results of two dtypes; repeated calls with other numbers."""
    x = inputs(128, 128, 128)
    given = quantized(x)
    rows, columns = in_rows(cp, given), transposed(cp, given)
    assert rows["v"].shape == columns["v"].data.shape
    right = bits(cufa.flash_attention(**rows))
    for _ in range(2):
        for there in (rows, columns):
            np.testing.assert_array_equal(bits(cufa.flash_attention(**there)), right)
            assert cufa.flash_attention(**there, out_dtype="float16").dtype == np.float16
    other = in_rows(cp, quantized([y[:, ::-1].copy() for y in x]))
    np.testing.assert_array_equal(bits(cufa.flash_attention(**other).get()[:, ::-1].copy()), right)


@FP8
@pytest.mark.parametrize("rows", [False, True])
def test_in_a_graph(cp, kernel, rows):
    first, second = (quantized(inputs(128, n, 600)) for n in (300, 301))
    make = in_rows if rows else transposed
    there, other = make(cp, first), make(cp, second)
    other = {name: x[:, :, :300].copy() if name == "q" else x for name, x in other.items()}
    out = device_array(cp, np.zeros((2, HEADS, 300, 128), ml_dtypes.bfloat16))
    right = bits(cufa.flash_attention(**other))
    cufa.flash_attention(**there, out=out)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        cufa.flash_attention(**there, out=out)
        graph = stream.end_capture()
        for name, x in there.items():
            x, y = (z.data if isinstance(z, QuantizedValues) else z for z in (x, other[name]))
            x[...] = y
        for _ in range(2):
            out.view("i2").fill(0)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(bits(out), right)


@FP8
def test_long_rows_need_sums_of_tiles(cp, kernel):
    """Equal positive values: the tensor core's sums lose what is small against them."""
    shape = 1, 1, 65536, 64
    q, k = np.zeros((1, 1, 64, 64), np.float32), np.zeros(shape, np.float32)
    v = np.abs(np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    given = transposed(cp, quantized([q, k, v]))
    exact = cufa.dequantize(quantized([q, k, v])["v"], given["v_scale"].get(), role="v").mean(axis=2)
    tile, row = (
        abs(
            cufa.flash_attention(**given, accumulate=x, out_dtype="float16").get().astype(np.float64)
            - exact[:, :, None]
        ).max()
        for x in ("tile", "row")
    )
    by_length = cufa.flash_attention(**given, out_dtype="float16")
    assert tile < 1e-3 * exact.max() and tile <= row
    np.testing.assert_array_equal(
        bits(by_length), bits(cufa.flash_attention(**given, accumulate="tile", out_dtype="float16"))
    )


@FP8
def test_errors_come_before_a_launch(cp, kernel):
    there = in_rows(cp, quantized(inputs(64, 8, 8, 1)))
    for change, kind, words in (
        ({"q_scale": 0.0}, ValueError, "q_scale is 0"),
        (
            {"k_scale": there["k_scale"].astype(np.float64)},
            TypeError,
            "k_scale is float64.*ascontiguousarray",
        ),
        ({"k_scale": cp.ones((3,), np.float32)}, ValueError, r"k_scale has shape \(3,\)"),
        (
            {"v_scale": cp.ones((1, KV_HEADS, 1), np.float32)},
            ValueError,
            "takes v_scale per tensor and head, not per block",
        ),
        ({"q_scale": cp.ones((1, HEADS, 8), np.float32)}, ValueError, "takes q_scale per .*, not per token"),
        ({"v": cp.ones((1, KV_HEADS, 8, 64), np.float16)}, TypeError, "v is float16"),
        ({"k": there["k"].get()}, TypeError, "k is"),
        ({"out_dtype": "float32"}, ValueError, "writes float16 and bfloat16, not float32"),
        ({"sink": cp.zeros(HEADS, np.float32)}, ValueError, "takes no sink"),
        ({"accumulate": -4}, ValueError, "accumulate=-4"),
    ):
        with pytest.raises(kind, match=words):
            cufa.flash_attention(**there | change)
