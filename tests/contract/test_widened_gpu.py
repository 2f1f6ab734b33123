"""16-bit queries over keys and values of e4m3 on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cufa
from cufa.problem import float8

pytestmark = pytest.mark.gpu


def on_device(cp: Any, x: np.ndarray) -> Any:
    return cp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype) if x.itemsize == 2 else cp.asarray(x)


def inputs(per: str, dtype: str, head_dim: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng, given = np.random.default_rng(head_dim), dict[str, np.ndarray]()
    for name in "kv":
        x = rng.standard_normal((2, 2, 700, head_dim), np.float32)
        x8, given[f"{name}_scale"] = cufa.quantize(x, role="k", per=per)
        given[name] = x8.view(np.uint8)
    q = rng.standard_normal((2, 4, 300, head_dim), np.float32).astype(getattr(ml_dtypes, dtype, dtype))
    return q, given


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("per", float8.MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dequantize_gives_the_bits_of_the_cpu(dtype, per, head_dim):
    cp = pytest.importorskip("cupy")
    _, given = inputs(per, dtype, head_dim)
    x, scale = given["k"], given["k_scale"]
    right = cufa.dequantize(x, scale, role="k", dtype=dtype)
    for turn in (lambda y: y, lambda y: y[..., ::2, :], lambda y: y[:, :, 1:]):
        if per in ("block", "token") and turn(x).shape != x.shape:
            continue
        found = cufa.dequantize(turn(cp.asarray(x)), cp.asarray(scale), role="k", dtype=dtype)
        np.testing.assert_array_equal(found.view(cp.uint16).get(), turn(right).view(np.uint16))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("per", ["head", "token"])
def test_attention_is_that_of_widened_keys_and_values(per, head_dim):
    cp = pytest.importorskip("cupy")
    q, given = inputs(per, "bfloat16", head_dim)
    on_gpu = {name: cp.asarray(x) for name, x in given.items()}
    lengths = cp.asarray(np.array([700, 123], np.int32))
    on_gpu["k"][1, :, 123:] = 0x7F
    wide = [cufa.dequantize(on_gpu[x], on_gpu[f"{x}_scale"], role="k", dtype="bfloat16") for x in "kv"]
    device_q = on_device(cp, q)
    for options in ({"causal": True}, {"causal": True, "window": (50, 0)}, {}):
        out = cufa.flash_attention(device_q, **on_gpu, **options, seqlens_k=lengths)
        right = cufa.flash_attention(device_q, *wide, **options, seqlens_k=lengths)
        np.testing.assert_array_equal(out.view(cp.uint16).get(), right.view(cp.uint16).get())
    from_host = cufa.flash_attention(q, **given, device="cuda")
    again = cufa.flash_attention(q, **given, device="cpu")
    np.testing.assert_allclose(from_host.astype(np.float32), again.astype(np.float32), atol=2e-2)
