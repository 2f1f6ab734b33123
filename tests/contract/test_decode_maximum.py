"""The contract of ``softmax_max=``: a fixed maximum changes a result by rounding only, whatever the number: rows whose
sums of weights leave the safe range are computed exactly in the same launch, one bad row among good ones too.
``key_norms`` are bounds of norms, raised in place by an append."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from backends import CPU, backends
from decode_contract import CASES, check, each
from decode_support import make_case, numbers_of_heads

import cufa
from cufa.kernels import kernels_of
from cufa.problem.scores import bound_limits, safe_sums

LN_2 = math.log(2)
EXECUTED = {
    "decode_split_tma": {**CASES["decode_split_tma"], "dtype": "bfloat16"},
    "decode_balanced": {**CASES["decode_balanced"], "dtype": "bfloat16"},
    "decode_balanced_tma": {**CASES["decode_balanced_tma"], "dtype": "bfloat16"},  # warps share a ring
    "decode_split_fp8": CASES["decode_split_fp8"],
    "decode_split_tma_fp8_scaled": CASES["decode_split_tma_fp8_scaled"],
}


def with_norms(case):
    """The case with key_norms of what is in the cache before the call."""
    names = ("cache_seqlens", "block_table", "k_scale")
    norms = cufa.key_norms(case.k_cache, **{name: case.options.get(name) for name in names})
    options = {**case.options, "softmax_max": "bound", "key_norms": norms}
    return dataclasses.replace(case, options=options)


@pytest.mark.sampled(each="kernel")
@each("cpu", kernels=("decode_split", "decode_balanced"))
def test_a_bound_of_scores_on_a_cpu(backend, kernel):
    bound_of_scores(backend, kernel, {"lengths": [2, 9, 150, 333], "tokens": 4, "new": 2, "page_size": 16})


@each("emulate", "gpu", kernels=tuple(EXECUTED))
def test_a_bound_of_scores(backend, kernel):
    bound_of_scores(backend, kernel, EXECUTED[kernel])


def bound_of_scores(backend, kernel, made):
    """Within the gate (spread 0.2), beyond it, and with the norms raised by what is appended."""
    for spread in (0.1, 40.0):
        case = with_norms(make_case(**made, spread=spread))
        done = check(backend, case, kernel, 3)
        if made.get("new"):
            norms = done.results["key_norms"]
            for b in range(len(case.lengths)):
                true = np.linalg.norm(case.sequence(b, "k")[0], axis=2).max(axis=1, initial=0)
                np.testing.assert_allclose(norms[b], true, rtol=1e-3)


@pytest.mark.sampled(each="kernel")
@each("cpu", "emulate", "gpu", kernels=("decode_split", "decode_balanced_tma"))
def test_numbers_at_the_ends_of_the_safe_range(backend, kernel):
    """Each ± 1 ulp, then far beyond: the sums of all rows, of one row, and of rows that a mask hides."""
    rng, d = np.random.default_rng(0), 64
    heads = 40 if kernel == "decode_balanced_tma" else 4  # 64 rows: warps share a ring
    made = {"heads": heads, "kv_heads": 2, "tokens": 2, "head_dim": d}
    case = make_case([37, 200], **made, dtype="bfloat16", scale=1.0)
    case.q[...] = 0
    case.q[..., 0] = 4  # scores of 4, 3 and 2
    for b, n in enumerate(case.lengths):
        case.k_cache[b, :, :n] = 0
        case.k_cache[b, :, :n, 0] = rng.choice([1, 0.75, 0.5], (2, n))
    ends = [4 - LN_2 * x for x in safe_sums(half=False)]
    near = [np.nextafter(np.float32(x), np.float32(to)) for x in ends for to in (-np.inf, x, np.inf)]
    one_bad = np.where(np.arange(heads) == heads // 2, -200, 4).astype(np.float32)
    for fixed in (*(near if heads == 4 else ()), -1e4, 1e4, 1e30, one_bad):
        fixed = fixed if isinstance(fixed, np.ndarray) else float(fixed)
        for scores in ({}, {"window": (20, 0)}):
            options = {**case.options, "softmax_max": fixed, **scores}
            check(backend, dataclasses.replace(case, options=options), kernel, 3)


@each("cpu", "emulate", "gpu", kernels=("decode_split",))
def test_bounds_at_the_gate(backend, kernel):
    """key_norms that bring the bound to the gate ± 1 ulp, too small ones, 0, NaN: none changes the result."""
    case = with_norms(make_case([150, 70], head_dim=64, dtype="bfloat16"))
    _, most = bound_limits(half=False)
    largest = np.linalg.norm(case.q.astype(np.float64), axis=-1).max() * math.log2(math.e) / 8
    gate = np.float32(most / largest)
    for norm in (
        np.nextafter(gate, np.float32(0)),
        gate,
        np.nextafter(gate, np.float32(1e9)),
        1e-3,
        0,
        np.inf,
    ):
        options = {**case.options, "key_norms": np.full((2, 2), norm, np.float32)}
        if math.isfinite(norm):
            check(backend, dataclasses.replace(case, options=options), kernel, 3)


@pytest.mark.parametrize("scores", ["softcap", "alibi", "both", "sink"])
@each("cpu", "emulate", "gpu", kernels=("decode_split",))
def test_with_what_changes_scores(backend, kernel, scores):
    """A softcap bounds scores without norms. ALiBi lowers them, and with a negative slope raises them, without
    limit."""
    few = numbers_of_heads(scores, 3, 4) if scores != "softcap" else {}
    made = {"lengths": [150, 1, 333], "head_dim": 64, "dtype": "bfloat16", "tokens": 2, "window": (100, 0)}
    case = make_case(
        **{**made, "lengths": [150, 2, 333]}, softcap=2.0 if scores == "softcap" else None, **few
    )
    if scores in ("alibi", "both"):
        case.options["alibi_slopes"][0] *= -9
    for fixed in ("bound", 3.0) if scores == "softcap" else (3.0, -90.0):
        options = {**case.options, "softmax_max": fixed}
        check(backend, dataclasses.replace(case, options=options), kernel, 3)
    if scores != "softcap":
        check(backend, with_norms(case), kernel, 3)


def test_calibrated_numbers_keep_rows_in_range(monkeypatch):
    """No row is computed twice. The range seen is that of the log-sum-exps."""
    from cufa.run.cpu import decode as cpu_decode

    case = make_case([333, 200], heads=4, kv_heads=2, dtype="float16")
    _, lse = case.expected
    fixed, lowest, highest = cufa.calibrate_softmax_max(lse, dtype="float16")
    np.testing.assert_allclose(lowest, lse.min(axis=(0, 2)), rtol=1e-6)
    np.testing.assert_allclose(highest, lse.max(axis=(0, 2)), rtol=1e-6)
    passes, one = [], cpu_decode._Split.sums
    monkeypatch.setattr(cpu_decode._Split, "sums", lambda *x: passes.append(x[-1] is None) or one(*x))
    case.options["softmax_max"] = fixed
    check(CPU, case, "decode_split", 3)
    assert passes and not any(passes)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("fp8", [False, True, "token", "block"])
@backends("cpu", "gpu")
def test_norms_of_keys(backend, fp8, page_size):
    """Unused slots hold NaN; all elements and scales, both layouts."""
    for dtype in ("float16", "bfloat16", "float32") if not fp8 else ("float16",):
        case = make_case([50, 0, 33], dtype=dtype, fp8=fp8, page_size=page_size)
        names = ("cache_seqlens", "block_table", "k_scale")
        given = {name: case.options.get(name) for name in names}
        options = {name: None if x is None else backend.array(x) for name, x in given.items()}
        k = np.ascontiguousarray(case.k_cache.swapaxes(1, 2))
        norms = backend.host(cufa.key_norms(backend.array(case.k_cache), **options))
        swapped = backend.host(cufa.key_norms(backend.array(k), layout="bshd", **options))
        np.testing.assert_allclose(norms, swapped, rtol=1e-6)  # sums of another layout add in another order
        assert norms.dtype == np.float32 and norms.shape == (3, 2)
        for b in range(3):
            true = np.linalg.norm(case.sequence(b, "k")[0], axis=2).max(axis=1, initial=0)
            np.testing.assert_allclose(norms[b], true, rtol=1e-5)


BAD = {
    "needs key_norms": {"softmax_max": "bound"},
    "'bound', a number": {"softmax_max": "largest"},
    "not True": {"softmax_max": True, "_": TypeError},
    "must be finite": {"softmax_max": float("nan")},
    "(heads,)": {"softmax_max": np.zeros(3, np.float32)},
    "softmax_max[1] is inf": {"softmax_max": np.float32([0, np.inf, 0, 0])},
    "leave key_norms out": {"key_norms": np.ones((2, 2), np.float32)},
    "(batch, kv_heads)": {"softmax_max": "bound", "key_norms": np.ones(2, np.float32)},
    "float32, C-contiguous": {"softmax_max": "bound", "key_norms": np.ones((2, 2))},
    "finite and at least 0": {"softmax_max": "bound", "key_norms": np.float32([[1, 1], [-1, 1]])},
    "invariant=True": {"softmax_max": 3.0, "invariant": True},
    "schedule='balanced'": {"schedule": "balanced", "invariant": True},
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_the_argument_and_the_cure(words):
    q, k = np.zeros((2, 4, 1, 16), np.float32), np.zeros((2, 2, 8, 16), np.float32)
    options = {name: x for name, x in BAD[words].items() if name != "_"}
    with pytest.raises((TypeError, ValueError)) as raised:
        cufa.flash_decode(q, k, k, **options)
    assert words in str(raised.value) or words == "not True"


def test_norms_that_cannot_be_raised_are_refused():
    k = np.zeros((2, 2, 8, 16), np.float32)
    norms = np.ones((2, 2), np.float32)
    norms.flags.writeable = False
    new = {"k_new": k[:, :, :1], "v_new": k[:, :, :1], "cache_seqlens": [1, 1]}
    with pytest.raises(ValueError, match="read-only"):
        cufa.flash_decode(k[:, :, :1], k, k.copy(), softmax_max="bound", key_norms=norms, **new)


def test_every_decode_kernel_takes_a_fixed_maximum():
    for kernel in kernels_of("decode").values():
        assert "SOFTMAX_MAX" in kernel.own_constants(
            cufa.plan_decode((1, 1, 1, 64), (1, 1, 64, 64), device="cpu").problem
        )
