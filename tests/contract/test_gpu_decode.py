"""Decode kernels on a GPU: every kernel of the registry under every config, against float64."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from decode_kernel_support import assert_spans, operands_of, plan_of, served, splits
from decode_support import make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from support import in_threads

from cufa import flash_decode
from cufa.kernels import kernels_of
from cufa.plan.planner import make_plan

pytestmark = pytest.mark.gpu

DECODE_KERNELS = kernels_of("decode")
PAGE_SIZES = (1, 3, 16, 64, 128, 256)


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def device(cp):
    from cufa.run.cuda import backend as cuda

    return cuda.current_device()


def run(cp, device, case, kernel, num_splits=None, config=None):
    """(plan, operands): decoded once, and right."""
    from cufa.run.cuda import backend as cuda

    plan = plan_of(case, kernel, num_splits, config, device)
    operands = operands_of(case, cp.asarray)
    cuda.run(plan, operands)
    case.check(operands["out"].get(), operands["lse"].get())
    return plan, operands


def dtypes(kernel):
    return [(d, "fp8" in kernel) for d in DECODE_KERNELS[kernel].dtypes]


KERNELS = pytest.mark.parametrize("kernel", DECODE_KERNELS)


ROWS = (
    {"heads": 2, "kv_heads": 2},
    {"heads": 8, "kv_heads": 1, "tokens": 3},
    {"heads": 80, "kv_heads": 1},
)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@KERNELS
def test_every_config(cp, device, kernel, head_dim):
    """One row, a group of 8 with several tokens, and more rows than a block takes; merged in the same launch
    and in one of its own."""
    from cufa.run.cuda import backend as cuda

    todo = []
    for (dtype, fp8), rows in itertools.product(dtypes(kernel), ROWS):
        case = make_case([700, 0, 1, 129, 2048], head_dim=head_dim, dtype=dtype, fp8=fp8, **rows)
        for config in served(device, kernel, head_dim):
            todo += [(case, plan_of(case, kernel, None, c, device)) for c in {config, config.without_fold()}]
    with ThreadPoolExecutor(8) as pool:  # compiles side by side
        list(pool.map(lambda job: cuda.prepare(job[1]), todo))
    for case, plan in todo:
        run(cp, device, case, kernel, None, plan.config)
        run(cp, device, case, kernel, splits(kernel, 5), plan.config)


@KERNELS
def test_every_number_of_splits(cp, device, kernel):
    """From one to as many as there are tiles, and beyond: the answer does not depend on it."""
    case = make_case([1000, 64, 1], fp8="fp8" in kernel, head_dim=64)
    config = served(device, kernel, 64)[0]
    tiles = -(-1000 // config.block_kv)
    for num_splits in range(1, tiles + 3):
        run(cp, device, case, kernel, splits(kernel, num_splits))


@pytest.mark.sampled(dated=6)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@KERNELS
def test_pages_and_appended_tokens(cp, device, kernel, page_size):
    if DECODE_KERNELS[kernel].uses_copy_engine and page_size % 16:
        pytest.skip("boxes do not fit such pages")
    case = make_case(
        [700, 2, 333, 65], tokens=2, new=2, page_size=page_size, fp8="fp8" in kernel, head_dim=128
    )  # fmt: skip
    served(device, kernel, 128)
    _, operands = run(cp, device, case, kernel)
    run(cp, device, case, kernel, splits(kernel, 3))
    table, stored = case.options["block_table"], operands["v_cache"].get()
    for b, n in enumerate(case.lengths):
        for i in range(2):
            page, row = divmod(n - 2 + i, page_size)
            np.testing.assert_array_equal(stored[table[b, page], :, row], case.options["v_new"][b, :, i])


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "rows",
    [
        {"heads": 8, "kv_heads": 2, "tokens": 16, "new": 16},
        {"heads": 40, "tokens": 5, "new": 7, "kv_heads": 1},
    ],
    ids=["16_tokens", "several_blocks_of_rows"],
)
@KERNELS
def test_many_tokens_and_many_appended(cp, device, kernel, rows, page_size):
    """As many query tokens as there may be; more new tokens than one block of rows has to append."""
    case = make_case([300, 16, 70], head_dim=64, page_size=page_size, fp8="fp8" in kernel, **rows)
    served(device, kernel, 64)
    for num_splits in (None, 3):
        _, operands = run(cp, device, case, kernel, num_splits)
        for cache, new in ((operands["k_cache"], "k_new"), (operands["v_cache"], "v_new")):
            appended, stored = case.options[new], cache.get()
            table, count = case.options.get("block_table"), appended.shape[2]
            for b, i in np.ndindex(len(case.lengths), count):
                position = case.lengths[b] - count + i
                at = (b, position) if table is None else (table[b, position // 16], position % 16)
                np.testing.assert_array_equal(stored[at[0], :, at[1]], appended[b, :, i])


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
    out, lse = flash_decode(*map(cp.asarray, arrays), **options, return_lse=True)
    case.check(out.get(), lse.get())


@KERNELS
def test_lengths_around_tiles(cp, device, kernel):
    """One key more or less than a whole number of tiles, of a ring's tiles, of boxes."""
    lengths = sorted({max(0, n + d) for n in (0, 16, 32, 64, 128, 256) for d in (-1, 0, 1)})
    for tokens in (1, 4):
        case = make_case(lengths, tokens=tokens, fp8="fp8" in kernel, head_dim=64)
        served(device, kernel, 64)
        run(cp, device, case, kernel)
        run(cp, device, case, kernel, splits(kernel, 2))


