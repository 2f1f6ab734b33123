"""flash_attention with inputs of e4m3, on the CPU; test_float8_kernels.py: on the executor and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8_support import ROLES, error, inputs, packed, quantized

import cufa
from cufa.calls.quantize import QuantizedValues
from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan

pytestmark = pytest.mark.usefixtures("on_cpu")


def wide(given: dict[str, Any]) -> list[Any]:
    """The dequantised numbers in float64."""
    return [cufa.dequantize(given[role], given[f"{role}_scale"], role=role) for role in ROLES]


@pytest.mark.parametrize(
    ("head_dim", "per", "options"),
    [
        (64, ("head",) * 3, {}),
        (16, ("tensor",) * 3, {"causal": True}),
        (128, ("block",) * 3, {"causal": True, "softcap": 5.0}),
        (144, ("token", "token", "head"), {"window": (100, 20), "scale": 0.2}),
        (256, ("block", "token", "block"), {"window": (300, 0)}),
        (96, ("head",) * 3, {"seqlens_q": [200, 31], "seqlens_k": [500, 0]}),
        (80, ("head",) * 3, {"sink": [0.0, 1.0, -2.0, 3.0], "alibi_slopes": [0.01, 0.1, 0.0, -0.01]}),
    ],
)
def test_against_float64_of_the_same_numbers(head_dim, per, options):
    """Weights of 4 significant bits leave 2 to 3% of the result's norm; lse has no rounding."""
    given = quantized(inputs(head_dim), per)
    out, lse = cufa.flash_attention(**given, **options, return_lse=True, out_dtype="float32")
    right, right_lse = cufa.attention_reference(*wide(given), **options, return_lse=True)
    assert 1e-4 < error(out, right) <= 0.035
    np.testing.assert_allclose(lse, right_lse, atol=2e-4)


def test_against_the_loop_written_out():
    """One head: tiles from the last key to the first, m the maximum so far, P of 448 exp(s - m) in e4m3."""
    given = quantized(inputs(64, 70, 333, 1))
    out, lse = cufa.flash_attention(**given, causal=True, out_dtype="float32", return_lse=True)
    q, k, v = (x.astype(np.float32) for x in wide(given))
    s = (q[0, 3] @ k[0, 1].T) / np.float32(8)
    s[np.arange(333) > np.arange(70)[:, None] + 263] = -np.inf
    m, total, o = np.full((70, 1), -np.inf, np.float32), np.zeros((70, 1)), np.zeros((70, 64))
    for start in (320, 160, 0):
        tile = slice(start, start + 160)
        m_new = np.maximum(m, s[:, tile].max(axis=1, keepdims=True))
        base = np.where(m_new == -np.inf, 0, m_new)
        p, alpha = 448 * np.exp(s[:, tile] - base), np.exp(m - base)
        total = total * alpha + p.sum(axis=1, keepdims=True)
        o, m = o * alpha + p.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) @ v[0, 1, tile], m_new
    assert error(out[0, 3], o / total) < 2e-3  # where rounding of s moves p over a border of e4m3
    np.testing.assert_allclose(lse[0, 3], (m + np.log(total / 448))[:, 0], atol=1e-5)


def test_values_in_rows_as_bytes_and_transposed_give_the_same_bits():
    given = quantized(inputs())
    right = cufa.flash_attention(**given)
    assert right.dtype == ml_dtypes.bfloat16 and isinstance(given["v"], QuantizedValues)
    by_default = {name: x for name, x in given.items() if name != "v_scale"}
    rows = given | {"v": given["v"].rows().view(np.uint8)}
    for other in (by_default, rows):
        np.testing.assert_array_equal(cufa.flash_attention(**other), right)
    turned = {name: given[name].swapaxes(1, 2) for name in "qk"} | {"v": rows["v"].swapaxes(1, 2)}
    out = np.empty((2, 200, 4, 64), np.float16)
    assert cufa.flash_attention(**given | turned, layout="bshd", out_dtype="float16", out=out) is out
    np.testing.assert_allclose(out.swapaxes(1, 2).astype(np.float32), right.astype(np.float32), atol=5e-3)


@pytest.mark.parametrize("change", [{"rotate": 3}, {"smooth": True}, {"rotate": 3, "smooth": True}])
def test_rotation_and_smoothing_leave_the_result(change):
    x = inputs()
    if "smooth" in change:
        x[1] += 3  # a mean key
    exact = cufa.attention_reference(*(y.astype(np.float64) for y in x))
    out = cufa.flash_attention(**quantized(x, **change), out_dtype="float32")
    assert error(out, exact) < 0.06
    if "rotate" in change:  # keys of another seed are other keys
        other = quantized(x, **change) | {"k": quantized(x, **change | {"rotate": 4})["k"]}
        assert error(cufa.flash_attention(**other, out_dtype="float32"), exact) > 0.2
    if change == {"smooth": True}:
        assert error(cufa.flash_attention(**quantized(x), out_dtype="float32"), exact) > 1.2 * error(
            out, exact
        )


