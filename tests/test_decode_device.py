"""flash_decode on device arrays up to the launch, without a GPU.

Arrays are CuPy's over addresses that nothing backs: a host that read lengths, tables or caches would crash.
"""

from __future__ import annotations

import contextlib
import itertools

import ml_dtypes
import numpy as np
import pytest
from decode_support import make_case

import cufa
from cufa.core.architectures import Device
from cufa.core.operation import OPERATIONS
from cufa.decode.checks import DecodeCall
from cufa.ops import calls, seen

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array(number, shape, dtype=BFLOAT16):
    memory = cp.cuda.UnownedMemory(number << 40, 1 << 39, None, 0)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


@pytest.fixture
def launches(monkeypatch):
    """What would have been launched: (plan, operands, addresses); the plan is None on the short cut."""
    from cufa.backends import cuda

    log = []

    class Binding:
        def __init__(self, plan, given):
            assert tuple(given) == tuple(x.name for x in OPERATIONS["decode"].operands)
            self.first = plan, given

        def launch(self, addresses):
            log.append((*self.first, tuple(addresses)))
            self.first = None, None

        launch_here = launch

    monkeypatch.setattr(seen, "_seen", {})
    monkeypatch.setattr(cuda, "prepare", lambda plan, device_id: plan)
    monkeypatch.setattr(cuda, "Binding", Binding)
    monkeypatch.setattr(cuda, "device", lambda device_id: Device.typical("sm_90"))
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cp.cuda, "Device", lambda device_id: contextlib.nullcontext())
    monkeypatch.setattr(calls, "check_not_capturing", lambda name: None)
    monkeypatch.setattr(cp, "asarray", lambda x: array(100 + len(x), x.shape, x.dtype))
    return log


def given(layout="bhsd", fp8=False):
    cache = np.uint8 if fp8 else BFLOAT16
    shapes = {"q": (4, 32, 2, 128), "k_cache": (1000, 8, 16, 128), "v_cache": (1000, 8, 16, 128)}
    shapes |= {"k_new": (4, 8, 2, 128), "v_new": (4, 8, 2, 128), "out": (4, 32, 2, 128)}
    if layout == "bshd":
        shapes = {n: (a, c, b, d) for n, (a, b, c, d) in shapes.items()}
    dtypes = {"q": BFLOAT16, "out": BFLOAT16}
    arrays = {n: array(i, s, dtypes.get(n, cache)) for i, (n, s) in enumerate(shapes.items(), 1)}
    arrays |= {"cache_seqlens": array(10, (4,), np.int32), "block_table": array(11, (4, 100), np.int32)}
    if fp8:
        arrays |= {n: array(i, (8,), np.float32) for i, n in ((12, "k_scale"), (13, "v_scale"))}
    return arrays


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_first_call_and_the_short_cut_launch_the_same(launches, monkeypatch, fp8, layout):
    arrays = given(layout, fp8)
    for _ in range(3):
        assert cufa.flash_decode(**arrays, layout=layout) is arrays["out"]
        monkeypatch.setattr(DecodeCall, "read", None)  # nothing is looked at again
    (plan, operands, first), *others = launches
    p = plan.problem
    assert (p.batch, p.heads, p.kv_heads, p.seqlen_q, p.head_dim, p.seqlen_k) == (4, 32, 8, 2, 128, 1600)
    assert (p.cache.page_size, p.cache.num_pages, p.cache.new_tokens, p.lengths.ragged) == (16, 1000, 2, True)
    assert p.k_element.name == p.v_element.name == ("float8_e4m3" if fp8 else "bfloat16")
    assert p.alignment == 16 and p.positive_strides
    assert operands["q"].shape == operands["out"].shape == (4, 32, 2, 128)
    assert operands["k_cache"].shape == operands["v_cache"].shape == (1000, 8, 16, 128)
    assert operands["k_new"].shape == (4, 8, 2, 128)
    assert operands["k_cache"].data.ptr == arrays["k_cache"].data.ptr
    expected = [arrays[n].data.ptr if n in arrays else 0 for n in OPERATIONS["decode"].inputs] + [
        arrays["out"].data.ptr
    ]
    assert first == (*expected, 0)  # without lse
    for plan, _, addresses in others:
        assert plan is None and addresses == (*expected, 0)


