"""flash_decode on device arrays up to the launch, without a GPU.

Arrays are CuPy's over addresses that nothing backs: a host that read lengths, tables or caches would crash.
"""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names
from __future__ import annotations

import numpy as np
import pytest

cp = pytest.importorskip("cupy", reason="needs CuPy, but no GPU: pip install 'cufa[cuda13]'")

from decode_device_support import BFLOAT16, array, given, launches  # noqa: E402, F401 - a fixture among them

import cufa  # noqa: E402
from cufa.calls import dispatch  # noqa: E402
from cufa.calls.decode_checks import DecodeCall  # noqa: E402
from cufa.plan.operation import OPERATIONS  # noqa: E402


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


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_of_tokens_are_read_and_written_in_place(launches, layout):
    """The first launch quantises new tokens of q's dtype."""
    shape = (4, 8, 2, 128) if layout == "bhsd" else (4, 2, 8, 128)
    scales = {name: array(i, (1000, 8, 16), np.float32) for i, name in ((12, "k_scale"), (13, "v_scale"))}
    arrays = given(layout, fp8=True) | scales | {"k_new": array(4, shape), "v_new": array(5, shape)}
    for _ in range(2):
        cufa.flash_decode(**arrays, layout=layout)
    (plan, operands, first), (again, _, second) = launches
    assert plan.problem.scales == ("", "token", "token") and plan.problem.cache.quantize_new
    assert plan.launches[0].entry == "decode_append" and "_scaled" in plan.spec.name
    assert operands["k_scale"].data.ptr == scales["k_scale"].data.ptr
    packed = plan.operation.pack(plan, operands)
    assert packed.k_new_stride.batch == 8 * 2 * 128, "in elements of q's dtype"
    assert again is None and second == first
    with pytest.raises(ValueError, match="k_scale overlaps v_scale in memory, but k_new is appended"):
        cufa.flash_decode(**{**arrays, "v_scale": scales["k_scale"]}, layout=layout)
    with pytest.raises(TypeError, match="scales of tokens or blocks must be where the cache is"):
        cufa.flash_decode(**{**arrays, "v_scale": np.ones((1000, 8, 16), np.float32)}, layout=layout)


def test_small_arrays_of_the_host_are_copied(launches):
    arrays = given(fp8=True)
    arrays |= {"cache_seqlens": [1, 2, 3, 1598], "block_table": np.arange(400).reshape(4, 100)}
    arrays |= {"k_scale": 0.5, "v_scale": [1.0] * 8}
    for _ in range(2):
        cufa.flash_decode(**arrays)
    (plan, operands, _), (again, *_) = launches
    assert plan is not None and again is None, "planned once"
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
        (lambda a: {"cache_seqlens": array(9, (4,), np.int64)}, r"cache_seqlens is int64.*astype\('int32'\)"),
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
        (lambda a: {"out": np.zeros((4, 32, 2, 128), np.float16)}, "out is numpy"),
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
        dispatch.check_not_capturing(name)


def test_other_failures_of_a_stream_are_no_capture(monkeypatch):
    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda: Capturing(700))
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="IllegalAddress"):
        dispatch.check_not_capturing("q")


@pytest.mark.parametrize("name", ["cache_seqlens", "block_table"])
def test_what_is_copied_asks_whether_the_stream_is_captured(launches, monkeypatch, name):
    def refuse(name):
        raise ValueError(f"{name} during a capture")

    monkeypatch.setattr(dispatch, "check_not_capturing", refuse)
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
    with pytest.raises(ValueError, match=r"k_scale has shape \(\).* or one number on the host, here \(8,\)"):
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
