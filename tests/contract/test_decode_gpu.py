"""Decoding on a GPU: calls on CuPy, NumPy and torch arrays, repeats, sinks, streams, graphs. Every kernel and config:
test_decode.py. What is refused, and who shares a workspace: kernels/test_decode_device.py, test_decode_workspace.py."""

from __future__ import annotations

import numpy as np
import pytest
from backends import GPU
from decode_kernel_support import cache_of, operands_of, plan_of, served
from decode_support import make_case, numbers_of_heads, on_gpu
from held_stream import hold
from support import poisoned_like

import cufa
from cufa.calls import decode as api
from cufa.kernels import kernels_of

pytestmark = pytest.mark.gpu

LENGTHS = [700, 0, 1, 257, 64]


def check(cp, case, layout="bhsd", **changes):
    arrays, options = on_gpu(cp, case, layout, **changes)
    out, lse = cufa.flash_decode(*arrays, **options, return_lse=True)
    assert isinstance(out, cp.ndarray) and isinstance(lse, cp.ndarray)
    case.check(out.get(), lse.get(), layout)
    return arrays, options, out


# --- Results and places -----------------------------------------------------------------------------------


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


# --- Streams and graphs -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kernel", kernels_of("decode"))
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
    before = set(workspace._capture_workspaces)
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
    assert (
        len(set(workspace._capture_workspaces) - before) == 1
    )  # of both lengths and all launches of the capture


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
