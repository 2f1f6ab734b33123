"""The forward kernels for e4m3 on the executor against float64 of the same e4m3 numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cufa
from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan
from cufa.problem.float8 import KEY_ORDER, first_block, key_tile, padded_keys, scale_shape
from cufa.problem.lengths import DENSE, Lengths, Packed, Padded
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.problem.problem import Problem
from cufa.run.emulate.launch import Execution
from cufa.run.emulate.run import Emulation, run_plan

GPUS = {"fa3": Device.typical(90), "fa2": Device.typical(89)}
KERNELS = {"fa3": "fa3_forward_fp8", "fa2": "fa2_forward_fp8"}
both = pytest.mark.parametrize("algorithm", GPUS)
HEADS, KV_HEADS = 4, 2


def transposed(v: Any, lengths: Lengths) -> Any:
    """V^T (batch, kv_heads, head_dim, positions) of e4m3, its keys in the order of :data:`KEY_ORDER`."""
    if not isinstance(lengths, Packed):
        batch, heads, keys, head_dim = v.shape
        padded = np.zeros((batch, heads, padded_keys(keys), head_dim), v.dtype)
        padded[:, :, :keys] = v
    else:
        _, heads, keys, head_dim = v.shape
        padded = np.zeros((1, heads, padded_keys(keys, len(lengths.queries or ())), head_dim), v.dtype)
        for sequence, _, _, rows in lengths.places() or []:
            start = 128 * first_block(rows.start, 128, sequence)
            padded[:, :, start : start + rows.stop - rows.start] = v[:, :, rows]
    grouped = padded.reshape(*padded.shape[:2], -1, 32, head_dim)[:, :, :, KEY_ORDER]
    return np.ascontiguousarray(grouped.reshape(padded.shape).swapaxes(2, 3))


def run(
    head_dim: int, seqlen_q: int, seqlen_k: int, mask: Mask = FULL, lengths: Lengths = DENSE, *,
    modes: tuple[str, str, str] = ("head",) * 3, added: str = "row", softcap: float | None = None,
    batch: int = 1, mode: str = "checked", in_rows: bool = False, algorithm: str = "fa3",
) -> tuple[Emulation, dict[str, Any], Problem]:  # fmt: skip
    rng = np.random.default_rng(head_dim + seqlen_q + seqlen_k)
    problem = Problem(
        batch, HEADS, KV_HEADS, seqlen_q, seqlen_k, head_dim, "float8_e4m3", mask, head_dim**-0.5, softcap,
        lengths=lengths, out_dtype="bfloat16", scales=modes, values_in_rows=in_rows,
        accumulate=added,
    )  # fmt: skip
    given: dict[str, Any] = {}
    for name, heads, seqlen, block, scale in zip(
        "qkv", (HEADS, KV_HEADS, KV_HEADS), (seqlen_q, seqlen_k, seqlen_k), (64, key_tile(head_dim), 0), modes,
        strict=True,
    ):  # fmt: skip
        rows = (1 if isinstance(lengths, Packed) else batch, heads, seqlen, head_dim)
        given[name] = (rng.standard_normal(rows) * 60).astype(ml_dtypes.float8_e4m3fn)
        shape = scale_shape(scale, block, heads, batch, seqlen, lengths)
        given[f"{name}_scale"] = rng.uniform(0.005, 0.02, shape).astype(np.float32)
    arrays = {name: x.view(np.uint8) if name in "qkv" else x for name, x in given.items()}
    if not in_rows:
        arrays["v"] = transposed(arrays["v"], lengths)
    arrays["out"] = np.full(given["q"].shape, np.nan, ml_dtypes.bfloat16)
    arrays["lse"] = np.full(problem.lse_shape, np.nan, np.float32)
    if isinstance(lengths, Padded):
        arrays["seqlens_q"], arrays["seqlens_k"] = (
            np.array(x, np.int32) for x in (lengths.queries, lengths.keys)
        )
    if isinstance(lengths, Packed):
        for side, counts in (("q", lengths.queries), ("k", lengths.keys)):
            arrays[f"cu_seqlens_{side}"] = np.cumsum([0, *(counts or ())], dtype=np.int32)
    plan = make_plan(problem, GPUS[algorithm], algorithm)
    assert plan.spec.name == KERNELS[algorithm]
    return run_plan(plan, arrays, Execution(mode=mode)), given, problem


def expected(given: dict[str, Any], problem: Problem, batch: int, head: int, rows: slice, keys: slice) -> Any:
    """out of one head of one sequence in float64, from a scale per tensor or head."""

    def whole(name: str, head: int, tokens: slice) -> Any:
        scale = given[f"{name}_scale"]
        x = given[name][0 if isinstance(problem.lengths, Packed) else batch, head, tokens].astype(np.float64)
        return x * float(scale if scale.ndim == 0 else scale[batch, head])

    kv_head = head // (HEADS // KV_HEADS)
    scores = whole("q", head, rows) @ whole("k", kv_head, keys).T * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * np.tanh(scores / problem.softcap)
    visible = problem.mask.dense(*scores.shape) if problem.mask is not FULL else np.ones(scores.shape, bool)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)) @ whole("v", kv_head, keys)


def check(out: Any, right: Any) -> None:
    """Rounding P to three bits of mantissa leaves 2 to 3% of the result's norm."""
    error = np.linalg.norm(out.astype(np.float64) - right) / max(np.linalg.norm(right), 1e-9)
    assert error < 0.035, error


