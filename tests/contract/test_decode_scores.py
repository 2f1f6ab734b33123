"""Score functions in decoding: the CPU path, executed kernels and a GPU against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS
from decode_support import make_case

import cufa

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
    "one token": {}, "tokens": {"tokens": 3}, "window": {"tokens": 2, "window": (200, 0)},
    "all": {"tokens": 2, "softcap": 2.0, "alibi_slopes": SLOPES, "sink": SLOPES},
    "streaming": {"tokens": 3, "mask": cufa.masks.streaming(5, 90)}, "invariant": {"invariant": True},
    "given": {"softmax_max": 2.0},
}  # fmt: skip
KERNELS = [
    f"decode_{kind}{tma}{fp8}"
    for kind in ("split", "balanced")
    for tma in ("", "_tma")
    for fp8 in ("", "_fp8")
]
#: On a GPU: dtype, head dim, page size, e4m3.
CACHES = [
    ("float16", 64, 0, False),
    ("bfloat16", 128, 64, False),
    ("float16", 256, 64, False),
    ("float16", 128, 64, True),
]
TOLERANCE = {"float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}
SCHEDULES = ("fixed", "balanced")
CASES = [
    pytest.param(*row, name, options, id="-".join(map(str, (*row, name, options))), marks=MARKS[row[0].name])
    for n, name in enumerate(SCORES)
    for m, options in enumerate(OPTIONS)
    for row in (
        *((CPU, "float64", 16, 64, False, schedule) for schedule in SCHEDULES),
        *((EMULATE, "float16", 32, 64, "fp8" in kernel, kernel) for kernel in KERNELS),
        *((GPU, *CACHES[(n + m) % len(CACHES)], schedule) for schedule in SCHEDULES),
    )
    if not (options == "invariant" and "balanced" in row[-1])
]


@pytest.mark.sampled(2, each="kernel", on="emulate")
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "page_size", "fp8", "kernel", "name", "options"), CASES
)
def test_against_the_reference(backend, dtype, head_dim, page_size, fp8, kernel, name, options):
    """By the public call, which takes a schedule; an executed kernel by a plan."""
    case = make_case(
        [640, 77, 300], heads=8, capacity=640, dtype=dtype, head_dim=head_dim, page_size=page_size, fp8=fp8,
        **OPTIONS[options], **SCORES[name],
    )  # fmt: skip
    if backend is EMULATE:
        done = backend.decode(case, kernel, 3)
        out, lse = done.out, done.lse
    else:
        arrays, given = case.arguments(schedule=kernel)
        given = {x: backend.array(y) if isinstance(y, np.ndarray) else y for x, y in given.items()}
        how = {"num_splits": 3 if backend is CPU else None, "return_lse": True, "device": backend.call_device}
        found = cufa.flash_decode(*map(backend.array, arrays), **given, **how)
        out, lse = map(backend.host, found)
    exact, exact_lse = case.expected
    off = TOLERANCE[dtype]
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=off * max(1, abs(exact).max()))
    np.testing.assert_allclose(lse, exact_lse, atol=max(off / 2, 1e-12))


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
    arrays, given = make_case([640, 77, 300], heads=8, tokens=2, dtype="float32", capacity=640).arguments()
    with pytest.raises(ValueError, match=says):
        cufa.flash_decode(*arrays, **given, **{**SCORES["relative"], **options}, device="cpu")
