"""Calls of the backward on a GPU: the same bits again, the short cut, graphs, streams, threads, memory, traces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backends import GPU
from backward_support import NAMES, assert_gradients, make_case
from held_stream import hold
from support import EPSILON, in_threads

import cufa
from cufa import masks
from cufa.calls import dispatch
from cufa.problem.mask import CAUSAL, FULL, Band

pytestmark = pytest.mark.gpu


def poisoned(x):
    return GPU.poisoned(x.shape, x.dtype)


# --- The same bits again ----------------------------------------------------------------------------------


def _repeat(cp, case, count, deterministic):
    """Bits of dk and dv, and if deterministic of dq, are those of the first run; else dq is within two roundings."""
    arrays = [cp.asarray(x) for x in case.arrays]
    how = {**case.scores, "deterministic": deterministic}
    bits = f"u{case.q.itemsize}"
    first = cufa.flash_attention_backward(*arrays, **how)
    differing = cp.zeros((count, len(NAMES)), bool)
    for run in range(count):
        again = cufa.flash_attention_backward(*arrays, **how)
        for i, (x, y) in enumerate(zip(again, first, strict=True)):
            differing[run, i] = (x.view(bits) != y.view(bits)).any()
    runs = dict(zip(NAMES, cp.asnumpy(differing).sum(axis=0), strict=True))
    assert not runs["dk"] and not runs["dv"] and not (deterministic and runs["dq"]), runs
    if not deterministic:
        x, y = (cp.asnumpy(z[0]).astype(np.float64) for z in (again, first))
        assert np.abs(x - y).max() <= 2 * EPSILON[str(case.q.dtype)] * np.abs(y).max()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("mask", "kv_heads"), [(FULL, 8), (CAUSAL, 8), (CAUSAL, 2), (Band(200, 0), 2)], ids=str
)
def test_the_same_bits_in_every_run(cp, mask, kv_heads, head_dim, deterministic):
    case = make_case(4, 8, kv_heads, 1024, 1024, head_dim, "bfloat16", mask=mask)
    _repeat(cp, case, 30, deterministic)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "mask",
    [masks.documents([300, 500, 224]), masks.chunks(200), masks.prefix(100), masks.evict(np.arange(1, 1025))],
    ids=str,
)
def test_the_same_bits_of_dk_and_dv_under_every_mask(cp, mask, dtype):
    _repeat(cp, make_case(2, 8, 2, 1024, 1024, 64, dtype, mask=mask), 30, deterministic=False)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_runs_in_a_full_memory(cp, dtype, deterministic):
    """Several waves of blocks, with all but 2 GiB of the card's memory taken."""
    free, _ = cp.cuda.runtime.memGetInfo()
    ballast = cp.cuda.alloc(max(free - (2 << 30), 1))
    case = make_case(60, 2, 2, 512, 512, 64, dtype, causal=True)
    _repeat(cp, case, 1000, deterministic)
    del ballast
    cp.get_default_memory_pool().free_all_blocks()


# --- The call ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(cp):
    case = make_case(1, 4, 2, 150, 150, 64, "float16", causal=True, dlse=True)
    arrays = [cp.asarray(x) for x in case.arrays]
    return case, arrays, {"causal": True, "dlse": cp.asarray(case.dlse)}


def test_repeated_calls_take_the_short_cut(cp, small):
    case, arrays, options = small
    first = cufa.flash_attention_backward(*arrays, **options)
    again = cufa.flash_attention_backward(*(x.copy() for x in arrays), **options)
    for x, y in zip(again, first, strict=True):
        assert x.data.ptr != y.data.ptr
    assert_gradients([x.get() for x in again], case)
    for name, other in (("dq", 1), ("dk", 2), ("dv", 3), ("dq", 0)):
        with pytest.raises(ValueError, match=f"{name} overlaps"):
            cufa.flash_attention_backward(*arrays, **options, **{name: arrays[other]})
    without = cufa.flash_attention_backward(*arrays, causal=True)
    assert_gradients([x.get() for x in without], dataclasses.replace(case, dlse=None))


