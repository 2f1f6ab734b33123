"""flash_decode on CuPy arrays: streams, CUDA graphs, threads."""

from __future__ import annotations

import numpy as np
import pytest
from decode_support import make_case, on_gpu
from support import in_threads, poisoned_like

import cufa

pytestmark = pytest.mark.gpu

LENGTHS = [700, 0, 1, 257, 64]


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


def test_runs_on_the_current_stream_in_order(cp):
    """The call waits for what is queued before it on the stream, and does not wait for the GPU itself."""
    case = make_case(LENGTHS, page_size=16, head_dim=64)
    arrays, options = on_gpu(cp, case)
    lengths, right = cp.zeros_like(options["cache_seqlens"]), options.pop("cache_seqlens")
    cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
    spin = cp.RawKernel(
        'extern "C" __global__ void spin(long long n) { auto t = clock64(); while (clock64() - t < n); }',
        "spin",
    )
    spin((1,), (1,), (np.int64(1),))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
    cp.cuda.Device().synchronize()
    with stream:
        spin((1,), (1,), (np.int64(200_000_000),))
        lengths[...] = right
        out = cufa.flash_decode(*arrays, **options, cache_seqlens=lengths)
        done_at_return = stream.done
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
    table, size = case.options.get("block_table"), cache.shape[2]
    return cache[b, :, position : position + 1] if table is None else cache[
        table[b, position // size], :, position % size : position % size + 1
    ]  # fmt: skip


def copy_prefixes(cache, source, case, lengths):
    table, size = case.options.get("block_table"), cache.shape[2]
    for b, n in enumerate(lengths):
        for position in range(n):
            at = (b, position) if table is None else (int(table[b, position // size]), position % size)
            cache[at[0], :, at[1]] = source[at[0], :, at[1]]


def make_view(case, q, lengths):
    """The same cache, other queries, and only so many tokens of it."""
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
