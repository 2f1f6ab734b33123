"""What changes scores in FA3's forward, executed in checked mode: ALiBi, sinks and their log-sum-exp, the soft cap of
four scores at once. Few persistent blocks with several items each; and bugs that must be noticed."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from lengths_support import TOLERANCE
from support import forward_operands, make_inputs, make_problem, plan_with_blocks

import cufa
from cufa import masks
from cufa.build.compiler import SOURCE_DIR
from cufa.kernels import KERNELS, TileConfig
from cufa.run.emulate.calls import EmulationError, Execution, emulate, run_plan

SPEC = KERNELS["fa3_forward"]
CONFIGS = pytest.mark.parametrize(
    ("config", "head_dim"),
    [pytest.param(c, c.max_head_dim, id=f"{i}-d{c.max_head_dim}") for i, c in enumerate(SPEC.configs)],
)
SINK = np.array([0.5, -1.0, 9.0, -np.inf], np.float32)
SLOPES = np.linspace(-0.02, 0.4, 8).reshape(2, 4).astype(np.float32)
OPTIONS = {
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of all sequences": {"alibi_slopes": SLOPES[1]},
    "sink": {"sink": SINK},
    "softcap": {"softcap": 2.0},
    "softcap near 0": {"softcap": 30.0},
    "all": {"alibi_slopes": SLOPES, "sink": SINK, "softcap": 2.0},
}
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "top-left": masks.causal("top-left"),
    "window": masks.window(60, 9),
}


def check(
    options: str,
    mask: str,
    lengths: tuple[int, int],
    config: TileConfig,
    dtype: str = "bfloat16",
    schedule: str | int = "ascending",
) -> None:
    """Two batches and four heads of two key/value heads, on three blocks, against float64."""
    scores = {"mask": MASKS[mask], **OPTIONS[options]}
    inputs = make_inputs(2, 4, 2, *lengths, config.max_head_dim, dtype)
    problem = dataclasses.replace(
        make_problem(*inputs, mask=MASKS[mask]),
        softcap=scores.get("softcap"), alibi="alibi_slopes" in scores, sink="sink" in scores,
    )  # fmt: skip
    given = forward_operands(*inputs)
    given |= {name: scores[name] for name in ("alibi_slopes", "sink") if name in scores}
    run = run_plan(plan_with_blocks(problem, config, 3), given, Execution("checked", schedule), trace=False)
    assert not run.findings, "\n".join(map(str, run.findings))
    out, lse = cufa.attention_reference(*inputs, return_lse=True, **scores)
    tolerance = TOLERANCE[dtype] * (1 + np.abs(out).max())
    np.testing.assert_allclose(given["out"].astype(np.float64), out, atol=tolerance, rtol=0)
    np.testing.assert_allclose(given["lse"], lse, atol=1e-4, rtol=1e-6)
    assert not given["out"][out == 0].astype(np.float64).any()


@pytest.mark.sampled(fixed=4, dated=1, pairs=[("options", "mask")])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150), (65, 129)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
@CONFIGS
def test_results(config, head_dim, options, mask, lengths, dtype, schedule):
    check(options, mask, lengths, config, dtype, schedule)


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


NEAR_0 = list(SPEC.configs)
NEAR_0_CONFIGS = pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=f"{i}-d{c.max_head_dim} {c.block_q}x{c.block_kv}") for i, c in enumerate(NEAR_0)],
)


@pytest.mark.sampled(fixed=3, dated=1, pairs=[("config", "mask")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@NEAR_0_CONFIGS
def test_a_softcap_of_warps_near_0_and_of_others(config, mask, dtype):
    """Each warp of 16 rows caps its scores by itself, by the shortest polynomial that all of them allow."""
    check_near_0_and_far(config, mask, dtype)


@pytest.mark.parametrize("scale", [2.0**-21, 2.0**24])
def test_a_softcap_of_scales_without_a_polynomial(scale):
    check_near_0_and_far(NEAR_0[0], "full", "bfloat16", scale)


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
    text = (SOURCE_DIR / "forward/fa3/fast_softcap.cuh").read_text(encoding="utf-8")
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


KERNEL, CONSUMER = "forward/fa3/kernel.cu", "forward/fa3/consumer.cuh"
OPTIONAL, CAP = "shared/alibi_sink.cuh", "forward/fa3/fast_softcap.cuh"
#: Where, what is replaced, by what; options, mask and lengths that show it.
PLANTED = {
    "the slope of the first sequence": (
        OPTIONAL, "i64(number) * p.alibi_stride", "i64(0) * p.alibi_stride", ("alibi", "causal", (300, 300))
    ),
    "the slope of another head": (
        "forward/fa3/consumer_items.cuh",
        "descriptor), item.head);", "descriptor), 0);",
        ("alibi of all sequences", "full", (300, 300)),
    ),
    "ALiBi after the scale": (
        KERNEL, "softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);\n    pack",
        "softmax_of_tile(S_rmem, softmax, p.scale_log2, alpha);\n    pack", ("alibi", "full", (150, 300)),
    ),
    "a distance from the tile's first key": (
        "forward/fa3/consumer_items.cuh", "row, tiles.j * Bc + lane % 4 * 2);\n", "row, tiles.j * Bc);\n",
        ("alibi", "full", (150, 300))
    ),
    "a sink forgotten": (
        OPTIONAL, "if constexpr (SINK) return softmax.join", "if constexpr (false) return softmax.join",
        ("sink", "causal", (150, 300)),
    ),
    "the sink of another head": (
        CONSUMER, "row_factor(p, softmax, r, item.head)", "row_factor(p, softmax, r, 0)", ("sink", "full", (150, 300)),
    ),
    "no sink where a block sees no key": (
        CONSUMER, "SINK ? ld_global<float>(p.sink + item.head) : NEG_INF", "NEG_INF", ("sink", "causal", (450, 150))
    ),
    "the inverse of the wrong half": (
        CAP, "of_high = inverse * low;", "of_high = inverse * high;", ("softcap", "full", (150, 300))
    ),
    "a score for its neighbour": (
        CAP, "of_high * factor[3], of_high", "of_high * factor[2], of_high", ("softcap", "full", (150, 300))
    ),
    "far scores taken for near ones": (
        CAP, "greatest * unit <= NEAR_0[TERMS]", "greatest * unit <= 4 * NEAR_0[TERMS]",
        ("softcap", "full", (150, 300)),
    ),
    "a coefficient of the wrong sign": (
        CAP, "-0.3329747653f", "0.3329747653f", ("softcap near 0", "full", (150, 300))
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(plant, bug):
    file, old, new, (options, mask, lengths) = PLANTED[bug]
    config = SPEC.configs[0]
    check(options, mask, lengths, config)
    plant(file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        check(options, mask, lengths, config)


IS_NEAR_0 = "greatest * unit <= NEAR_0[TERMS] && unit > 1e-5f && unit < 1e4f"
#: File, what is replaced in it, by what; the mask and the scale that show it.
PLANTED_NEAR_0 = {
    "one lane near 0 speaks for its warp": (
        KERNEL, "!warp_any(!is_near_0<3>(greatest, unit))", "warp_any(is_near_0<3>(greatest, unit))", "full", 0.125
    ),
    "one lane near 0 speaks for its warp, masked": (
        CAP, "warp_any(!is_near_0<4>(greatest_magnitude(S), unit))",
        "!warp_any(is_near_0<4>(greatest_magnitude(S), unit))", "causal", 0.125,
    ),
    "the longer polynomial beyond its limit": (
        KERNEL, "!warp_any(!is_near_0<4>(greatest, unit))", "true", "full", 0.125
    ),
    "far scores taken for near ones, causal": (CAP, IS_NEAR_0, "true", "causal", 0.125),
    "far scores taken for near ones, window": (CAP, IS_NEAR_0, "true", "window", 0.125),
    "far scores below 0 taken for near ones": (CAP, "c = fmaxf(c, fabsf(s));", "c = fmaxf(c, s);", "full", 0.125),
    "near scores by a wrong polynomial": (CAP, "0.1252255531f", "0.3252255531f", "full", 0.125),
    "scores not so near by a wrong polynomial": (CAP, "0.1314513541f", "0.1914513541f", "full", 0.125),
    "masked scores by a wrong polynomial, causal": (CAP, "0.1314513541f", "0.3314513541f", "causal", 0.125),
    "a scale too small for its seventh power": (CAP, "unit > 1e-5f && unit < 1e4f", "true", "full", 2.0**-21),
    "a scale too large for its seventh power": (CAP, "unit > 1e-5f && unit < 1e4f", "true", "full", 2.0**24),
    "the maximum is not capped": (
        CAP, "m_tile[r] = cap(quad_max(m_tile[r]));", "m_tile[r] = quad_max(m_tile[r]);", "full", 2.0**-10
    ),
    "the maximum of one lane": (
        CAP, "m_tile[r] = cap(quad_max(m_tile[r]));", "m_tile[r] = cap(m_tile[r]);", "full", 0.125
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED_NEAR_0)
def test_planted_near_0(plant, bug):
    file, old, new, mask, scale = PLANTED_NEAR_0[bug]
    plant(file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        check_near_0_and_far(NEAR_0[0], mask, "bfloat16", scale)
