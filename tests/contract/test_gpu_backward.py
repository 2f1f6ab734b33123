"""The backward on a GPU against float64: the peers' sizes, dtypes, head dims, tilings, masks, layouts, poison."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_gpu_support import check, poisoned, run
from backward_support import NAMES, assert_gradients, make_case, serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_support import BANDS
from support import make_inputs

import cufa
from cufa.kernels import kernels_of
from cufa.kernels.support import refusal
from cufa.plan.dense import BACKWARD
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.mask import CAUSAL, FULL, Band

pytestmark = pytest.mark.gpu

SPECS = list(kernels_of("backward").values())
VARIANTS = [
    (s, d, p) for s in SPECS for d in s.dtypes for p in s.precisions if (p == "native") == (d != "float32")
]
DTYPES = list(dict.fromkeys(dtype for _, dtype, _ in VARIANTS))

#: What FlashAttention's own tests run.
SIZES = [
    (1, 239), (3, 799), (799, 3), (97, 97), (128, 128), (200, 200), (256, 512), (307, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip
MASKS = [FULL, CAUSAL, Band(64, 0), Band(100, 40), Band(5, None, 30), Band(None, 0, -50), Band(0, 0)]


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def cuda():
    from cufa.run.cuda import backend as cuda

    return cuda


def options_of(spec, precision):
    return {"algorithm": spec.algorithm, "precision": None if precision == "native" else precision}


# --- Accuracy ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(dated=6, pairs=[("lengths", "dtype")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peers_sizes(cp, dtype, lengths, causal):
    for seed, head_dim in enumerate((64, 128) if max(lengths) < 2000 else (128,)):
        check(cp, make_case(1, 2, 2, *lengths, head_dim, dtype, seed=seed, causal=causal))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_peers_largest_size(cp, dtype):
    check(cp, make_case(1, 1, 1, 4224, 4224, 128, dtype, causal=True))


@pytest.mark.sampled(fixed=44, dated=16, pairs=[("spec", "dtype")])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_head_dims(cp, spec, dtype, precision, head_dim):
    if not serves(spec, head_dim):
        pytest.skip(f"{spec.name} has no tiles for it")
    # Masks alternate over head dims: all are covered for every kernel, at half the compiles.
    for causal in (False, True) if head_dim in (64, 128, 256, 40) else ((head_dim // 16) % 2 == 0,):
        case = make_case(2, 4, 2, 130, 190, head_dim, dtype, causal=causal, dlse=True, seed=head_dim)
        check(cp, case, **options_of(spec, precision))


@pytest.mark.sampled(dated=6, pairs=[("spec", "head_dim")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_every_tiling(cp, cuda, spec, dtype, precision, head_dim, deterministic):
    """Whatever the planner would have chosen. Lengths hang over both tiles."""
    if not serves(spec, head_dim):
        pytest.skip(f"{spec.name} has no tiles for it")
    device = cuda.current_device()
    for config in fitting_configs(spec, head_dim, device):
        lengths = 2 * config.block_q + 7, 2 * config.block_kv + 13
        case = make_case(1, 4, 2, *lengths, head_dim, dtype, causal=True, dlse=True)
        planned = cufa.plan_backward(case.q, case.k, causal=True, deterministic=deterministic, device="cpu")
        problem = dataclasses.replace(planned.problem, precision=precision)
        if refusal(spec, problem, config=config):
            continue
        plan = make_plan(problem, device, spec.algorithm, config)
        given = {x.name: None for x in BACKWARD.operands}
        names = ("dout", "q", "k", "v", "out", "lse", "dlse")
        given |= {name: cp.asarray(getattr(case, name)) for name in names}
        given |= {name: poisoned(cp, getattr(case, name[1:])) for name in NAMES}
        cuda.run(plan, given)
        assert_gradients(
            [cp.asnumpy(given[name]) for name in NAMES], case, None if precision == "native" else precision
        )


@pytest.mark.sampled(dated=8, pairs=[("mask", "softcap")])
@pytest.mark.parametrize("softcap", [None, 15.0, 1.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_and_caps(cp, dtype, mask, softcap):
    for lengths in ((150, 150), (70, 300), (300, 70)):
        check(cp, make_case(1, 4, 2, *lengths, 64, dtype, mask=mask, softcap=softcap, dlse=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (6, 3), (16, 1)])
def test_grouped_heads(cp, heads, kv_heads, deterministic):
    for causal in (False, True):
        case = make_case(3, heads, kv_heads, 200, 310, 64, "bfloat16", causal=causal)
        check(cp, case, deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_problem(cp, dtype):
    """Shapes that no list has; compiled builds are few: one head dim, kinds of masks, cap or none."""

    @given(data=st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def drawn(data):
        draw, length = data.draw, st.integers(1, 400)
        heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]))
        case = make_case(
            draw(st.integers(1, 3)), *heads, draw(length), draw(length), 64, dtype, mask=draw(BANDS),
            softcap=draw(st.sampled_from([None, 20.0])), dlse=draw(st.booleans()), seed=draw(st.integers(0, 99)),
        )  # fmt: skip
        check(cp, case, deterministic=draw(st.booleans()))

    drawn()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_scales(cp, scale):
    dq, dk, _ = check(cp, make_case(1, 2, 1, 100, 140, 64, "bfloat16", scale=scale))
    if not scale:
        assert (dq == 0).all() and (dk == 0).all()


def test_after_our_own_forward(cp):
    """With out and lse as our kernel gives them."""
    case = make_case(2, 4, 2, 333, 222, 128, "bfloat16", causal=True, dlse=True)
    q, k, v = (cp.asarray(x) for x in (case.q, case.k, case.v))
    out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)
    own = dataclasses.replace(case, out=out.get(), lse=lse.get())
    assert_gradients(run(cp, own), case)


def test_identities(cp):
    """Σ dk ∘ k = Σ dq ∘ q; a loss of lse alone leaves the values alone."""
    case = make_case(2, 4, 2, 300, 300, 64, "bfloat16", causal=True)
    dq, dk, _ = (x.astype(np.float64) for x in run(cp, case))
    of_queries, of_keys = dq * case.q.astype(np.float64), dk * case.k.astype(np.float64)
    left, right = of_queries.reshape(2, 2, -1).sum(-1), of_keys.reshape(2, 2, -1).sum(-1)
    largest = np.abs(of_queries).reshape(2, 2, -1).sum(-1)
    assert (np.abs(left - right) < 2.0**-8 * largest).all()
    case = make_case(1, 2, 1, 100, 100, 64, "float16", dlse=True)
    case.dout[...] = 0
    dq, dk, dv = run(cp, case)
    assert (dv == 0).all() and (dq != 0).any() and (dk != 0).any()


@pytest.mark.parametrize("axis", ["batch", "heads", "seqlen_q", "seqlen_k"])
def test_zero_size_axes(cp, axis):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 5, "seqlen_k": 5, axis: 0}
    b, h, sq, sk = sizes.values()
    q, k, v = (cp.asarray(x) for x in make_inputs(b, h, h, sq, sk, 64, "float16"))
    out, lse = cufa.flash_attention(q, k, v, return_lse=True)
    got = cufa.flash_attention_backward(q, q, k, v, out, lse)
    for x, y in zip(got, (q, k, v), strict=True):
        assert x.shape == y.shape and not x.any()


# --- Memory -----------------------------------------------------------------------------------------------


def _bshd(x):
    """The same values with the sequence before the heads in memory."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def _within(x):
    """Inside a larger array of NaN, at an odd address."""
    import cupy

    around = cupy.full([n + 3 for n in x.shape], -1, x.dtype)
    view = around[1:-2, 2:-1, 1:-2, 1:-2]
    view[...] = x
    return view


