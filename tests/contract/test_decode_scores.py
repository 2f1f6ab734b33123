"""Score functions in decoding: the CPU path, executed kernels and a GPU against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from backends import EMULATE

import cufa
from cufa.calls.decode_checks import DecodeCall
from cufa.calls.score_operands import with_score
from cufa.plan.decode import DECODE
from cufa.plan.planner import make_plan
from cufa.problem.options import Options, decode_mask

RNG = np.random.default_rng(8)
TABLE, SLOPES = RNG.standard_normal((8, 24)).astype(np.float32), RNG.uniform(0, 0.2, 8).astype(np.float32)
BIAS = RNG.standard_normal((3, 1, 1, 640)).astype(np.float32)


def relative(s, b, h, i, j, table, delta):
    return s + table[h, np.clip(i + delta - j, 0, 23)]


def alibi(s, b, h, i, j, slopes, delta):
    return s - slopes[h] * np.abs(i + delta - j) + 0.25 * (b + i)


def capped(s, b, h, i, j):
    return 3 * np.tanh(s / 3)


SCORES = {
    "relative": {"score": cufa.score(relative, table=TABLE)},
    "alibi": {"score": cufa.score(alibi, slopes=SLOPES)},
    "capped": {"score": cufa.score(capped)},
    "bias": {"bias": BIAS},
}
OPTIONS = {
    "one token": (1, {}), "tokens": (3, {}), "window": (2, {"window": (200, 0)}),
    "all": (2, {"softcap": 2.0, "alibi_slopes": SLOPES, "sink": SLOPES}),
    "streaming": (3, {"mask": cufa.masks.streaming(5, 90)}), "invariant": (1, {"invariant": True}),
    "given": (1, {"softmax_max": 2.0}),
}  # fmt: skip


def case(tokens, dtype, head_dim, place="ragged", eight_bits=False):
    """Three sequences in a contiguous or paged cache; what is behind their ends is NaN."""
    q = RNG.standard_normal((3, 8, tokens, head_dim)).astype(dtype)
    k, v = (RNG.standard_normal((3, 2, 640, head_dim)).astype(dtype) for _ in range(2))
    given = {"cache_seqlens": np.array([640, 77, 300], np.int32)}
    if eight_bits:
        import ml_dtypes

        k, v = (x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (k, v))
        given |= {"k_scale": np.array([1.0, 0.5], np.float32), "v_scale": np.array([0.5, 1.5], np.float32)}
    if place == "paged":
        table = RNG.permutation(30).reshape(3, 10).astype(np.int32)
        pages = []
        for x in (k, v):
            page = np.empty((30, 2, 64, head_dim), x.dtype)
            page[table.reshape(-1)] = (
                x.reshape(3, 2, 10, 64, head_dim).swapaxes(1, 2).reshape(30, 2, 64, head_dim)
            )
            pages.append(page)
        (k, v), given["block_table"] = pages, table
    return q, k, v, given


def executed(q, k, v, given, schedule, num_splits, kernel, score=None, bias=None, **options):
    """By a plan, in checked mode."""
    from cufa.problem.options import check_softmax_max
    from cufa.problem.score_function import resolve_score

    change = resolve_score(score, bias)
    few = [options.pop(x, None) for x in ("alibi_slopes", "sink")]
    asked = Options(
        decode_mask(options.pop("window", None), options.pop("mask", None)), options.pop("softcap", None),
        algorithm=schedule, num_splits=num_splits, score=change,
        softmax_max=check_softmax_max(options.pop("softmax_max", None)), **options,
    )  # fmt: skip
    names = ("cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale", "out", "lse")
    operands = [q, k, v, *(given.get(x) for x in names), *few, None, None, None]
    call = DecodeCall.read(with_score(DECODE, operands, change), ("out", "lse"), asked)
    call, problem = call.check(on_gpu=True)
    results = call.allocate(problem, np.empty)
    plan = make_plan(problem, EMULATE.device, schedule, num_splits=num_splits, kernel=kernel)
    EMULATE.run(plan, call.arrays(results), False, None)
    return results["out"], results["lse"]


def assert_close(found, expected, dtype):
    (out, lse), (exact, exact_lse) = found, expected
    off = {"float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=off * max(1, abs(exact).max()))
    np.testing.assert_allclose(lse, exact_lse, atol=max(off / 2, 1e-12))


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCORES)
def test_the_cpu_path(name, options, schedule):
    tokens, more = OPTIONS[options]
    q, k, v, given = case(tokens, "float64", 16, "paged")
    reference = {x: y for x, y in more.items() if x not in ("invariant", "softmax_max")}
    expected = cufa.decode_reference(q, k, v, **given, **SCORES[name], **reference, return_lse=True)
    if options == "invariant":
        schedule = "auto"
    found = cufa.flash_decode(
        q,
        k,
        v,
        **given,
        **SCORES[name],
        **more,
        schedule=schedule,
        num_splits=3,
        return_lse=True,
        device="cpu",
    )
    assert_close(found, expected, "float64")


KERNELS = [
    (schedule, f"decode_{kind}{tma}{fp8}")
    for schedule, kind in (("fixed", "split"), ("balanced", "balanced"))
    for tma in ("", "_tma")
    for fp8 in ("", "_fp8")
]


@pytest.mark.emulate
@pytest.mark.sampled(2, each="kernel")
@pytest.mark.parametrize("options", [x for x in OPTIONS if x != "invariant"])
@pytest.mark.parametrize(("schedule", "kernel"), KERNELS)
@pytest.mark.parametrize("name", SCORES)
def test_kernels(name, schedule, kernel, options):
    tokens, more = OPTIONS[options]
    q, k, v, given = case(tokens, "float16", 32, "paged", "fp8" in kernel)
    reference = {x: y for x, y in more.items() if x != "softmax_max"}
    expected = cufa.decode_reference(q, k, v, **given, **SCORES[name], **reference, return_lse=True)
    assert_close(executed(q, k, v, given, schedule, 3, kernel, **SCORES[name], **more), expected, "float16")


CACHES = [
    ("float16", 64, "ragged", False), ("bfloat16", 128, "paged", False), ("float16", 256, "paged", False),
    ("float16", 128, "paged", True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options", "dtype", "head_dim", "place", "eight_bits"),
    [
        (name, options, *CACHES[(n + m) % 4])
        for n, name in enumerate(SCORES)
        for m, options in enumerate(OPTIONS)
    ],
)
def test_on_a_gpu(cp, name, options, dtype, head_dim, place, eight_bits):
    tokens, more = OPTIONS[options]
    q, k, v, given = case(tokens, np.float16, head_dim, place, eight_bits)
    if dtype == "bfloat16":
        import ml_dtypes

        q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    reference = {x: y for x, y in more.items() if x not in ("invariant", "softmax_max")}
    expected = cufa.decode_reference(q, k, v, **given, **SCORES[name], **reference, return_lse=True)
    there = {
        x: cp.asarray(y) if isinstance(y, np.ndarray) else y for x, y in (more | given | SCORES[name]).items()
    }
    q, k, v = map(cp.asarray, (q, k, v))
    for schedule in ("fixed",) if options == "invariant" else ("fixed", "balanced"):
        found = cufa.flash_decode(q, k, v, **there, schedule=schedule, return_lse=True)
        assert_close([x.get() for x in found], expected, dtype)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"softmax_max": "bound", "key_norms": np.ones((3, 2), np.float32)}, "do not bound a changed score"),
        ({"tree": np.array([[-1, 0]] * 3)}, "tree with score"),
        ({"bias": BIAS}, "add the bias in the score function"),
        ({"score": cufa.score(lambda s, b, h, i, j, x: s + x[j + 900], x=BIAS[0, 0, 0])}, "outside axis 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(options, says):
    q, k, v, given = case(2, "float32", 16)
    with pytest.raises(ValueError, match=says):
        cufa.flash_decode(q, k, v, **given, **{**SCORES["relative"], **options}, device="cpu")