def test_rotation_halves_the_error_of_outliers():
    """N(0, 1) + N(0, 100) · Bernoulli(0.001) (FlashAttention-3, section 4.3)."""
    rng = np.random.default_rng(3)
    shape = 1, 4, 2048, 128
    x = [
        (rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 1e-3)).astype(
            np.float32
        )
        for _ in ROLES
    ]
    exact = cufa.attention_reference(*(y.astype(np.float64) for y in x))
    plain, rotated = (
        error(
            cufa.flash_attention(**quantized(x, ("tensor", "tensor", "head"), **of), out_dtype="float32"),
            exact,
        )
        for of in ({}, {"rotate": 1})
    )
    assert rotated < 0.55 * plain


def test_empty_and_unseen_rows_are_zeros():
    x = quantized(inputs(64, 5, 3, 1))
    out, lse = cufa.flash_attention(**x, causal=True, return_lse=True)
    assert (
        (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -np.inf).all() and np.isfinite(lse[:, :, 2:]).all()
    )
    none = cufa.flash_attention(**x, seqlens_k=[0])
    assert none.shape == (1, 4, 5, 64) and (none == 0).all()


CU_Q, CU_K = [0, 40, 40, 170], [0, 7, 200, 500]


@pytest.mark.parametrize("per", [("tensor",) * 3, ("head",) * 3, ("block",) * 3, ("token", "token", "head")])
def test_packed_sequences_are_those_of_calls_of_their_own(per):
    """Tile borders count from the first key of a sequence. Row 170 and those after it are padding."""
    x = inputs(64, 180, 510, 1)
    q, k, v = (y[0].swapaxes(0, 1) for y in x)
    given = packed(x, per, CU_Q, CU_K)
    out, lse = cufa.flash_attention_varlen(
        **given, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, causal=True, out_dtype="float32", return_lse=True
    )
    assert (out[170:] == 0).all()
    exact = [
        cufa.dequantize(given[role], given[f"{role}_scale"], role=role, cu_seqlens=cu)
        for role, cu in zip(ROLES, (CU_Q, CU_K, CU_K), strict=True)
    ]
    for rows, keys in zip(itertools.pairwise(CU_Q), itertools.pairwise(CU_K), strict=True):
        rows, keys = slice(*rows), slice(*keys)
        if rows.start == rows.stop:
            continue
        parts = [x[None, part] for x, part in zip(exact, (rows, keys, keys), strict=True)]
        right, right_lse = cufa.attention_reference(*parts, causal=True, layout="bshd", return_lse=True)
        assert error(out[None, rows], right) < 0.035
        np.testing.assert_allclose(lse[None, :, rows], right_lse, atol=2e-4)
        if per[0] == "head":
            alone = {
                role: cufa.quantize(x[None, part], role=role, layout="bshd")
                for role, x, part in zip(ROLES, (q, k, v), (rows, keys, keys), strict=True)
            }
            dense = cufa.flash_attention(
                *(x for x, _ in alone.values()), causal=True, layout="bshd", out_dtype="float32",
                **{f"{role}_scale": scale for role, (_, scale) in alone.items()},
            )  # fmt: skip
            assert error(out[None, rows], dense) < 2e-3
    for others in ([0, 8, 200, 500], 500):
        with pytest.raises(ValueError, match="v was quantised with other cu_seqlens"):
            cufa.flash_attention_varlen(**given, cu_seqlens_q=CU_Q, cu_seqlens_k=others)
    with pytest.raises(ValueError, match="k_scale is missing"):
        cufa.flash_attention_varlen(**given | {"k_scale": None}, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


GOOD = quantized(inputs(64, 8, 8, 1))
ROWS = GOOD | {"v": GOOD["v"].rows()}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"q_scale": None}, ValueError, "q_scale is missing"),
        ({"v_scale": None}, ValueError, "v_scale is missing"),
        ({"q_scale": None, "k_scale": None, "v_scale": None}, ValueError, "q_scale is missing"),
        ({"k_scale": 0.0}, ValueError, r"k_scale is 0\.0.*above 0"),
        ({"k_scale": np.array([[1, -1]], np.float32)}, ValueError, r"k_scale\[0, 1\] is -1\.0"),
        ({"q_scale": np.float32("nan")}, ValueError, "q_scale is nan"),
        ({"v_scale": 1e300}, ValueError, "v_scale is 1e"),
        ({"q_scale": np.ones((1, 2), np.float32)}, ValueError, r"q_scale has shape \(1, 2\); it takes"),
        ({"v_scale": np.ones((1, 2, 8), np.float32)}, ValueError, "v_scale.*a scale per token"),
        ({"k_scale": np.ones((1, 2), bool)}, TypeError, "k_scale is bool"),
        ({"k": np.ones((1, 2, 8, 64), np.float32)}, TypeError, "k is float32.*cufa.quantize"),
        ({"out_dtype": "float64"}, ValueError, "out_dtype='float64'"),
        ({"dropout": 0.1, "seed": 1}, ValueError, "dropout= takes q of 16"),
        ({"score": cufa.score(lambda s, b, h, i, j: s)}, ValueError, "score= and bias= take q of 16"),
        ({"out": np.empty((1, 4, 8, 64), np.float32)}, TypeError, "out is float32 but out_dtype='bfloat16'"),
        ({"algorithm": "fa1"}, ValueError, "algorithm='fa1'"),
        ({"precision": "tf32"}, ValueError, "precision='tf32'"),
        ({"device": "cuda"}, ValueError, "device='cuda'"),
    ],
)
def test_errors_name_the_argument(change, kind, words):
    with pytest.raises(kind, match=words):
        cufa.flash_attention(**ROWS | change)