STRIDES = {
    "bshd": _bshd,
    "within": _within,
    "reversed": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "every other": lambda x: x.repeat(2, axis=2)[:, :, ::2],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(cp, dtype, strides):
    check(cp, make_case(2, 4, 2, 100, 150, 64, dtype, causal=True, dlse=True), STRIDES[strides])


def test_layout_bshd(cp):
    case = make_case(2, 4, 2, 100, 150, 64, "bfloat16", causal=True)
    arrays = [cp.asarray(np.ascontiguousarray(x.swapaxes(1, 2))) for x in case.arrays[:5]]
    got = cufa.flash_attention_backward(*arrays, cp.asarray(case.lse), layout="bshd", causal=True)
    assert_gradients([x.swapaxes(1, 2).get() for x in got], case)


def test_broadcast_inputs(cp):
    case = make_case(3, 4, 4, 100, 150, 64, "float16")
    case = dataclasses.replace(case, dout=np.broadcast_to(case.dout[:1, :1, :1], case.q.shape).copy())
    arrays = [cp.asarray(x) for x in case.arrays]
    arrays[0] = cp.broadcast_to(arrays[0][:1, :1, :1], case.q.shape)
    got = cufa.flash_attention_backward(*arrays)
    assert_gradients([x.get() for x in got], case)


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_that_was_full_of_nan(cp, deterministic):
    """The workspace comes from a pool whose memory held something else."""
    case = make_case(2, 4, 2, 333, 500, 64, "bfloat16", mask=Band(40, 10))
    for _ in range(3):
        poison = cp.full(1 << 26, 0xFF, cp.uint8)
        del poison
        check(cp, case, deterministic=deterministic)


def test_nothing_is_written_around_the_results(cp):
    case = make_case(1, 4, 2, 77, 99, 64, "float16", causal=True)
    around = {n: cp.full((3, 6, 103, 80), 7, cp.float16) for n in NAMES}
    views = {}
    for name, x in around.items():
        _, h, s, d = getattr(case, name[1:]).shape
        views[name] = x[1:2, 1 : 1 + h, 2 : 2 + s, 8 : 8 + d]
    arrays = [cp.asarray(x) for x in case.arrays]
    got = cufa.flash_attention_backward(*arrays, causal=True, **views)
    assert_gradients([x.get() for x in got], case)
    for x in views.values():
        x[...] = 7
    assert all((x == 7).all() for x in around.values())


@pytest.mark.slow
def test_strides_of_more_than_32_bits(cp):
    """Two sequences 2^31 elements apart, all operands in one buffer."""
    case = make_case(2, 2, 1, 70, 90, 64, "bfloat16", causal=True)
    apart, room = 1 << 31, 1 << 15
    memory = cp.empty(apart + 16 * room, cp.uint16)

    def placed(n, x):
        steps = (apart, *(s // x.itemsize for s in x.strides[1:]))
        view = cp.lib.stride_tricks.as_strided(memory[n * room :], x.shape, [x.itemsize * s for s in steps])
        view[...] = cp.asarray(x).view(memory.dtype)
        return view.view(x.dtype)

    arrays = [placed(n, x) for n, x in enumerate(case.arrays[:5])]
    results = {name: placed(5 + n, getattr(case, name[1:])) for n, name in enumerate(NAMES)}
    got = cufa.flash_attention_backward(*arrays, cp.asarray(case.lse), causal=True, **results)
    assert_gradients([x.get() for x in got], case)