@pytest.mark.sampled(dated=8)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 72, 80, 96, 136, 192])
@KERNELS
def test_other_head_dims(cp, device, kernel, head_dim):
    fp8 = "fp8" in kernel
    if fp8 and head_dim % 16:
        pytest.skip("e4m3 takes multiples of 16")
    case = make_case([300, 17], tokens=2, new=1, fp8=fp8, head_dim=head_dim)
    served(device, kernel, head_dim)
    run(cp, device, case, kernel)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize("kernel", ["decode_split", "decode_balanced"])
def test_narrow_copies(cp, device, kernel, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    from cufa.run.cuda import backend as cuda

    case = make_case([300, 17], tokens=2, head_dim=64)
    extra = alignment // 2
    operands = operands_of(case, cp.asarray)
    for name in ("q", "k_cache", "v_cache", "out"):
        x = operands[name]
        wide = cp.full((*x.shape[:3], x.shape[3] + extra), cp.nan, x.dtype)
        wide[..., extra:] = x
        operands[name] = wide[..., extra:]
    plan = plan_of(case, kernel, None, None, device)
    problem = dataclasses.replace(plan.problem, alignment=alignment)
    cuda.run(make_plan(problem, device, kernel=kernel), operands)
    case.check(operands["out"].get(), operands["lse"].get())


@KERNELS
def test_repeats_are_bit_identical_on_any_stream(cp, device, kernel):
    from cufa.run.cuda import backend as cuda

    case = make_case([3000, 5, 700, 64, 1, 2000], heads=8, fp8="fp8" in kernel, head_dim=64)
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

    spin = cp.RawKernel(
        'extern "C" __global__ void spin(long long n) { auto t = clock64(); while (clock64() - t < n); }',
        "spin",
    )
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
        spin((1,), (1,), (np.int64(1),))
        spin((1,), (1,), (np.int64(500_000_000),))
        for x in junk:
            x.fill(-1)
        del junk, x
        stream.begin_capture()
        for _ in range(3):
            for _, operands, binding in todo:
                binding.launch(cuda.addresses(operands))
        graph = stream.end_capture()
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
def test_spans_are_those_of_the_schedule(cp, device, kernel):
    from cufa.run.cuda import backend as cuda

    case = make_case([3000, 0, 700, 64, 1], heads=8, kv_heads=4, fp8="fp8" in kernel, head_dim=64)
    served(device, kernel, 64)
    for num_splits in (1, 3, 40):
        plan = plan_of(case, kernel, num_splits, None, device)
        assert_spans(plan, case.lengths, cuda.trace(plan, operands_of(case, cp.asarray)))


@KERNELS
def test_graph_replay_while_lengths_grow(cp, device, kernel):
    """Captured once, on another stream than it is replayed on; lengths change on the device."""
    from cufa.run.cuda import backend as cuda

    case = make_case([900, 700], fp8="fp8" in kernel, head_dim=64)
    served(device, kernel, 64)
    plan, operands = run(cp, device, case, kernel, None if "balanced" in kernel else 4)
    binding = cuda.Binding(cuda.prepare(plan), operands)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        binding.launch(cuda.addresses(operands))
        graph = stream.end_capture()
    for lengths in ([1, 0], [64, 65], [300, 129], [900, 700]):
        part = make_case([900, 700], fp8="fp8" in kernel, head_dim=64)
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