def test_new_addresses_reach_the_launch_and_new_shapes_a_new_plan(launches):
    arrays = given()
    cufa.flash_decode(**arrays)
    cufa.flash_decode(**{**arrays, "q": array(20, (4, 32, 2, 128))})
    cufa.flash_decode(**{**arrays, "block_table": array(11, (4, 101), np.int32)})
    cufa.flash_decode(**arrays, num_splits=3)
    cufa.flash_decode(**{**arrays, "q": array(20, (4, 32, 2, 136))[..., 4:132]})  # 8-byte aligned rows
    assert [plan is None for plan, *_ in launches] == [False, True, False, False, False]
    assert launches[1][2][0] == 20 << 40
    assert launches[2][0].problem.seqlen_k == 1616 and launches[3][0].num_splits == 3
    assert launches[4][0].problem.alignment == 8


def test_small_arrays_of_the_host_are_copied(launches):
    arrays = given(fp8=True)
    arrays |= {"cache_seqlens": [1, 2, 3, 1598], "block_table": np.arange(400).reshape(4, 100)}
    arrays |= {"k_scale": 0.5, "v_scale": [1.0] * 8}
    for _ in range(2):
        cufa.flash_decode(**arrays)
    for plan, operands, _ in launches:
        assert plan is not None, "the values may have changed"
        assert operands["cache_seqlens"].dtype == operands["block_table"].dtype == np.int32
        assert operands["k_scale"].shape == operands["v_scale"].shape == (8,)
    with pytest.raises(ValueError, match=r"cache_seqlens\[3\] is 1599 and k_new appends 2, but block_table"):
        cufa.flash_decode(**{**arrays, "cache_seqlens": [1, 2, 3, 1599]})
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda a: {"out": a["q"]}, "out overlaps q"),
        (lambda a: {"out": a["k_cache"][:1, :, :8].reshape(4, 2, 8, 128)[:, :1]}, "out has shape"),
        (lambda a: {"v_cache": a["k_cache"]}, "k_cache overlaps v_cache"),
        (lambda a: {"k_new": a["v_cache"][:4, :, :2]}, "v_cache overlaps k_new"),
        (lambda a: {"cache_seqlens": a["cache_seqlens"].astype}, "cache_seqlens must be an array"),
        (lambda a: {"cache_seqlens": array(9, (4,), np.int64)}, r"cache_seqlens is int64.*cupy\.int32"),
        (
            lambda a: {"cache_seqlens": array(9, (8,), np.int32)[::2]},
            r"cache_seqlens has strides \(8,\): its last axis m",
        ),
        (
            lambda a: {"cache_seqlens": cp.lib.stride_tricks.as_strided(a["cache_seqlens"], (4,), (0,))},
            r"cache_seqlens has strides \(0,\): its last axis must be contiguous; use cupy",
        ),
        (lambda a: {"block_table": array(9, (100, 4), np.int32).T}, "block_table has strides"),
        (lambda a: {"v_cache": np.zeros((1000, 8, 16, 128), np.float16)}, "v_cache is numpy.*but q is cupy"),
        (lambda a: {"q": array(9, (4, 32, 2, 128), np.float32)}, r"q is float32.*q\.astype\(cupy\.float16\)"),
        (lambda a: {"device": "cpu"}, "device='cpu' but q is on a GPU"),
    ],
)
def test_what_is_refused_is_refused_again_and_nothing_is_launched(launches, changes, message):
    arrays = given()
    cufa.flash_decode(**arrays)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            cufa.flash_decode(**{**arrays, **changes(arrays)})
    assert len(launches) == 1


def at(address, shape, dtype):
    memory = cp.cuda.UnownedMemory(address, 1 << 39, None, 0)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize(
    "name", ["k_cache", "v_cache", "k_new", "v_new", "q", "out", "cache_seqlens", "k_scale"]
)
def test_arrays_at_odd_addresses_are_refused(launches, name):
    """Kernels never load less than an element, nor less than two bytes of a cache."""
    arrays = given(fp8=True)
    cufa.flash_decode(**arrays)
    x = arrays[name]
    for _ in range(2):  # a call like one that was seen is refused as well
        with pytest.raises(ValueError, match=rf"{name} lies at address 0x[0-9a-f]+1 .*use {name}\.copy\(\)"):
            cufa.flash_decode(**{**arrays, name: at(x.data.ptr + 1, x.shape, x.dtype)})
    assert len(launches) == 1


def test_rows_at_odd_addresses_are_refused(launches):
    arrays = given(fp8=True)
    cache = at(50 << 40, (1000, 8, 16, 129), np.uint8)
    with pytest.raises(
        ValueError, match=r"v_cache lies at address .* strides \(16512, 2064, 129, 1\): kernels"
    ):
        cufa.flash_decode(**{**arrays, "v_cache": cache[..., :128]})
    assert not launches
    cufa.flash_decode(**{**arrays, "v_cache": at(50 << 40, (1000, 8, 16, 130), np.uint8)[..., :128]})
    assert launches[0][0].problem.alignment == 2


