"""Decoding on a GPU: calls on CuPy and NumPy arrays, repeats, sinks, merging. (Every kernel and config: test_decode.py;
streams and graphs: test_decode_streams.py.)"""

from __future__ import annotations

import numpy as np
import pytest
from decode_support import make_case, numbers_of_heads, on_gpu
from support import DTYPES, EPSILON, poisoned_like

import cufa
from cufa.calls import decode as api
from cufa.calls import dispatch

pytestmark = pytest.mark.gpu

LENGTHS = [700, 0, 1, 257, 64]


def check(cp, case, layout="bhsd", **changes):
    arrays, options = on_gpu(cp, case, layout, **changes)
    out, lse = cufa.flash_decode(*arrays, **options, return_lse=True)
    assert isinstance(out, cp.ndarray) and isinstance(lse, cp.ndarray)
    case.check(out.get(), lse.get(), layout)
    return arrays, options, out


# --- Results and places -----------------------------------------------------------------------------------


@pytest.mark.sampled(dated=4, pairs=[("cache", "page_size")])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64, 128, 256])
@pytest.mark.parametrize("cache", ["float16", "bfloat16", "fp8"])
def test_cupy_in_cupy_out(cp, cache, page_size, layout):
    dtype, fp8 = ("bfloat16", True) if cache == "fp8" else (cache, False)
    case = make_case(LENGTHS, tokens=2, dtype=dtype, fp8=fp8, page_size=page_size, head_dim=64)
    check(cp, case, layout)
    check(cp, case, layout, num_splits=3)
    check(cp, case, layout, schedule="balanced")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", [0, 3, 16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_append_writes_the_caches_in_place(cp, fp8, page_size, layout):
    case = make_case([700, 2, 3, 257], tokens=2, new=2, page_size=page_size, fp8=fp8, head_dim=64)
    for schedule in ("fixed", "balanced"):
        arrays, options, _ = check(cp, case, layout, schedule=schedule)
        options["cache_seqlens"] = options["cache_seqlens"] + 2
        del options["k_new"], options["v_new"]
        case.check(cufa.flash_decode(*arrays, **options).get(), None, layout)


def test_numpy_in_numpy_out_on_the_gpu(cp):
    case = make_case(LENGTHS, tokens=2, page_size=16, head_dim=64)
    arrays, options = case.arguments()
    out, lse = cufa.flash_decode(*arrays, **options, return_lse=True, device="cuda")
    assert type(out) is np.ndarray and type(lse) is np.ndarray
    case.check(out, lse)
    given = poisoned_like(case.q)
    assert cufa.flash_decode(*arrays, **options, out=given) is given
    np.testing.assert_array_equal(given, out)


@pytest.mark.parametrize("page_size", [0, 16])
def test_numpy_caches_are_appended_to(cp, page_size):
    case = make_case([70, 3], new=1, page_size=page_size, head_dim=64)
    arrays, options = case.arguments()
    case.check(cufa.flash_decode(*arrays, **options, device="cuda"))
    options["cache_seqlens"] = options["cache_seqlens"] + 1
    del options["k_new"], options["v_new"]
    case.check(cufa.flash_decode(*arrays, **options, device="cpu"))


def test_numpy_float32_goes_to_the_cpu(cp):
    case = make_case([70, 3], dtype="float32")
    arrays, options = case.arguments()
    case.check(cufa.flash_decode(*arrays, **options))
    with pytest.raises(TypeError, match=r"q is float32; decoding on the GPU takes.*device='cpu'"):
        cufa.flash_decode(*arrays, **options, device="cuda")


def test_lengths_table_and_scales_on_the_host(cp):
    """Checked there, then copied; everything else is on the GPU."""
    case = make_case(LENGTHS, page_size=16, fp8=True, head_dim=64)
    arrays, options = case.arguments()
    arrays = [cp.asarray(x) for x in arrays]
    case.check(cufa.flash_decode(*arrays, **options).get())
    lengths = options.pop("cache_seqlens")
    case.check(cufa.flash_decode(*arrays, cache_seqlens=lengths.tolist(), **options).get())
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 5000, but block_table has"):
        cufa.flash_decode(*arrays, cache_seqlens=5000, **options)


def test_mixed_places(cp):
    case = make_case([70, 3], new=1)
    arrays, options = case.arguments()
    there, there_options = on_gpu(cp, case)
    with pytest.raises(TypeError, match=r"k_cache is numpy.*but q is cupy.*cupy\.asarray"):
        cufa.flash_decode(there[0], *arrays[1:], **there_options)
    with pytest.raises(TypeError, match=r"cache_seqlens is cupy.*but q is numpy"):
        cufa.flash_decode(*arrays, **{**options, "cache_seqlens": there_options["cache_seqlens"]})
    with pytest.raises(TypeError, match="out is numpy"):
        cufa.flash_decode(*there, **there_options, out=arrays[0])
    with pytest.raises(ValueError, match="device='cpu' but q is on a GPU"):
        cufa.flash_decode(*there, **there_options, device="cpu")
    with pytest.raises(TypeError, match=r"cache_seqlens is int64.*\.astype\('int32'\)"):
        cufa.flash_decode(*there, **{**there_options, "cache_seqlens": cp.zeros(2, cp.int64)})


