"""What changes scores in FA3's forward, executed in checked mode: ALiBi, sinks and their log-sum-exp, the soft cap of
four scores at once. Few persistent blocks with several items each; and bugs that must be noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lengths_support import TOLERANCE
from support import forward_operands, make_inputs, make_problem, plan_with_blocks
from test_emulate_mutants import plant

import cufa
from cufa import masks
from cufa.executor.emulate import EmulationError, Execution, emulate, run_plan
from cufa.kernels import KERNELS, TileConfig

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


@pytest.mark.sampled(fixed=4, dated=2, pairs=[("options", "mask")])
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
    """Against float64. Scores are near 0 in some warps of 16 rows, far from it in others, and far, all of one sign, in
    a single row of one. q is such that x, of which tanh is taken, is the same under every scale."""
    bands = {"full": masks.full(), "causal": masks.causal(), "window": masks.window(config.block_kv + 100, 0)}
    head_dim = min(config.max_head_dim, 128)
    # Under each mask the first 64 rows see at least one whole tile that is not their last.
    q, k, v = make_inputs(1, 1, 1, 192, 192 + 2 * config.block_kv, head_dim, dtype)
    q[0, 0, 16:32] *= 16
    k[..., 0] = 1
    q[0, 0, 50] = 0
    q[0, 0, 50, 0] = -120  # x = -1
    q[0, 0, 64:80] = 0
    q = (q.astype(np.float32) * np.float32(0.125 / scale)).astype(q.dtype)
    scores = {"softcap": 15.0, "scale": scale, "mask": bands[mask]}
    found = emulate(q, k, v, algorithm="fa3", config=config, mode="checked", **scores)
    assert not found.findings
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **scores)
    tolerance = TOLERANCE[dtype] * (1 + np.abs(out).max())
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=tolerance, rtol=0)
    np.testing.assert_allclose(found.lse, lse, atol=1e-4, rtol=0)


NEAR_0 = [c for c in SPEC.configs if c.max_head_dim <= 128 and c.ping_pong and c.block_q > 64]
NEAR_0_CONFIGS = pytest.mark.parametrize(
    "config", [pytest.param(c, id=f"d{c.max_head_dim} {c.block_q}x{c.block_kv}") for c in NEAR_0]
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@NEAR_0_CONFIGS
def test_a_softcap_of_warps_near_0_and_of_others(config, mask, dtype):
    """Each warp of 16 rows caps its scores by itself, by a polynomial where all of them allow it."""
    check_near_0_and_far(config, mask, dtype)


@pytest.mark.parametrize("scale", [2.0**-21, 2.0**24])
def test_a_softcap_of_scales_without_a_polynomial(scale):
    check_near_0_and_far(NEAR_0[0], "full", "bfloat16", scale)


KERNEL, CONSUMER, SCORE = "kernels/fa3_forward.cu", "tiles/consumer.cuh", "tiles/score.cuh"
#: Where, what is replaced, by what; options, mask and lengths that show it.
PLANTED = {
    "the slope of the first sequence": (
        SCORE, "i64(number) * p.alibi_stride", "i64(0) * p.alibi_stride", ("alibi", "causal", (300, 300))
    ),
    "the slope of another head": (
        "tiles/forward_consumer.cuh",
        "Alibi(p, sequence_of(p, item.batch), item.head)", "Alibi(p, sequence_of(p, item.batch), 0)",
        ("alibi of all sequences", "full", (300, 300)),
    ),
    "ALiBi after the scale": (
        KERNEL, "softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);\n    pack",
        "softmax_of_tile(S_rmem, softmax, p.scale_log2, alpha);\n    pack", ("alibi", "full", (150, 300)),
    ),
    "a distance from the tile's first key": (
        KERNEL, "row, j * Bc + lane % 4 * 2);\n", "row, j * Bc);\n", ("alibi", "full", (150, 300))
    ),
    "a sink forgotten": (
        SCORE, "if constexpr (SINK) return softmax.join", "if constexpr (false) return softmax.join",
        ("sink", "causal", (150, 300)),
    ),
    "the sink of another head": (
        CONSUMER, "row < p.seqlen_q;\n    const float factor = SINK ? row_factor(p, softmax, r, item.head)",
        "row < p.seqlen_q;\n    const float factor = SINK ? row_factor(p, softmax, r, 0)", ("sink", "full", (150, 300)),
    ),
    "no sink where a block sees no key": (
        CONSUMER, "SINK ? ld_global<float>(p.sink + item.head) : NEG_INF", "NEG_INF", ("sink", "causal", (450, 150))
    ),
    "the inverse of the wrong half": (
        SCORE, "of_high = inverse * low;", "of_high = inverse * high;", ("softcap", "full", (150, 300))
    ),
    "a score for its neighbour": (
        SCORE, "rest[2] = of_high * factor[3];", "rest[2] = of_high * factor[2];", ("softcap", "full", (150, 300))
    ),
    "far scores taken for near ones": (
        SCORE, "greatest * unit > NEAR_0", "greatest * unit > 4 * NEAR_0", ("softcap", "full", (150, 300))
    ),
    "a coefficient of the wrong sign": (
        SCORE, "-0.3332631793f", "0.3332631793f", ("softcap near 0", "full", (150, 300))
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(tmp_path, monkeypatch, bug):
    file, old, new, (options, mask, lengths) = PLANTED[bug]
    config = SPEC.configs[0]
    check(options, mask, lengths, config)
    plant(tmp_path, monkeypatch, file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        check(options, mask, lengths, config)


VOTE = "greatest * unit > NEAR_0 || !(unit > 1e-5f && unit < 1e5f)"
#: What is replaced in score.cuh, by what; the mask and the scale that show it.
PLANTED_NEAR_0 = {
    "one lane near 0 speaks for its warp": (f"warp_any({VOTE})", "!warp_any(greatest * unit <= NEAR_0)", "full", 0.125),
    "far scores taken for near ones, causal": (VOTE, "false", "causal", 0.125),
    "far scores taken for near ones, window": (VOTE, "false", "window", 0.125),
    "far scores below 0 taken for near ones": ("fmaxf(greatest, fabsf(s))", "fmaxf(greatest, s)", "full", 0.125),
    "near scores by a wrong polynomial, causal": ("0.1319029658f", "0.3319029658f", "causal", 0.125),
    "near scores by a wrong polynomial, window": ("0.1319029658f", "0.3319029658f", "window", 0.125),
    "a scale too small for its seventh power": ("!(unit > 1e-5f && unit < 1e5f)", "false", "full", 2.0**-21),
    "a scale too large for its seventh power": ("!(unit > 1e-5f && unit < 1e5f)", "false", "full", 2.0**24),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED_NEAR_0)
def test_planted_near_0(tmp_path, monkeypatch, bug):
    old, new, mask, scale = PLANTED_NEAR_0[bug]
    plant(tmp_path, monkeypatch, SCORE, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        check_near_0_and_far(NEAR_0[0], mask, "bfloat16", scale)