class Capturing:
    """The current stream, while it is captured, or while another one is and it is the legacy stream."""

    def __init__(self, status=None):
        self.status = status

    def is_capturing(self):
        if self.status is None:
            return True
        raise cp.cuda.runtime.CUDARuntimeError(self.status)


@pytest.mark.parametrize(
    ("stream", "which"), [(Capturing(), "the current stream"), (Capturing(906), "another stream")]
)
@pytest.mark.parametrize("name", ["cache_seqlens", "block_table", "q"])
def test_host_arrays_are_refused_while_a_stream_is_captured(monkeypatch, name, stream, which):
    """A replay would use the values of the capture."""
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda: stream)
    with pytest.raises(ValueError, match=f"{name} is a NumPy array, but {which}.* is being captured"):
        calls.check_not_capturing(name)


def test_other_failures_of_a_stream_are_no_capture(monkeypatch):
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda: Capturing(700))
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="IllegalAddress"):
        calls.check_not_capturing("q")


@pytest.mark.parametrize("name", ["cache_seqlens", "block_table"])
def test_what_is_copied_asks_whether_the_stream_is_captured(launches, monkeypatch, name):
    def refuse(name):
        raise ValueError(f"{name} during a capture")

    monkeypatch.setattr(calls, "check_not_capturing", refuse)
    arrays = given()
    cufa.flash_decode(**arrays)
    host = {"cache_seqlens": [1, 2, 3, 4], "block_table": np.zeros((4, 100), np.int32)}
    changed, allocated = {**arrays, name: host[name], "out": None}, []
    with (
        cp.cuda.using_allocator(allocated.append),
        pytest.raises(ValueError, match=f"{name} during a capture"),
    ):
        cufa.flash_decode(**changed)
    assert len(launches) == 1 and not allocated


def use_gpu(monkeypatch, arch):
    """Host arrays go there."""
    from cufa.backends import cuda

    places = itertools.count(200)
    monkeypatch.setattr(calls, "gpu_available", lambda: True)
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

    for owner, name in ((cp, "asarray"), (calls, "run_on_gpu")):
        monkeypatch.setattr(owner, name, touched)

    def refuse(name):
        raise ValueError(f"{name} during a capture")

    monkeypatch.setattr(calls, "check_not_capturing", refuse)
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
    from cufa.backends import cpu_decode

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


def test_the_short_cut_takes_no_option_that_the_checks_refuse(launches):
    """2.0 and 1 + 0j equal numbers that were seen."""
    arrays = given()
    for bad in ({"num_splits": 2.0}, {"num_splits": "2"}, {"scale": 1 + 0j}):
        cufa.flash_decode(**arrays, **({"scale": 1.0} if "scale" in bad else {"num_splits": 2}))
        with pytest.raises(TypeError, match=f"{next(iter(bad))} must be"):
            cufa.flash_decode(**arrays, **bad)
    launches.clear()
    for number in (2, np.int64(2), np.uint8(2)):
        cufa.flash_decode(**arrays, num_splits=number)
    assert [plan for plan, *_ in launches] == [None] * 3


def test_a_scale_on_the_gpu_is_an_array_of_one_axis(launches):
    """One number would have to be written out for the kernel, by a launch of its own."""
    arrays = given(fp8=True)
    with pytest.raises(ValueError, match=r"k_scale has shape \(\).* \(8,\), or one number on the host"):
        cufa.flash_decode(**{**arrays, "k_scale": array(12, (), np.float32)})
    cufa.flash_decode(**{**arrays, "k_scale": np.float32(0.5)})
    assert len(launches) == 1


def test_device_lengths_of_host_arrays_are_refused():
    q, cache = np.zeros((4, 8, 1, 64), np.float16), np.zeros((4, 8, 9, 64), np.float16)
    with pytest.raises(TypeError, match=r"cache_seqlens is cupy.*but q is numpy"):
        cufa.flash_decode(q, cache, cache, cache_seqlens=array(9, (4,), np.int32))


def test_interleaved_caches_take_the_short_cut(launches):
    both = array(31, (1000, 2, 8, 16, 128))
    arrays = {**given(), "k_cache": both[:, 0], "v_cache": both[:, 1], "k_new": array(30, (4, 8, 2, 128))}
    for _ in range(3):
        cufa.flash_decode(**arrays)
    assert [plan is None for plan, *_ in launches] == [False, True, True]
    with pytest.raises(ValueError, match="k_cache overlaps v_cache"):
        cufa.flash_decode(**{**arrays, "v_cache": both[:, 0]})
