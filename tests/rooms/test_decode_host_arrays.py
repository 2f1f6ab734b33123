"""flash_decode on NumPy arrays where a GPU is: what is copied, launched and brought back, without a GPU."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")

from decode_device_support import array, launches  # noqa: E402, F401 - a fixture among them
from decode_support import make_case  # noqa: E402

import cufa  # noqa: E402
from cufa.calls import dispatch  # noqa: E402
from cufa.gpu.architectures import Device  # noqa: E402


def use_gpu(monkeypatch, arch):
    """Host arrays go there."""
    from cufa.run.cuda import backend as cuda

    places = itertools.count(200)
    monkeypatch.setattr(dispatch, "gpu_available", lambda: True)
    monkeypatch.setattr(cp, "asarray", lambda x: array(next(places), x.shape, x.dtype))
    for name in ("device", "current_device"):
        monkeypatch.setattr(cuda, name, lambda *_: Device.typical(arch))


@pytest.fixture
def an_h100(launches, monkeypatch):
    """Results are allocated, as everything here, over addresses that nothing backs."""
    use_gpu(monkeypatch, "sm_90")
    with cp.cuda.using_allocator(lambda size: array(99, (size,), np.uint8).data):
        yield


@pytest.fixture
def an_a100(launches, monkeypatch):
    """None of its kernels takes an 8-bit cache."""
    use_gpu(monkeypatch, "sm_80")


def test_nothing_is_appended_by_a_call_that_the_gpu_cannot_run(an_a100):
    case = make_case([20, 31], new=1, fp8=True)
    arrays, options = case.arguments()
    before = [x.copy() for x in arrays]
    with pytest.raises(ValueError, match="decode_split_fp8 needs sm_89 or later"):
        cufa.flash_decode(*arrays, **options, device="cuda")
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("fp8", [False, True])
def test_nothing_is_touched_by_a_call_on_host_arrays_during_a_capture(an_h100, launches, monkeypatch, fp8):
    """Nothing is copied or allocated, which would end in the graph, and nothing is appended."""

    def touched(*_):
        raise AssertionError("touched")

    for owner, name in ((cp, "asarray"), (dispatch, "run_on_gpu")):
        monkeypatch.setattr(owner, name, touched)

    def refuse(name):
        raise ValueError(f"{name} during a capture")

    monkeypatch.setattr(dispatch, "check_not_capturing", refuse)
    case = make_case([20, 31], new=1, fp8=fp8)
    arrays, options = case.arguments()
    before = [x.copy() for x in arrays]
    with pytest.raises(ValueError, match="q during a capture"):
        cufa.flash_decode(*arrays, **options)
    q = np.zeros((1, 2, 8, 16), np.float16)
    with pytest.raises(ValueError, match="q during a capture"):
        cufa.flash_attention(q, q, q)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("fails", [False, True])
def test_new_tokens_are_appended_once_the_result_is_back(an_h100, launches, monkeypatch, fails):
    """A launch is asynchronous: what goes wrong on the GPU shows where the result is waited for."""
    from cufa.run.cpu import decode as cpu_decode

    order, append = [], cpu_decode.append

    def asnumpy(x):
        order.append(f"sync after {len(launches)} launch")
        if fails:
            raise RuntimeError("an illegal memory access was encountered")
        return np.zeros(x.shape, x.dtype)

    monkeypatch.setattr(cp, "asnumpy", asnumpy)
    monkeypatch.setattr(cpu_decode, "append", lambda operands: (order.append("append"), append(operands)))
    case = make_case([20, 31], new=1)
    arrays, options = case.arguments()
    before = [x.copy() for x in arrays]
    with pytest.raises(RuntimeError, match="illegal") if fails else contextlib.nullcontext():
        cufa.flash_decode(*arrays, **options)
    assert order == ["sync after 1 launch"] + ["append"] * (not fails)
    unchanged = [
        np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(arrays, before, strict=True)
    ]
    assert unchanged == [True, fails, fails]


@pytest.mark.parametrize("given", [False, True])
def test_results_come_back_to_the_host(an_h100, launches, monkeypatch, given):
    monkeypatch.setattr(cp, "asnumpy", lambda x: np.full(x.shape, x.ndim, x.dtype))
    case = make_case([20, 31])
    arrays, options = case.arguments()
    mine = np.zeros_like(arrays[0]) if given else None
    out, lse = cufa.flash_decode(*arrays, **options, out=mine, return_lse=True)
    assert len(launches) == 1 and type(out) is np.ndarray and out.shape == arrays[0].shape
    assert (out == 4).all() and (lse == 3).all() and (out is mine) == given


@pytest.mark.parametrize("change", [{"fp8": True}, {"fp8": True, "head_dim": 24}, {"dtype": "float32"}])
def test_what_the_gpu_cannot_run_goes_to_the_cpu(an_a100, launches, change):
    case = make_case([20, 31], new=1, **change)
    arrays, options = case.arguments()
    planned = cufa.plan_decode(*arrays, **{n: options[n] for n in ("cache_seqlens", "k_new")})
    case.check(cufa.flash_decode(*arrays, **options))
    assert not launches and planned.device is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_plan_from_device_arrays_is_refused_where_the_call_is(an_h100, dtype):
    """They cannot move to the CPU, as host arrays and shapes do."""
    shapes = (4, 8, 1, 64), (4, 8, 9, 64), (4, 8, 9, 64)
    given = [array(i, shape, np.dtype(dtype)) for i, shape in enumerate(shapes, 1)]
    message = rf"^q is {dtype}; decoding on the GPU takes .*: convert with q\.astype\(cupy\.float16\)$"
    for function in (cufa.flash_decode, cufa.plan_decode):
        with pytest.raises(TypeError, match=message):
            function(*given)
    assert cufa.plan_decode(*shapes, dtype=dtype).device is None
    assert cufa.plan_decode(*given, dtype="float16", cache_dtype="float16").device is not None


def test_a_forward_plan_from_device_arrays_is_refused_where_the_call_is(an_h100):
    q = array(1, (1, 8, 9, 64), np.dtype("float64"))
    for function in (lambda: cufa.flash_attention(q, q, q), lambda: cufa.plan(q)):
        with pytest.raises(TypeError, match="q is float64; attention on the GPU takes"):
            function()
    assert cufa.plan(q.shape, dtype="float64").device is None
