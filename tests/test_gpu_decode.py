"""Decode kernels on a GPU: every kernel of the registry under every config, against float64."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from decode_kernel_support import assert_pieces, configs, operands_of, plan_of
from decode_support import make_case

from cufa.decode.plan import make_decode_plan
from cufa.kernels import DECODE_KERNELS
from cufa.kernels.decode import without_fold

pytestmark = pytest.mark.gpu

PAGE_SIZES = (1, 3, 16, 64, 128, 256)


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def device(cp):
    from cufa.backends import cuda

    return cuda.current_device()


def run(cp, device, case, kernel, num_splits=None, config=None):
    """(plan, operands): decoded once, and right."""
    from cufa.backends import cuda_decode

    plan = plan_of(case, kernel, num_splits, config, device)
    operands = operands_of(case, cp.asarray)
    cuda_decode.run(plan, operands)
    case.check(operands.out.get(), operands.lse.get())
    return plan, operands


def served(device, kernel, case, head_dim):
    spec = DECODE_KERNELS[kernel]
    if not spec.runs_on(device.arch.capability):
        pytest.skip(f"{kernel} does not run on {device.arch.name}")
    fitting = configs(kernel, head_dim, device)
    if not fitting:
        pytest.skip(f"no config of {kernel} fits head_dim {head_dim}")
    return fitting


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
    from cufa.backends import cuda

    todo = []
    for (dtype, fp8), rows in itertools.product(dtypes(kernel), ROWS):
        case = make_case([700, 0, 1, 129, 2048], head_dim=head_dim, dtype=dtype, fp8=fp8, **rows)
        for config in served(device, kernel, case, head_dim):
            todo += [(case, plan_of(case, kernel, None, c, device)) for c in {config, without_fold(config)}]
    with ThreadPoolExecutor(8) as pool:  # compiles side by side
        list(pool.map(lambda job: cuda.prepare(job[1]), todo))
    for case, plan in todo:
        run(cp, device, case, kernel, None, plan.config)
        run(cp, device, case, kernel, 5, plan.config)


@KERNELS
def test_every_number_of_splits(cp, device, kernel):
    """From one to as many as there are tiles, and beyond: the answer does not depend on it."""
    case = make_case([1000, 64, 1], fp8="fp8" in kernel, head_dim=64)
    config = served(device, kernel, case, 64)[0]
    tiles = -(-1000 // config.block_kv)
    for num_splits in range(1, tiles + 3):
        run(cp, device, case, kernel, num_splits)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@KERNELS
def test_pages_and_appended_tokens(cp, device, kernel, page_size):
    if DECODE_KERNELS[kernel].uses_copy_engine and page_size % 16:
        pytest.skip("boxes do not fit such pages")
    case = make_case(
        [700, 2, 333, 65], tokens=2, new=2, page_size=page_size, fp8="fp8" in kernel, head_dim=128
    )  # fmt: skip
    served(device, kernel, case, 128)
    _, operands = run(cp, device, case, kernel)
    run(cp, device, case, kernel, 3)
    table, stored = case.options["block_table"], operands.v_cache.get()
    for b, n in enumerate(case.lengths):
        for i in range(2):
            page, row = divmod(n - 2 + i, page_size)
            np.testing.assert_array_equal(stored[table[b, page], :, row], case.options["v_new"][b, :, i])


@KERNELS
def test_lengths_around_tiles(cp, device, kernel):
    """One key more or less than a whole number of tiles, of a ring's tiles, of boxes."""
    lengths = sorted({max(0, n + d) for n in (0, 16, 32, 64, 128, 256) for d in (-1, 0, 1)})
    for tokens in (1, 4):
        case = make_case(lengths, tokens=tokens, fp8="fp8" in kernel, head_dim=64)
        served(device, kernel, case, 64)
        run(cp, device, case, kernel)
        run(cp, device, case, kernel, 2)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 72, 80, 96, 136, 192])
