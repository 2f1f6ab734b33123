"""FA3's soft cap, executed in checked mode: four scores at once by a quotient, scores near 0 by polynomials that each
warp of 16 rows chooses. (Sinks, ALiBi and caps beside one another: test_ragged.py.)"""

from __future__ import annotations

import re

import numpy as np
import pytest
from lengths_support import TOLERANCE
from support import make_inputs

import cufa
from cufa import masks
from cufa.build.compiler import SOURCE_DIR
from cufa.kernels import KERNELS, TileConfig
from cufa.run.emulate.calls import emulate

SPEC = KERNELS["fa3_forward"]


def test_a_softcap_takes_any_score():
    """Huge scores are the cap, or minus the cap; a row of NaN is NaN and no other is; what a key holds that no row sees
    does not matter."""
    q, k, v = make_inputs(1, 1, 1, 192, 384, 64, "bfloat16")
    q[0, 0, 3] *= 2.0**40
    q[0, 0, 5] = np.nan
    q[0, 0, 7] *= 2.0**110
    k[0, 0, 300:], v[0, 0, 300:] = np.nan, np.nan
    scores = {"softcap": 3.0, "seqlens_k": np.array([300], np.int32)}
    found = emulate(q, k, v, algorithm="fa3", mode="checked", **scores)
    assert not found.findings
    with np.errstate(over="ignore", invalid="ignore"):
        out, lse = cufa.attention_reference(q, k, v, return_lse=True, **scores)
    np.testing.assert_array_equal(np.isnan(found.out.astype(np.float64)), np.isnan(out))
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=2.0**-6)
    np.testing.assert_allclose(found.lse, lse, atol=1e-5)


def check_near_0_and_far(config: TileConfig, mask: str, dtype: str, scale: float = 0.125) -> None:
    """Against float64. Of warps of 16 rows, some have scores near 0, some nearly half of the cap away, some far away,
    and one far ones, all of one sign, in a single row. q is such that x, of which tanh is taken, is the same under
    every scale."""
    bands = {"full": masks.full(), "causal": masks.causal(), "window": masks.window(config.block_kv + 100, 0)}
    head_dim, cap = config.max_head_dim, 15.0
    # Under each mask the first 64 rows see at least one whole tile that is not their last.
    q, k, v = make_inputs(1, 1, 1, 192, 192 + 2 * config.block_kv, head_dim, dtype)
    k[..., 0] = 1
    k[
        ..., 1
    ] = -1  # but for a few keys of the tile that is visited last: there maxima grow, and in some lanes alone
    k[:, :, 3 : config.block_kv : 32, 1] = 1
    for first, greatest in ((0, 0.28), (16, 3.0), (32, 0.48), (48, 0.28), (64, 0.0)):
        rows = q[0, 0, first : first + 16].astype(np.float32)
        found = np.abs(rows @ k[0, 0].T.astype(np.float32)).max(axis=-1, keepdims=True)
        q[0, 0, first : first + 16] = rows * (greatest * cap / (0.125 * found))
    q[0, 0, 50] = 0
    q[0, 0, 50, 0] = -120  # x = -1
    q[0, 0, 80:96] = 0
    q[0, 0, 80:96, 1] = 55  # x = 0.46 or less than 0
    q = (q.astype(np.float32) * np.float32(0.125 / scale)).astype(q.dtype)
    scores = {"softcap": cap, "scale": scale, "mask": bands[mask]}
    found = emulate(q, k, v, algorithm="fa3", config=config, mode="checked", **scores)
    assert not found.findings
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **scores)
    tolerance = TOLERANCE[dtype] * (1 + np.abs(out).max())
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=tolerance, rtol=0)
    np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=0)


@pytest.mark.sampled(fixed=3, dated=1, pairs=[("config", "mask")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("config", SPEC.configs, ids=lambda c: f"{c.block_q}x{c.block_kv}-d{c.max_head_dim}")
def test_a_softcap_of_warps_near_0_and_of_others(config, mask, dtype):
    """Each warp of 16 rows caps its scores by itself, by the shortest polynomial that all of them allow."""
    check_near_0_and_far(config, mask, dtype)


@pytest.mark.parametrize("scale", [2.0**-21, 2.0**24])
def test_a_softcap_of_scales_without_a_polynomial(scale):
    check_near_0_and_far(SPEC.configs[0], "full", "bfloat16", scale)


def test_a_softcap_of_rows_whose_maximum_grows_and_grows():
    """Under a cap so large that scores near 0 are far apart: what is subtracted from them must follow, or exponentials
    overflow; and where they fall, and are small, it must stay."""
    cap, config = 1000.0, SPEC.configs[0]
    q, k, v = make_inputs(1, 1, 1, 128, 8 * config.block_kv, 64, "bfloat16")
    q[..., 1:], k[..., 1:] = 0, 0
    q[0, 0, :, 0] = np.linspace(-8, 8, 128)
    k[0, 0, :, 0] = np.repeat(
        [120, 90, 60, 30, -30, -60, -90, -100], config.block_kv
    )  # visited from the last on
    scores = {"softcap": cap, "scale": 0.25}
    found = emulate(q, k, v, algorithm="fa3", config=config, mode="checked", **scores)
    assert not found.findings
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **scores)
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=0.02, rtol=0)
    np.testing.assert_allclose(found.lse, lse, atol=2e-7 * cap, rtol=0)


@pytest.mark.parametrize("terms", [3, 4])
def test_polynomials_of_the_cap_are_as_near_as_said(terms):
    """Off by at most 2e-7, in float32, as the kernel multiplies."""
    text = (SOURCE_DIR / "shared/softcap.cuh").read_text(encoding="utf-8")
    limit = re.search(r"NEAR_0\[5\] = {(.*?)};", text)[1].split(",")[terms].strip().removesuffix("f")
    coefficients = re.findall(
        r"{([^{}]*)}", re.search(r"TANH_OVER_X\[5\]\[4\] = {(.*?)};", text, re.DOTALL)[1]
    )[terms]
    factors = [np.float32(x.strip().removesuffix("f")) for x in coefficients.split(",")]
    x = np.linspace(0, float(limit), 100_001).astype(np.float32)
    square, total = x * x, np.full_like(x, factors[-1])
    for factor in factors[-2::-1]:
        total = square * total + factor
    assert len(factors) == terms
    assert np.abs((x * total).astype(np.float64) - np.tanh(x.astype(np.float64))).max() <= 2e-7