@both
@pytest.mark.parametrize("added", ["row", "tile", "2"])
@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "seqlen_k", "mask"),
    [
        (64, 200, 500, FULL),
        (16, 70, 333, CAUSAL),
        (128, 130, 700, CAUSAL),
        (144, 90, 300, Band(100, 20)),
        (256, 140, 300, CAUSAL),
    ],
)
def test_dense(head_dim: int, seqlen_q: int, seqlen_k: int, mask: Mask, added: str, algorithm: str) -> None:
    if mask is not FULL:
        assert isinstance(mask, Band)
        mask = dataclasses.replace(mask, diagonal=seqlen_k - seqlen_q)
    found, given, problem = run(head_dim, seqlen_q, seqlen_k, mask, added=added, algorithm=algorithm)
    assert not found.findings
    for head in range(HEADS):
        right = expected(given, problem, 0, head, slice(0, seqlen_q), slice(0, seqlen_k))
        check(found.out[0, head], right)


@both
@pytest.mark.parametrize(("head_dim", "modes"), [(64, ("head",) * 3), (128, ("block", "block", "head"))])
def test_the_cpu_path_has_the_same_arithmetic(
    head_dim: int, modes: tuple[str, str, str], algorithm: str
) -> None:
    """Both round the same weights to e4m3: they differ by far less than either does from float64."""
    found, given, problem = run(
        head_dim, 130, 700, dataclasses.replace(CAUSAL, diagonal=570), modes=modes, algorithm=algorithm
    )
    options = {"return_lse": True, "out_dtype": "float32", "device": "cpu"}
    out, lse = cufa.flash_attention(**given, mask=problem.mask, **options)
    assert np.linalg.norm(found.out.astype(np.float64) - out) < 5e-3 * np.linalg.norm(out)
    np.testing.assert_allclose(found.lse, lse, atol=2e-4)


@both
@pytest.mark.parametrize(
    ("modes", "softcap"),
    [(("tensor",) * 3, None), (("head", "tensor", "head"), 20.0)],
)
def test_scales_and_soft_cap(modes: tuple[str, str, str], softcap: float | None, algorithm: str) -> None:
    found, given, problem = run(96, 65, 257, modes=modes, softcap=softcap, batch=2, algorithm=algorithm)
    assert not found.findings
    for batch in range(2):
        for head in range(HEADS):
            right = expected(given, problem, batch, head, slice(0, 65), slice(0, 257))
            check(found.out[batch, head], right)


@both
def test_scales_of_blocks(algorithm: str) -> None:
    """A scale per 64 queries and per key tile: as one per head, where all are equal; and other numbers where not."""
    seqlens = 130, 500
    found, given, problem = run(
        128, *seqlens, modes=("block", "block", "head"), mode="plain", algorithm=algorithm
    )
    q_scale, k_scale = given["q_scale"], given["k_scale"]
    assert q_scale.shape == (1, HEADS, 3) and k_scale.shape == (1, KV_HEADS, 3)
    q = given["q"].astype(np.float64) * np.repeat(q_scale, 64, axis=-1)[..., :130, None]
    k = given["k"].astype(np.float64) * np.repeat(k_scale, key_tile(128), axis=-1)[..., :500, None]
    one = np.ones((1, HEADS))
    whole = {**given, "q": q, "k": k, "q_scale": one, "k_scale": one}
    for head in range(HEADS):
        check(found.out[0, head], expected(whole, problem, 0, head, slice(0, 130), slice(0, 500)))


