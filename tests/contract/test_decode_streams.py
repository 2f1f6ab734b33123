"""Decoding on a GPU: streams, CUDA graphs, threads, and repeats whose bits are the same."""

from __future__ import annotations

import numpy as np
import pytest
from backends import GPU
from decode_kernel_support import cache_of, merged_by_a_launch, operands_of, plan_of, served
from decode_support import make_case, on_gpu
from held_stream import hold
from hypothesis import given, settings
from hypothesis import strategies as st
from support import in_threads, poisoned_like

import cufa
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
        plan = plan_of(case, kernel, 10, merged_by_a_launch(plan.config), device)
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