def test_other_libraries_arrays_take_the_short_cut_too(small, monkeypatch):
    case, arrays, _ = small

    class Foreign:
        def __init__(self, x):
            self.__cuda_array_interface__ = x.__cuda_array_interface__

    checked = []
    real = dispatch.run_on_gpu
    monkeypatch.setattr(dispatch, "run_on_gpu", lambda *call: checked.append(1) or real(*call))
    for _ in range(3):
        out, lse = cufa.flash_attention(*map(Foreign, arrays[1:4]), scale=0.123, return_lse=True)
        given = (*arrays[:4], out, lse)
        got = cufa.flash_attention_backward(*map(Foreign, given), scale=0.123)
    assert len(checked) == 2, "each was checked once"
    exact = make_case(1, 4, 2, 150, 150, 64, "float16", scale=0.123)
    assert_gradients([x.get() for x in got], dataclasses.replace(exact, dout=case.dout))


def test_numpy_arrays_there_and_back(small):
    case, _, _ = small
    given = {"dk": np.full(case.k.shape, np.nan, case.k.dtype)}
    got = cufa.flash_attention_backward(*case.arrays, **case.options, device="cuda", **given)
    assert got[1] is given["dk"] and all(type(x) is np.ndarray for x in got)
    assert_gradients(got, case)


def test_arrays_in_two_places(cp, small):
    case, arrays, options = small
    with pytest.raises(TypeError, match="lse is numpy"):
        cufa.flash_attention_backward(*arrays[:5], case.lse, **options)
    with pytest.raises(ValueError, match="device='cpu' but dout is on a GPU"):
        cufa.flash_attention_backward(*arrays, **options, device="cpu")


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_capture_and_replay(cp, small, deterministic):
    case, arrays, options = small
    options["deterministic"] = deterministic
    results = {name: poisoned(getattr(case, name[1:])) for name in NAMES}
    cufa.flash_attention_backward(*arrays, **options, **results)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(2):  # two calls share what the capture keeps
            cufa.flash_attention_backward(*arrays, **options, **results)
        graph = stream.end_capture()
    for sign in (1, -1):
        arrays[0] *= cp.float16(sign)
        options["dlse"] *= cp.float32(sign)
        for x in results.values():
            x[...] = cp.nan
        cp.cuda.Device().synchronize()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        assert_gradients([sign * x.get() for x in results.values()], case)


def test_does_not_synchronise_and_runs_in_order(cp, small):
    _, arrays, options = small
    stream = cp.cuda.Stream(non_blocking=True)
    dout = cp.zeros_like(arrays[0])
    cp.cuda.Device().synchronize()
    with stream:
        # Leaves memory in the stream's pool: while the stream is held, a cudaMalloc could wait for it.
        expected = [x.get() for x in cufa.flash_attention_backward(*arrays, **options, deterministic=True)]
        release = hold(cp)
        dout[...] = arrays[0]
        got = cufa.flash_attention_backward(dout, *arrays[1:], **options, deterministic=True)
        assert not stream.done, "flash_attention_backward synchronised"
        release()
    stream.synchronize()
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x.get(), y)


def test_threads(cp):
    """Own streams, same and different shapes: one compile each, right answers."""
    cases = [make_case(1, 2, 2, 64 + 16 * i, 100, 64, "float16", seed=i, causal=True) for i in range(4)]

    def work(i: int) -> None:
        case = cases[i % len(cases)]
        with cp.cuda.Stream(non_blocking=True) as stream:
            arrays = [cp.asarray(x) for x in case.arrays]
            for _ in range(20):
                got = cufa.flash_attention_backward(*arrays, causal=True)
            stream.synchronize()
            assert_gradients([x.get() for x in got], case)

    in_threads(work, 8)


@pytest.mark.alone
def test_memory_is_linear(cp):
    """Beyond the results, dQ in float32 and a few numbers per query."""
    q = cp.zeros((1, 1, 65536, 64), cp.float16)
    out, lse = cufa.flash_attention(q, q, q, return_lse=True)
    results = {name: cp.empty_like(q) for name in NAMES}
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    cufa.flash_attention_backward(q, q, q, q, out, lse, **results)
    assert pool.total_bytes() - before <= 65536 * (4 * 64 + 8) + (1 << 20)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_torchs(cp, dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (
        torch.randn(1, 2, 200, 64, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
        for _ in range(3)
    )
    out, lse = cufa.flash_attention(*(x.detach() for x in (q, k, v)), causal=True, return_lse=True)
    dout = torch.randn_like(q)
    got = cufa.flash_attention_backward(dout, *(x.detach() for x in (q, k, v)), out, lse, causal=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    for x, y in zip(got, torch.autograd.grad(exact, wide, dout.double()), strict=True):
        assert np.abs(x.astype(cp.float32).get() - y.float().cpu().numpy()).max() < 4e-2