@both
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_padded(mask: Mask, algorithm: str) -> None:
    lengths = Padded((100, 0, 33), (300, 7, 0))
    found, given, problem = run(64, 120, 310, mask, lengths, batch=3, algorithm=algorithm)
    assert not found.findings
    for batch, (rows, keys) in enumerate(zip((100, 0, 33), (300, 7, 0), strict=True)):
        for head in range(HEADS):
            out = found.out[batch, head]
            assert not out[rows:].any()
            if rows and keys and mask is FULL:
                check(out[:rows], expected(given, problem, batch, head, slice(0, rows), slice(0, keys)))
            elif not keys:
                assert not out.any() and np.isneginf(found.lse[batch, head]).all()


@both
def test_packed(algorithm: str) -> None:
    """Rows after the last sequence have no scales: none is read for them."""
    rows, keys = (70, 1, 130), (300, 40, 129)
    lengths = Packed(211, 479, rows, keys)
    found, given, problem = run(128, 211, 479, FULL, lengths, batch=3, algorithm=algorithm)
    assert not found.findings
    assert not found.out[0, :, 201:].any() and np.isneginf(found.lse[..., 201:]).all()
    for sequence in range(3):
        q, k = (slice(sum(x[:sequence]), sum(x[: sequence + 1])) for x in (rows, keys))
        for head in range(HEADS):
            check(found.out[0, head, q], expected(given, problem, sequence, head, q, k))


@both
@pytest.mark.parametrize("head_dim", [16, 48, 128, 256])
@pytest.mark.parametrize(
    "lengths", [DENSE, Padded((100, 33), (300, 7)), Packed(133, 307, (100, 33), (300, 7))]
)
def test_values_in_rows_are_transposed_first(head_dim: int, lengths: Lengths, algorithm: str) -> None:
    """The same bits as from values that were transposed before. Padding is NaN."""
    seqlens = (133, 307) if isinstance(lengths, Packed) else (100, 300)
    options: dict[str, Any] = {"lengths": lengths, "batch": 2}
    right, _, _ = run(head_dim, *seqlens, **options, algorithm=algorithm)
    found, _, _ = run(head_dim, *seqlens, **options, in_rows=True, algorithm=algorithm)
    assert not found.findings
    assert [x.entry for x in found.plan.launches] == ["transpose_values", KERNELS[algorithm]]
    assert found.plan.workspace == KV_HEADS * head_dim * (
        2 * 384 if not isinstance(lengths, Packed) else 128 * (307 // 128 + 2)
    )
    np.testing.assert_array_equal(found.out, right.out)
    np.testing.assert_array_equal(found.lse, right.lse)


def test_a_call_of_the_executor() -> None:
    """Dense and packed, by the public function: as on the CPU."""
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((1, n, heads, 48)) for heads, n in ((4, 70), (2, 200), (2, 200))]
    for packed in (False, True):
        given: dict[str, Any] = {"causal": True}
        how: dict[str, Any] = (
            {"cu_seqlens_q": [0, 30, 70], "cu_seqlens_k": [0, 150, 200]} if packed else {"layout": "bshd"}
        )
        for role, y in zip("qkv", x, strict=True):
            y = y.astype(np.float32)
            cu = {"cu_seqlens": how["cu_seqlens_q" if role == "q" else "cu_seqlens_k"]} if packed else how
            given[role], given[f"{role}_scale"] = cufa.quantize(y[0] if packed else y, role=role, **cu)
        call = cufa.flash_attention_varlen if packed else cufa.flash_attention
        right = call(**given, **how, out_dtype="float32", device="cpu")
        run = cufa.emulate(**given, **how, algorithm="fa3", mode="checked", accumulate="tile")
        assert not run.findings and run.plan.spec.name == "fa3_forward_fp8"
        assert np.linalg.norm(run.out.astype(np.float64) - right) < 5e-3 * np.linalg.norm(right)


@pytest.mark.parametrize(
    "call",
    [
        "await_copies<0>(inside, j, SCORES);",
        "await_copies<0>(inside, j, VALUES);",
        "block_sync();  // the parked values are visible",
    ],
)
def test_a_barrier_that_is_left_out_is_found(plant: Any, call: str) -> None:
    """The last run has a sequence without keys."""
    plant("forward/fa2_fp8/kernel.cu", call, "")
    runs = {"lengths": DENSE}, {"lengths": Padded((150, 100), (500, 0)), "batch": 2}
    assert any(run(64, 150, 500, algorithm="fa2", **options)[0].findings for options in runs)
