"""16-bit queries over keys and values of e4m3, and dequantize in 16 bits: on the CPU, on a GPU, and the kernel on the
executor."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import GPU

import cufa
from cufa.kernels import widen
from cufa.problem import float8
from cufa.problem.lengths import DENSE
from cufa.run.cpu.quantize import widened
from cufa.run.emulate import build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

on_cpu = pytest.mark.usefixtures("on_cpu")
RNG = np.random.default_rng(4)


def inputs(per: str, dtype: str = "bfloat16", head_dim: int = 64) -> tuple[Any, dict[str, Any], list[Any]]:
    """q, keys and values with their scales in rows, and the numbers that they stand for."""
    q = RNG.standard_normal((2, 4, 50, head_dim)).astype(getattr(ml_dtypes, dtype, dtype))
    given, wide = dict[str, Any](), []
    for name in "kv":
        x = RNG.standard_normal((2, 2, 400, head_dim)).astype(np.float32)
        given[name], given[f"{name}_scale"] = cufa.quantize(x, role="k", per=per)
        wide.append(cufa.dequantize(given[name], given[f"{name}_scale"], role="k"))
    return q, given, wide


@on_cpu
@pytest.mark.parametrize("per", float8.MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_numbers_are_those_of_widened_keys_and_values(per, dtype):
    q, given, wide = inputs(per, dtype)
    of_q = [x.astype(q.dtype) for x in wide]
    out, lse = cufa.flash_attention(q, **given, causal=True, return_lse=True)
    right, right_lse = cufa.flash_attention(q, *of_q, causal=True, return_lse=True)
    np.testing.assert_array_equal(out.view(f"u{out.itemsize}"), right.view(f"u{out.itemsize}"))
    np.testing.assert_array_equal(lse, right_lse)
    turned = {name: x.swapaxes(1, 2) if name in "kv" else x for name, x in given.items()}
    other = cufa.flash_attention(q.swapaxes(1, 2), **turned, causal=True, layout="bshd")
    np.testing.assert_array_equal(other.swapaxes(1, 2).view(f"u{out.itemsize}"), out.view(f"u{out.itemsize}"))


@on_cpu
def test_padding_may_hold_nan_and_values_may_be_transposed():
    q, given, _ = inputs("head")
    k = given["k"].view(np.uint8).copy()
    k[0, :, 123:] = 0x7F
    x = RNG.standard_normal((2, 2, 400, 64)).astype(np.float32)
    values, _ = cufa.quantize(x, role="v")
    of_rows = values.rows().view(np.uint8)
    lengths = {"seqlens_k": [123, 400]}
    out = cufa.flash_attention(q, k, values, k_scale=given["k_scale"], **lengths)
    right = cufa.flash_attention(
        q, given["k"], of_rows, k_scale=given["k_scale"], v_scale=values.scale, **lengths
    )
    assert np.isfinite(out.astype(np.float32)).all()
    np.testing.assert_array_equal(out.view(np.uint16), right.view(np.uint16))


@on_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dequantize_in_16_bits(dtype):
    _, given, (k, _) = inputs("block")
    found = cufa.dequantize(given["k"], given["k_scale"], role="k", dtype=dtype)
    assert str(found.dtype) == dtype
    np.testing.assert_array_equal(found.astype(np.float64), k.astype(found.dtype).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("per", float8.MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dequantize_gives_the_bits_of_the_cpu(dtype, per, head_dim, cp):
    _, given, _ = inputs(per, dtype, head_dim)
    x, scale = given["k"].view(np.uint8), given["k_scale"]
    right = cufa.dequantize(x, scale, role="k", dtype=dtype)
    for cut in (lambda y: y, lambda y: y[..., ::2, :], lambda y: y[:, :, 1:]):
        if per in ("block", "token") and cut(x).shape != x.shape:
            continue
        found = cufa.dequantize(cut(cp.asarray(x)), cp.asarray(scale), role="k", dtype=dtype)
        np.testing.assert_array_equal(found.view(cp.uint16).get(), cut(right).view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("per", ["head", "token"])
def test_attention_on_a_gpu_is_that_of_widened_keys_and_values(per, head_dim, cp):
    q, made, _ = inputs(per, "bfloat16", head_dim)
    given = {name: x.view(np.uint8) if name in "kv" else x for name, x in made.items()}
    on_gpu = {name: cp.asarray(x) for name, x in given.items()}
    lengths = cp.asarray(np.array([400, 123], np.int32))
    on_gpu["k"][1, :, 123:] = 0x7F
    wide = [cufa.dequantize(on_gpu[x], on_gpu[f"{x}_scale"], role="k", dtype="bfloat16") for x in "kv"]
    device_q = GPU.array(q)
    for options in ({"causal": True}, {"causal": True, "window": (50, 0)}, {}):
        out = cufa.flash_attention(device_q, **on_gpu, **options, seqlens_k=lengths)
        right = cufa.flash_attention(device_q, *wide, **options, seqlens_k=lengths)
        np.testing.assert_array_equal(out.view(cp.uint16).get(), right.view(cp.uint16).get())
    from_host = cufa.flash_attention(q, **given, device="cuda")
    again = cufa.flash_attention(q, **given, device="cpu")
    np.testing.assert_allclose(from_host.astype(np.float32), again.astype(np.float32), atol=2e-2)


CASES = [
    *((64, mode, "bfloat16", 16) for mode in float8.MODES),
    (16, "block", "float16", 16), (80, "head", "bfloat16", 16), (256, "token", "float16", 1),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "mode", "dtype", "alignment"), CASES)
def test_the_kernel_gives_the_twins_bits(head_dim, mode, dtype, alignment):
    room = RNG.integers(0, 256, (2, 300, 3, head_dim + (0 if alignment == 16 else 8)), np.uint8)
    room[room & 0x7F == 0x7F] = 0  # NaN has many bits
    x = room[..., :head_dim].swapaxes(1, 2)
    block, element = float8.key_tile(head_dim), getattr(ml_dtypes, dtype, dtype)
    shape = float8.scale_shape(mode, block, 3, 2, 300, DENSE)
    scale = RNG.uniform(0.01, 3, shape).astype(np.float32)
    out = np.zeros(x.shape, element)
    memory = [
        GlobalArray("x", room, False),
        GlobalArray("out", out, True),
        GlobalArray("scale", np.atleast_1d(scale), False),
    ]
    numbers = widen.numbers(x, tuple(y.address for y in memory), shape, mode, block)
    assert len(numbers) == widen.NUM_MEMBERS
    chosen = widen.constants(head_dim, dtype, alignment == 16)
    entries = build.kernel(widen.SOURCE, chosen, (widen.ENTRY,), True, (widen.PARAMETER,))
    argument = (ctypes.c_int64 * len(numbers))(*numbers)
    _, findings = execute(
        entries[widen.ENTRY], widen.launch(x.shape), [argument], memory, Execution("checked")
    )
    assert not findings
    right = widened(x, scale, mode, block, element)
    np.testing.assert_array_equal(out.view(np.uint16), right.view(np.uint16))


@on_cpu
def test_the_plan_says_so():
    plan = cufa.plan((1, 8, 4096, 128), kv_dtype="float8_e4m3", device="sm_90")
    assert plan.spec.name == "fa3_forward"
    assert (
        "keys and values of e4m3: a launch before attention (widen_e4m3) writes them as bfloat16, 16,777,216 B"
        in str(plan)
    )
    with pytest.raises(ValueError, match="kv_dtype='int8'"):
        cufa.plan((1, 8, 64, 64), kv_dtype="int8")


@on_cpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_scale": None}, "v_scale is missing"),
        ({"v": np.zeros((2, 2, 400, 64), np.float32)}, "v is float32 of 4 axes; with a scale it is e4m3"),
        ({"k_scale": np.zeros((2, 2), np.float32)}, r"k_scale\[0, 0\] is 0.0"),
        ({"k_scale": np.ones((2, 3), np.float32)}, r"k_scale has shape \(2, 3\)"),
        ({"q_scale": 1.0}, "q_scale=1.0 with q of bfloat16"),
        ({"out_dtype": "float16"}, "out_dtype='float16' with q of bfloat16"),
    ],
)
def test_what_is_refused(change, message):
    q, given, _ = inputs("head")
    with pytest.raises((TypeError, ValueError), match=message):
        cufa.flash_attention(q, **given | change)
