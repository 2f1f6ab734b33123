"""Values of another head dim than queries and keys: out and dout have that of v, dv too. Every result is within the
bounds of lengths_support.Ragged of float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS
from decode_contract import check as check_decoding
from decode_contract import each
from decode_support import make_case
from lengths_support import MAKE, dense

import cufa
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem

PAIRS = ((192, 128), (128, 64), (64, 128), (40, 72), (8, 256))
CASES = (
    ("dense", (70, 130), {}),
    ("dense", (130, 70), {"causal": True}),
    ("dense", (200, 200), {"window": (60, 20), "softcap": 3.0}),
    ("dense", (100, 100), {"mask": cufa.masks.streaming(3, 40)}),
    ("padded", "whole tiles", "all"),
    ("packed", "one query", "causal, sink"),
)
SERVING = [x for x in KERNELS.values() if x.any_v_dim and x.operation != "decode" and not x.ablation]


def check(backend, kind, lengths, options, dims, dtype, **how):
    """Forward, or backward if ``how`` says so, held to float64."""
    case = MAKE[kind](lengths, options, dims[0], dtype, v_dim=dims[1])
    operation = how.pop("operation")
    scores = {**case.lengths, **case.options, **how}
    if operation == "forward":
        done = backend.forward(*case.forward, **scores)
    else:
        done = backend.backward(*case.inputs, dlse=case.dlse, **scores)
    for name, x in done.results.items():
        case.check(name, x)


@pytest.mark.parametrize("dims", PAIRS)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_results_on_a_cpu(operation, dims):
    table = np.linspace(-1, 1, 17)
    scored = cufa.score(lambda s, b, h, i, j, t: s + t[np.clip(j - i, -8, 8) + 8], t=table)
    for case in (*CASES, ("dense", (20, 30), {"score": scored})):
        check(CPU, *case, dims, "float32", operation=operation)


@pytest.mark.sampled(on="emulate", each="spec", dated=0)
@pytest.mark.parametrize(
    ("backend", "spec"),
    [pytest.param(b, x, id=f"{b}-{x.name}", marks=MARKS[b.name]) for b in (EMULATE, GPU) for x in SERVING],
)
@pytest.mark.parametrize("dims", PAIRS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_of_each_kernel(backend, spec, case, dims):
    kind, lengths, options = CASES[case]
    dtype = spec.dtypes[case % len(spec.dtypes)]
    form = {"precision": spec.precisions[0], "operation": spec.operation, "v_head_dim": dims[1]}
    if kind != "dense" and kind not in spec.options:
        pytest.skip(f"{spec.name} takes no {kind} sequences")
    problem = Problem(1, 1, 1, 100, 100, dims[0], dtype, **form)
    if not any(config.fits(*dims) for config in spec.configs):
        pytest.skip(f"{spec.name} has no tiles for {dims}")
    assert spec.refuses(problem) is None
    check(backend, kind, lengths, options, dims, dtype, operation=spec.operation, algorithm=spec.algorithm)


def test_a_shared_prefix_on_a_cpu():
    rng = np.random.default_rng(0)
    q, *pages = (rng.standard_normal(x) for x in ((2, 4, 3, 24), (6, 2, 16, 24), (6, 2, 16, 16)))
    table = {"block_table": np.arange(6).reshape(2, 3), "cache_seqlens": [30, 7]}
    shared = [[5]], [0, -1]  # the page of a prefix, and whose it is
    together = cufa.flash_decode(q, *pages, shared_prefix=shared, **table, device="cpu")
    whole = {"block_table": np.array([[5, 0, 1, 2], [3, 4, 5, 0]]), "cache_seqlens": [46, 7]}
    assert together.shape == (2, 4, 3, 16)
    np.testing.assert_allclose(together, cufa.flash_decode(q, *pages, **whole, device="cpu"), atol=1e-12)


DECODING = (
    {"tokens": 2},
    {"tokens": 4, "new": 2, "page_size": 16, "alibi_slopes": np.linspace(0.1, 0.4, 4, dtype=np.float32)},
    {"tokens": 1, "new": 1, "page_size": 3, "window": (60, 0)},
    {"heads": 40, "kv_heads": 1, "softcap": 2.0},
)


@pytest.mark.sampled(on="emulate", each="kernel", dated=0)
@pytest.mark.parametrize("dims", PAIRS)
@pytest.mark.parametrize("case", range(len(DECODING)))
@each("cpu", "emulate", "gpu", kernels=[x.name for x in kernels_of("decode").values() if x.any_v_dim])
def test_decoding_of_each_kernel(backend, kernel, case, dims):
    spec, more = kernels_of("decode")[kernel], DECODING[case]
    if more.get("page_size", 16) % spec.page_multiple:
        pytest.skip(f"{kernel} reads boxes of {spec.page_multiple} keys")
    made = make_case([150, 2, 333], head_dim=dims[0], v_dim=dims[1], dtype=spec.dtypes[case % 2], **more)
    for num_splits in (1, 3):
        check_decoding(backend, made, kernel, num_splits)


def test_the_width_of_v_is_named_in_errors():
    def shapes(v, q=(1, 2, 8, 16), k=(1, 2, 8, 16)):
        return q, k, v

    for given, text in (
        (shapes((1, 2, 8, 12)), "head_dim is 12 (last axis of v); it must be a multiple of 8 from 8 to 256: pad v"),
        (shapes((1, 2, 8, 264)), "head_dim is 264 (last axis of v)"),
        (shapes((1, 2, 9, 8)), "v has shape (1, 2, 9, 8) but k has (1, 2, 8, 16): all axes but the last must be equal"),
        (shapes((1, 2, 8, 16), k=(1, 2, 8, 8)), "k has head_dim 8 but q has 16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(text)):
            cufa.plan(*given, device="cpu")
    case = dense((8, 8), {}, 16, "float32", v_dim=8)
    dout, q, k, v, out, lse = case.inputs
    for wrong in ((q, out), (dout, q)):
        with pytest.raises(
            ValueError, match=r"out has shape .* but q, with v's last axis, has \(3, 4, 8, 8\)"
        ):
            cufa.flash_attention_backward(wrong[0], q, k, v, wrong[1], lse)
    with pytest.raises(ValueError, match=r"out has shape \(3, 4, 8, 16\) but the result has \(3, 4, 8, 8\)"):
        cufa.flash_attention(q, k, v, out=np.empty_like(q))
    with pytest.raises(ValueError, match="in a cache of e4m3 they must be equal"):
        cufa.flash_decode(q, k.astype(np.uint8), v.astype(np.uint8), k_scale=1.0, v_scale=1.0)


def test_plans_say_which_kernels_serve_it():
    problem = Problem(1, 8, 8, 4096, 4096, 192, "bfloat16", v_head_dim=128)
    assert problem.flops * 2 == 5 * 128 * 8 * 2 * 4096**2
    assert "head_dim 192/128" in str(problem)
    assert Problem.from_json(problem.as_json()) == problem
    assert "v_head_dim" not in Problem(1, 8, 8, 4096, 4096, 192, "bfloat16").as_json()
    for kernel in KERNELS.values():
        refused = kernel.refuses(problem) or ""
        assert kernel.any_v_dim or "takes" in refused, kernel.name
    with pytest.raises(ValueError, match="takes v of q's head_dim 192, not of 128"):
        make_plan(problem, Device.typical("sm_90"), "fa1")


def test_torch_and_jax_take_it():
    torch = pytest.importorskip("torch")
    from cufa.torch import attention

    case = dense((20, 30), {"causal": True}, 24, "float32", v_dim=16)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in case.forward)
    out = attention(q, k, v, causal=True)
    out.backward(torch.tensor(case.inputs[0]))
    for x, name in zip((q, k, v), ("dq", "dk", "dv"), strict=True):
        assert x.grad is not None and x.grad.shape == case.expected[name].shape
    jax = pytest.importorskip("jax")
    from cufa.jax import attention as of_jax

    arrays = [jax.numpy.asarray(x) for x in case.forward]
    out, back = jax.vjp(lambda *x: of_jax(*x, causal=True, layout="bhsd"), *arrays)
    case.check("out", np.asarray(out))
    for x, given in zip(back(jax.numpy.asarray(case.inputs[0])), arrays, strict=True):
        assert x.shape == given.shape