def test_lengths_beyond_the_cache_on_the_device_are_taken_as_the_capacity(cp):
    """The host cannot check them: nothing beyond the cache is touched, new tokens without room are dropped."""
    for page_size in (0, 16):
        case = make_case([64, 64], capacity=64, page_size=page_size, head_dim=64)
        arrays, options = on_gpu(cp, case)
        options["cache_seqlens"] = cp.array([10**9, 65], cp.int32)
        case.check(cufa.flash_decode(*arrays, **options).get())
        before = [x.copy() for x in arrays[1:]]
        new = cp.full((2, 2, 1, 64), 7, cp.float16)
        cufa.flash_decode(*arrays, **options, k_new=new, v_new=new)
        for x, y in zip(arrays[1:], before, strict=True):
            np.testing.assert_array_equal(x.get().view(np.uint16), y.get().view(np.uint16))


def test_torch_tensors(cp):
    torch = pytest.importorskip("torch")
    case = make_case(LENGTHS, tokens=2, page_size=16, dtype="float16", head_dim=64)
    arrays, options = case.arguments()
    arrays = [torch.from_numpy(x).cuda() for x in arrays]
    options = {n: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for n, x in options.items()}
    for _ in range(2):  # through every check, then as a call seen before
        out = cufa.flash_decode(*arrays, **options)
        assert isinstance(out, cp.ndarray)
        case.check(out.get())


# --- Repeats ----------------------------------------------------------------------------------------------


def test_repeated_calls_take_the_short_cut_and_give_the_same(cp, monkeypatch):
    case = make_case(LENGTHS, tokens=2, page_size=16, head_dim=64)
    arrays, options = on_gpu(cp, case)
    first = cufa.flash_decode(*arrays, **options)
    cufa.flash_decode(*arrays, **options, out=cp.empty_like(arrays[0]))
    cufa.flash_decode(*arrays, **options, return_lse=True)
    monkeypatch.setattr(api.DecodeCall, "read", None)  # nothing is read or checked again
    second, lse = cufa.flash_decode(*arrays, **options, return_lse=True)
    copies = [x.copy() for x in arrays]
    third = cufa.flash_decode(*copies, **options, out=(given := poisoned_like(arrays[0], cp)))
    assert third is given and first.data.ptr != second.data.ptr
    for out in (second, third):
        np.testing.assert_array_equal(out.get(), first.get())
    case.check(second.get(), lse.get())


def test_host_lengths_are_checked_and_copied_but_not_planned_again(cp, monkeypatch):
    case = make_case(LENGTHS, tokens=2, page_size=16, head_dim=64)
    arrays, options = on_gpu(cp, case)
    options |= {
        "cache_seqlens": options["cache_seqlens"].get().tolist(),
        "block_table": options["block_table"].get(),
    }
    cufa.flash_decode(*arrays, **options, return_lse=True)
    monkeypatch.setattr(dispatch, "plan_for", None)
    case.check(*(x.get() for x in cufa.flash_decode(*arrays, **options, return_lse=True)))
    shorter = [max(n - 1, 0) for n in options["cache_seqlens"]]
    given = options | {"cache_seqlens": cp.asarray(shorter, "int32")}
    monkeypatch.undo()
    expected = cufa.flash_decode(*arrays, **given)
    monkeypatch.setattr(dispatch, "plan_for", None)
    found = cufa.flash_decode(*arrays, **options | {"cache_seqlens": shorter})
    np.testing.assert_array_equal(found.get(), expected.get())
    with pytest.raises(ValueError, match="cache_seqlens"):
        cufa.flash_decode(*arrays, **options | {"cache_seqlens": [10**6] * len(shorter)})


def test_a_cached_call_follows_new_lengths_and_tables(cp, monkeypatch):
    one, other = (make_case(n, page_size=16, head_dim=64, capacity=800, seed=s) for s, n in enumerate([
        LENGTHS, [3, 799, 16, 0, 33],
    ]))  # fmt: skip
    pages = max(len(one.k_cache), len(other.k_cache))
    for case in (one, other):  # the same shapes, so the same plan
        for name in ("k_cache", "v_cache"):
            x = getattr(case, name)
            more = np.full((pages - len(x), *x.shape[1:]), np.nan, x.dtype)
            setattr(case, name, np.concatenate([x, more]))
        check(cp, case)
        monkeypatch.setattr(api.DecodeCall, "read", None)