def test_inputs_that_are_not_e4m3_take_no_scales():
    x = inputs(64, 8, 8, 1)
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(TypeError, match="q is float32"):
            cufa.flash_attention(*x, **{name: 1.0})
    for other in ({"out_dtype": "bfloat16"}, {"accumulate": "tile"}):
        with pytest.raises(TypeError, match=f"q is float32.*{next(iter(other))}="):
            cufa.flash_attention(*x, **other)


def test_head_dims_are_multiples_of_16():
    x = [np.zeros((1, 2, 8, 24), np.uint8)] * 3
    with pytest.raises(ValueError, match="head_dim is 24"):
        cufa.flash_attention(*x, q_scale=1, k_scale=1, v_scale=1)


def test_transposed_values_go_with_their_layout_and_lengths():
    x = inputs(64, 8, 8, 1)
    v, _ = cufa.quantize(x[2], role="v", seqlens=[5])
    for wrong in ({}, {"seqlens_k": [6]}):
        with pytest.raises(ValueError, match=r"v was quantised with seqlens=\[5\]"):
            cufa.flash_attention(**GOOD | {"v": v}, **wrong)
    cufa.flash_attention(**GOOD | {"v": v}, seqlens_k=[5])
    with pytest.raises(ValueError, match="v was quantised with layout='bhsd'"):
        cufa.flash_attention(**GOOD, layout="bshd")


@pytest.mark.parametrize("accumulate", ["tile", "row", 1, 4])
def test_float32_sums_are_those_of_every_accumulate(accumulate):
    np.testing.assert_array_equal(
        cufa.flash_attention(**ROWS, accumulate=accumulate), cufa.flash_attention(**ROWS)
    )


@pytest.mark.parametrize("accumulate", [-2, "block", True, 0, 2.0])
def test_other_sums_are_refused(accumulate):
    with pytest.raises(ValueError, match=f"accumulate={accumulate!r}"):
        cufa.flash_attention(**ROWS, accumulate=accumulate)


def test_the_plan_of_e4m3_says_how_values_are_summed():
    v, _ = cufa.quantize(np.ones((1, 2, 300, 64), np.float32), role="v")
    q = np.zeros((1, 4, 300, 64), np.uint8)
    found = cufa.plan(q, q[:, :2], v, device="sm_90")
    assert found.spec.name == "fa3_forward_fp8" and "(accumulate='row', by length)" in str(found)
    assert "(accumulate='tile', by length)" in str(
        cufa.plan((1, 4, 1 << 17, 64), dtype="float8_e4m3", device="sm_90")
    )
    found = cufa.plan((1, 4, 300, 64), dtype="float8_e4m3", device="sm_89")
    assert found.spec.name == "fa2_forward_fp8" and "after each tile, in float32" in str(found)
    assert cufa.plan(q, q[:, :2], v, device="sm_90", algorithm="fa2").spec is found.spec
    with pytest.raises(
        ValueError, match=r"fa3_forward_fp8 needs sm_90.*fa2_forward_fp8 needs sm_89 or later"
    ):
        cufa.plan((1, 4, 300, 64), dtype="float8_e4m3", device="sm_86")


@pytest.mark.parametrize("algorithm", ["fa3", "fa2"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": ("head", "head", "block")}, "takes v_scale per tensor and head, not per block"),
        ({"scales": ("token", "head", "head")}, "takes q_scale per .*, not per token"),
        ({"out_dtype": "float32"}, "writes float16 and bfloat16, not float32"),
        ({"sink": True}, "takes no sink"),
    ],
)
def test_what_no_kernel_serves(change, words, algorithm):
    problem = cufa.plan((1, 4, 300, 64), dtype="float8_e4m3", device="sm_90").problem
    with pytest.raises(ValueError, match=words):
        make_plan(dataclasses.replace(problem, **change), Device.typical("sm_90"), algorithm)
