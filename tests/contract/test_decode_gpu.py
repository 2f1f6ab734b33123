"""Decoding on a GPU: calls on CuPy and NumPy arrays, repeats, streams, CUDA graphs, threads. (Every kernel and config:
test_decode.py.)"""

from __future__ import annotations

import numpy as np
import pytest
from backends import GPU
from decode_kernel_support import cache_of, operands_of, plan_of, served
from decode_support import make_case, numbers_of_heads, on_gpu
from held_stream import hold
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, EPSILON, in_threads, poisoned_like

import cufa
from cufa.calls import decode as api
from cufa.kernels import kernels_of

pytestmark = pytest.mark.gpu

LENGTHS = [700, 0, 1, 257, 64]
KERNELS = pytest.mark.parametrize("kernel", kernels_of("decode"))


@pytest.fixture(scope="module")
def device(cp):
    return GPU.device


def run(cp, device, case, kernel, num_splits=None, config=None):
    """(plan, operands): decoded once, and right."""
    from cufa.run.cuda import backend as cuda

    plan = plan_of(case, kernel, num_splits, config, device)
    operands = operands_of(case, cp.asarray)
    cuda.run(plan, operands)
    case.check(operands["out"].get(), operands["lse"].get())
    return plan, operands


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


def test_another_device_than_the_current_one(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = make_case(LENGTHS, page_size=16, head_dim=64)
    with cp.cuda.Device(1):
        arrays, options = on_gpu(cp, case)
        cp.cuda.Device().synchronize()
    for _ in range(2):
        out, lse = cufa.flash_decode(*arrays, **options, return_lse=True)
        assert out.data.device_id == lse.data.device_id == 1
        assert cp.cuda.runtime.getDevice() == 0
        with cp.cuda.Device(1):
            case.check(out.get(), lse.get())


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


def test_bit_identical_repeats(cp):
    case = make_case([5000, 0, 1, 257, 3000], tokens=3, page_size=16, head_dim=128, dtype="bfloat16")
    arrays, options = on_gpu(cp, case)
    for schedule in ("fixed", "balanced"):
        first = cufa.flash_decode(*arrays, **options, schedule=schedule).get()
        case.check(first)
        for _ in range(20):
            again = cufa.flash_decode(*arrays, **options, schedule=schedule).get()
            np.testing.assert_array_equal(again.view(np.uint16), first.view(np.uint16))


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


def test_prefix_and_own_cache_merge_on_the_gpu(cp):
    case = make_case([500, 500], capacity=500, head_dim=64)
    (q, k, v), _ = on_gpu(cp, case)
    parts = [
        x
        for keys in (slice(0, 130), slice(130, 500))
        for x in cufa.flash_decode(q, k[:, :, keys], v[:, :, keys], return_lse=True)
    ]
    out, lse = cufa.merge_attention_states(*parts)
    expected, expected_lse = case.expected
    np.testing.assert_allclose(out.get().astype(np.float64), expected, atol=2 * case.bound + 2e-3)
    np.testing.assert_allclose(lse.get(), expected_lse, rtol=1e-5, atol=1e-4)


# --- Streams, graphs, threads -----------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60)
def test_any_call(cp, device, data):
    """Whatever lengths, tokens, pages and cuts: a few builds of each schedule, contiguous and in pages."""
    new = data.draw(st.integers(1, 16), label="new")
    case = make_case(
        data.draw(st.lists(st.integers(new, 700), min_size=1, max_size=5), label="lengths"),
        heads=(kv_heads := data.draw(st.integers(1, 3), label="kv_heads")),
        kv_heads=kv_heads,
        tokens=data.draw(st.integers(2, 16), label="tokens"),
        new=new,
        page_size=data.draw(st.sampled_from([0, 16]), label="page_size"),
        head_dim=64,
        seed=data.draw(st.integers(0, 9), label="seed"),
    )
    arrays, options = case.arguments()
    options = {n: cp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    options["schedule"] = data.draw(st.sampled_from(["fixed", "balanced"]), label="schedule")
    options["num_splits"] = data.draw(st.sampled_from([None, 1, 2, 3, 7, 20, 100]), label="num_splits")
    out, lse = cufa.flash_decode(*map(cp.asarray, arrays), **options, return_lse=True)
    case.check(out.get(), lse.get())


@KERNELS
def test_repeats_are_bit_identical_on_any_stream(cp, device, kernel):
    from cufa.run.cuda import backend as cuda

    case = make_case([3000, 5, 700, 64, 1, 2000], heads=8, fp8=cache_of(kernel), head_dim=64)
    served(device, kernel, 64)
    plan, operands = run(cp, device, case, kernel)
    binding = cuda.Binding(cuda.prepare(plan), operands)
    first = operands["out"].get().view(np.uint8)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [[cp.empty_like(operands["out"]) for _ in range(20)] for _ in streams]
    for i in range(20):
        for stream, mine in zip(streams, outs, strict=True):
            with stream:
                binding.launch(cuda.addresses({**operands, "out": mine[i]}))
    cp.cuda.runtime.deviceSynchronize()
    for out in (x for mine in outs for x in mine):
        np.testing.assert_array_equal(out.get().view(np.uint8), first)


@pytest.mark.parametrize("kernel", ["decode_split", "decode_balanced"])
def test_threads_that_share_a_stream(cp, device, kernel):
    """Two launches a call: those of two calls must not take turns on the stream's workspace."""
    from cufa.run.cuda import backend as cuda

    stream, todo = cp.cuda.Stream(non_blocking=True), []
    for i in range(4):
        case = make_case([900 + 64 * i], heads=64, kv_heads=1, head_dim=64, seed=i)
        plan = plan_of(case, kernel, 10, None, device)
        plan = plan_of(case, kernel, 10, plan.config.without_fold(), device)
        assert len(plan.launches) == 2
        operands = operands_of(case, cp.asarray)
        outs = [cp.full_like(operands["out"], cp.nan) for _ in range(100)]
        todo.append((case, operands, cuda.Binding(cuda.prepare(plan), operands), outs))
    cp.cuda.Device().synchronize()

    def work(i: int) -> None:
        _, operands, binding, outs = todo[i]
        with stream:
            for out in outs:
                binding.launch(cuda.addresses({**operands, "out": out}))

    in_threads(work, len(todo))
    stream.synchronize()
    for case, _, _, outs in todo:
        case.check(outs[0].get())
        for out in outs:
            np.testing.assert_array_equal(out.get().view(np.uint16), outs[0].get().view(np.uint16))


@pytest.mark.parametrize("kernel", ["decode_split", "decode_balanced"])
def test_graph_captured_behind_queued_work(cp, device, kernel):
    """A kernel that still waits on the stream writes to memory that was given back to the stream's pool: the
    counters of the graph must not lie there. Calls of one capture share a workspace, and grow it."""
    from cufa.run.cuda import backend as cuda
    from cufa.run.cuda import workspace

    todo = []
    for length in (900, 2000):
        case = make_case([length, 33], head_dim=64)
        config = served(device, kernel, 64)[0]
        assert config.fold_combine
        operands = operands_of(case, cp.asarray)
        plan = plan_of(case, kernel, length // 100, config, device)
        binding = cuda.Binding(cuda.prepare(plan), operands)
        binding.launch(cuda.addresses(operands))  # loads what is captured below
        todo.append((case, operands, binding))
    before = set(workspace._of_captures)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        junk = [cp.full(128 << i % 12, -1, np.int32) for i in range(64)]
        release = hold(cp)
        for x in junk:
            x.fill(-1)
        del junk, x
        stream.begin_capture()
        for _ in range(3):
            for _, operands, binding in todo:
                binding.launch(cuda.addresses(operands))
        graph = stream.end_capture()
        release()
        stream.synchronize()
        for _ in range(3):
            for _, operands, _ in todo:
                operands["out"].fill(float("nan"))
            graph.launch(stream)
            stream.synchronize()
            for case, operands, _ in todo:
                case.check(operands["out"].get(), operands["lse"].get())
    assert len(set(workspace._of_captures) - before) == 1  # of both lengths and all launches of the capture


@KERNELS
def test_graph_replay_while_lengths_grow(cp, device, kernel):
    """Captured once, on another stream than it is replayed on; lengths change on the device."""
    from cufa.run.cuda import backend as cuda

    case = make_case([900, 700], fp8=cache_of(kernel), head_dim=64)
    served(device, kernel, 64)
    plan, operands = run(cp, device, case, kernel, None if "balanced" in kernel else 4)
    binding = cuda.Binding(cuda.prepare(plan), operands)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        binding.launch(cuda.addresses(operands))
        graph = stream.end_capture()
    for lengths in ([1, 0], [64, 65], [300, 129], [900, 700]):
        part = make_case([900, 700], fp8=cache_of(kernel), head_dim=64)
        part.options["cache_seqlens"] = np.array(lengths, np.int32)
        part.lengths = lengths
        operands["cache_seqlens"][:] = cp.asarray(part.options["cache_seqlens"])
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(3):
            operands["out"].fill(float("nan"))
            cp.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
        stream.synchronize()
        part.check(operands["out"].get(), operands["lse"].get())


def test_runs_on_the_current_stream_in_order(cp):
    """The call waits for what is queued before it on the stream, and does not wait for the GPU itself."""
    case = make_case(LENGTHS, page_size=16, head_dim=64)
    arrays, options = on_gpu(cp, case)
    lengths, right = cp.zeros_like(options["cache_seqlens"]), options.pop("cache_seqlens")
    cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
    cp.cuda.Device().synchronize()
    with stream:
        release = hold(cp)
        lengths[...] = right
        out = cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
        done_at_return = stream.done
        release()
    stream.synchronize()
    assert not done_at_return, "flash_decode synchronised"
    case.check(out.get())


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_graph_replay_while_lengths_grow_on_the_device(cp, page_size, schedule):
    """A captured step of decoding: append, attend, add one to the lengths. Every replay is the next token."""
    steps, start = 40, [90, 0, 15]
    case = make_case([n + steps for n in start], page_size=page_size, head_dim=64, capacity=160)
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((steps, 3, 4, 1, 64)).astype(np.float16)
    arrays, options = on_gpu(cp, case, schedule=schedule)
    whole = [x.copy() for x in arrays[1:]]
    full = case.k_cache, case.v_cache
    tokens = [  # keys and values of step s: what the full cache holds at position start[b] + s
        [np.stack([one_token(case, x, b, n + s) for b, n in enumerate(start)]) for x in full]
        for s in range(steps)
    ]
    caches = [cp.full_like(x, cp.nan) for x in whole]
    lengths = cp.array(start, cp.int32)
    for cache, source in zip(caches, whole, strict=True):
        copy_prefixes(cache, source, case, start)
    q, out = cp.empty_like(arrays[0]), poisoned_like(arrays[0], cp)
    k_new, v_new = (cp.empty((3, 2, 1, 64), cp.float16) for _ in "kv")
    options |= {"cache_seqlens": lengths, "k_new": k_new, "v_new": v_new, "out": out}
    q[...], k_new[...], v_new[...] = 0, 0, 0
    cufa.flash_decode(q, *(x.copy() for x in caches), **options)  # compiles, as the next line does
    lengths += 0
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cufa.flash_decode(q, *caches, **options)
        lengths += 1
        graph = stream.end_capture()
    for s in range(steps):
        q[...], k_new[...], v_new[...] = (cp.asarray(x) for x in (queries[s], *tokens[s]))
        out[...] = cp.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        now = make_view(case, queries[s], [n + s + 1 for n in start])
        now.check(out.get())
    np.testing.assert_array_equal(lengths.get(), np.add(start, steps))


def one_token(case, cache, b, position):
    ((row, n),) = case.places(b, [position])
    return cache[row, :, n : n + 1]


def copy_prefixes(cache, source, case, lengths):
    for b, n in enumerate(lengths):
        for row, at in case.places(b, range(n)):
            cache[row, :, at] = source[row, :, at]


def make_view(case, q, lengths):
    """The same cache, other queries, and only the first tokens of it."""
    options = {**case.options, "cache_seqlens": np.array(lengths, np.int32)}
    return type(case)(q, case.k_cache, case.v_cache, options, list(lengths))


def test_host_arrays_are_refused_while_the_stream_is_captured(cp):
    case = make_case(LENGTHS, page_size=16, head_dim=64)
    arrays, options = on_gpu(cp, case, out=cp.empty_like(cp.asarray(case.q)))
    lengths = options.pop("cache_seqlens")
    cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match="cache_seqlens is a NumPy array, but the current stream"):
            cufa.flash_decode(*arrays, **options, cache_seqlens=case.lengths)
        with pytest.raises(ValueError, match="q is a NumPy array, but the current stream is being captured"):
            cufa.flash_decode(case.q, case.k_cache, case.v_cache, **case.options)
        cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
        graph = stream.end_capture()
        options["out"].fill(float("nan"))
        graph.launch(stream)
        stream.synchronize()
    case.check(options["out"].get())


def test_graphs_on_several_streams_do_not_share_workspace(cp):
    """Two graphs replayed at once on two streams: each has partial results of its own."""
    cases = [make_case([4000, 33], head_dim=64, seed=s) for s in range(2)]
    streams, graphs, outs = [], [], []
    for case in cases:
        arrays, options = on_gpu(cp, case)
        outs.append((out := poisoned_like(arrays[0], cp), arrays, options))
        cufa.flash_decode(*arrays, **options, out=out, num_splits=20)
        streams.append(stream := cp.cuda.Stream(non_blocking=True))
        cp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            for _ in range(20):
                cufa.flash_decode(*arrays, **options, out=out, num_splits=20)
            graphs.append(stream.end_capture())
        out[...] = cp.nan
    cp.cuda.Device().synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
    cp.cuda.Device().synchronize()
    for case, (out, *_) in zip(cases, outs, strict=True):
        case.check(out.get())


def test_threads(cp):
    """Many threads, own streams, same and different shapes: right answers."""
    cases = [make_case([300 + 16 * i, 7], page_size=16 * (i % 2), head_dim=64, seed=i) for i in range(4)]
    for case in cases:
        _ = case.expected, case.bound

    def work(i: int) -> None:
        case = cases[i % len(cases)]
        with cp.cuda.Stream(non_blocking=True) as stream:
            arrays, options = on_gpu(cp, case)
            for _ in range(20):
                out = cufa.flash_decode(*arrays, **options, schedule=("fixed", "balanced")[i % 2])
            stream.synchronize()
            case.check(out.get())

    in_threads(work, 8)