def test_overlaps_are_found_on_repeated_calls_too(cp):
    case = make_case([63], new=1, heads=2, tokens=1, head_dim=64, capacity=64)
    arrays, options = on_gpu(cp, case)
    out = cp.empty_like(arrays[0])
    cufa.flash_decode(*arrays, **options, out=out)
    for _ in range(2):
        with pytest.raises(ValueError, match="out overlaps q"):
            cufa.flash_decode(*arrays, **options, out=arrays[0])
        inside = arrays[1].reshape(-1)[64 : 64 + out.size].reshape(out.shape)
        with pytest.raises(ValueError, match="out overlaps k_cache"):
            cufa.flash_decode(*arrays, **options, out=inside)
        with pytest.raises(ValueError, match="k_cache overlaps v_cache in memory"):
            cufa.flash_decode(arrays[0], arrays[1], arrays[1], **options, out=out)
    both = cp.stack(arrays[1:], axis=2)  # interleaved: apart, however often
    for _ in range(3):
        case.check(cufa.flash_decode(arrays[0], both[:, :, 0], both[:, :, 1], **options, out=out).get())


# --- Sinks and ALiBi --------------------------------------------------------------------------------------


def scored(few, **made):
    lengths = [700, 0, 1, 129, 2048]
    of_heads = numbers_of_heads(few, len(lengths), 4)
    return make_case(lengths, head_dim=64, dtype="bfloat16", **made, **of_heads)


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("few", ["sink", "alibi_of_batch", "both"])
def test_calls(cp, few, schedule):
    """On CuPy arrays, as seen before, with numbers on the host, and on NumPy arrays; the same bits each time."""
    case = scored(few, tokens=2)
    arrays, options = on_gpu(cp, case, schedule=schedule)
    calls = [cufa.flash_decode(*arrays, **options, return_lse=True) for _ in range(3)]
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = case.options[name]
    calls.append(cufa.flash_decode(*arrays, **options, return_lse=True))
    given, there = case.arguments(schedule=schedule)
    found = cufa.flash_decode(*given, **there, return_lse=True, device="cuda")
    case.check(*found)
    for call in calls:
        for x, first in zip(call, found, strict=True):
            np.testing.assert_array_equal(x.get(), first)


def test_numbers_that_change_between_replays(cp):
    """A graph reads them where they are."""
    case = scored("both")
    arrays, options = on_gpu(cp, case)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        out = cp.zeros_like(arrays[0])
        cufa.flash_decode(*arrays, **options, out=out)
        stream.begin_capture()
        cufa.flash_decode(*arrays, **options, out=out)
        graph = stream.end_capture()
        for factor in (1.0, 0.5):
            changed = {name: case.options[name] * np.float32(factor) for name in ("sink", "alibi_slopes")}
            for name, x in changed.items():
                options[name].set(x, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            given, there = case.arguments()
            fresh = cufa.flash_decode(*given, **{**there, **changed}, device="cuda")
            np.testing.assert_array_equal(out.get(stream=stream), fresh)


def test_without_any_room_the_sink_is_all(cp):
    q, cache = cp.ones((2, 4, 1, 64), cp.float16), cp.ones((2, 2, 0, 64), cp.float16)
    sink = cp.arange(4, dtype=cp.float32)
    out, lse = cufa.flash_decode(q, cache, cache, sink=sink, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse.get()[..., 0], [[0, 1, 2, 3]] * 2)


# --- Merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_on_the_gpu_is_the_merge_on_the_cpu(cp, dtype, layout):
    rng = np.random.default_rng(0)
    lse_type = np.float64 if dtype == "float64" else np.float32
    outs = [rng.standard_normal((2, 3, 5, 16)).astype(DTYPES[dtype]) for _ in "ab"]
    lses = [(20 * rng.standard_normal((2, 3, 5))).astype(lse_type) for _ in "ab"]
    if layout == "bshd":
        lses = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in lses]
    lses[0][0, 0], lses[1][0, :2] = -np.inf, -np.inf  # nothing in both, nothing in one
    first = (slice(0, 1), slice(0, 1)) if layout == "bhsd" else (slice(0, 1), slice(None), slice(0, 1))
    outs[0][first] = np.nan
    states = [x for pair in zip(outs, lses, strict=True) for x in pair]
    expected, expected_lse = cufa.merge_attention_states(*states, layout=layout)
    out, lse = cufa.merge_attention_states(*(cp.asarray(x) for x in states), layout=layout)
    assert isinstance(out, cp.ndarray) and out.dtype == outs[0].dtype and lse.dtype == lse_type
    got, want = out.get().astype(np.float64), expected.astype(np.float64)
    tolerance = max(EPSILON[dtype], 8 * EPSILON["float32"] if dtype != "float64" else 0)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.get(), expected_lse, rtol=4e-7 if dtype != "float64" else 1e-15)


def test_merge_of_strided_states(cp):
    rng = np.random.default_rng(1)
    out = cp.asarray(rng.standard_normal((2, 4, 6, 32)).astype(np.float16))
    lse = cp.asarray(rng.standard_normal((2, 4, 6)).astype(np.float32))
    halves = out[:, ::2, :, ::2], lse[:, ::2], out[:, 1::2, :, ::2], lse[:, 1::2]
    merged, merged_lse = cufa.merge_attention_states(*halves)
    expected, expected_lse = cufa.merge_attention_states(*(x.get() for x in halves))
    np.testing.assert_allclose(merged.get(), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(merged_lse.get(), expected_lse, rtol=1e-6)