@pytest.mark.parametrize("kernel", [k for k, s in DECODE_KERNELS.items() if not s.uses_copy_engine])
def test_other_head_dims(cp, device, kernel, head_dim):
    fp8 = "fp8" in kernel
    if fp8 and head_dim % 16:
        pytest.skip("e4m3 takes multiples of 16")
    case = make_case([300, 17], tokens=2, new=1, fp8=fp8, head_dim=head_dim)
    served(device, kernel, case, head_dim)
    run(cp, device, case, kernel)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize("kernel", ["decode_split", "decode_balanced"])
def test_narrow_copies(cp, device, kernel, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    from cufa.backends import cuda_decode

    case = make_case([300, 17], tokens=2, head_dim=64)
    extra = alignment // 2
    operands = operands_of(case, cp.asarray)
    for name in ("q", "k_cache", "v_cache", "out"):
        x = getattr(operands, name)
        wide = cp.full((*x.shape[:3], x.shape[3] + extra), cp.nan, x.dtype)
        wide[..., extra:] = x
        setattr(operands, name, wide[..., extra:])
    plan = plan_of(case, kernel, None, None, device)
    problem = dataclasses.replace(plan.problem, alignment=alignment)
    cuda_decode.run(make_decode_plan(problem, device, kernel=kernel), operands)
    case.check(operands.out.get(), operands.lse.get())


@KERNELS
def test_repeats_are_bit_identical_on_any_stream(cp, device, kernel):
    from cufa.backends import cuda_decode

    case = make_case([3000, 5, 700, 64, 1, 2000], heads=8, fp8="fp8" in kernel, head_dim=64)
    served(device, kernel, case, 64)
    plan, operands = run(cp, device, case, kernel)
    binding = cuda_decode.bind(plan, operands)
    first = operands.out.get().view(np.uint8)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [[cp.empty_like(operands.out) for _ in range(20)] for _ in streams]
    for i in range(20):
        for stream, mine in zip(streams, outs, strict=True):
            operands.out = mine[i]
            with stream:
                binding.launch(*cuda_decode.addresses(operands))
    cp.cuda.runtime.deviceSynchronize()
    for out in (x for mine in outs for x in mine):
        np.testing.assert_array_equal(out.get().view(np.uint8), first)


@KERNELS
def test_pieces_are_those_of_the_schedule(cp, device, kernel):
    from cufa.backends import cuda_decode

    case = make_case([3000, 0, 700, 64, 1], heads=8, kv_heads=4, fp8="fp8" in kernel, head_dim=64)
    served(device, kernel, case, 64)
    for num_splits in (1, 3, 40):
        plan = plan_of(case, kernel, num_splits, None, device)
        assert_pieces(plan, case.lengths, cuda_decode.trace(plan, operands_of(case, cp.asarray)))


@KERNELS
def test_graph_replay_while_lengths_grow(cp, device, kernel):
    """Captured once, on another stream than it is replayed on; lengths change on the device."""
    from cufa.backends import cuda_decode

    case = make_case([900, 700], fp8="fp8" in kernel, head_dim=64)
    served(device, kernel, case, 64)
    plan, operands = run(cp, device, case, kernel, None if "balanced" in kernel else 4)
    binding = cuda_decode.bind(plan, operands)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        binding.launch(*cuda_decode.addresses(operands))
        graph = stream.end_capture()
    for lengths in ([1, 0], [64, 65], [300, 129], [900, 700]):
        part = make_case([900, 700], fp8="fp8" in kernel, head_dim=64)
        part.options["cache_seqlens"] = np.array(lengths, np.int32)
        part.lengths = lengths
        operands.cache_seqlens[:] = cp.asarray(part.options["cache_seqlens"])
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(3):
            operands.out.fill(float("nan"))
            cp.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
        stream.synchronize()
        part.check(operands.out.get(), operands.lse.get())
