"""ALiBi and sinks in decoding on a GPU: every kernel of the registry under every config, and the calls, against
float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from decode_kernel_support import operands_of, plan_of, served, splits
from decode_scores_support import assert_right, hidden, numbers_of_heads
from decode_support import make_case, on_gpu

import cufa
from cufa import masks
from cufa.kernels import kernels_of
from cufa.problem.options import decode_mask

pytestmark = pytest.mark.gpu

DECODE_KERNELS = kernels_of("decode")
KERNELS = pytest.mark.parametrize("kernel", DECODE_KERNELS)
LENGTHS = [700, 0, 1, 129, 2048]
ROWS = ({"heads": 8, "kv_heads": 1, "tokens": 3}, {"heads": 80, "kv_heads": 1})


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def device(cp):
    from cufa.run.cuda import backend as cuda

    return cuda.current_device()


def case_of(kernel, few, lengths=LENGTHS, **options):
    heads = options.setdefault("heads", 4)
    dtype = DECODE_KERNELS[kernel].dtypes[-1]
    of_heads = numbers_of_heads(few, len(lengths), heads) if few else {}
    return make_case(lengths, dtype=dtype, fp8="fp8" in kernel, **options, **of_heads)


def run_all(cp, device, todo):
    """(case, kernel, num_splits, config), compiled side by side."""
    from cufa.run.cuda import backend as cuda

    plans = []
    for case, *how in todo:
        mask = decode_mask(case.options.get("window"), case.options.get("mask"))
        plans.append(plan_of(case, *how, device, mask=mask, softcap=case.options.get("softcap")))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cuda.prepare, plans))
    for (case, *_), plan in zip(todo, plans, strict=True):
        operands = operands_of(hidden(case, plan.problem.mask), cp.asarray)
        cuda.run(plan, operands)
        assert_right(case, operands["out"].get(), operands["lse"].get())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@KERNELS
def test_every_config(cp, device, kernel, head_dim):
    """A group of 8 with several tokens, and more rows than a block takes; merged in one launch, in two and in
    clusters."""
    todo = []
    for rows in ROWS:
        case = case_of(kernel, "both", head_dim=head_dim, **rows)
        for config in served(device, kernel, head_dim):
            for found in {config, config.without_fold()} if not config.cluster_merge else {config}:
                todo += [(case, kernel, n, found) for n in (1, splits(kernel, 5))]
    run_all(cp, device, todo)


@pytest.mark.parametrize("few", ["sink", "alibi", "alibi_of_batch"])
@KERNELS
def test_one_without_the_other(cp, device, kernel, few):
    """Appended to, softcapped, in a window; and neither of the three."""
    config = served(device, kernel, 64)[0]
    changed = case_of(
        kernel,
        few,
        [700, 2, 129, 2048],
        head_dim=64,
        tokens=2,
        new=2,
        page_size=16,
        softcap=3.0,
        window=(300, 0),
    )
    plain = case_of(kernel, few, head_dim=64)
    run_all(
        cp, device, [(case, kernel, splits(kernel, n), config) for case in (changed, plain) for n in (1, 5)]
    )


@pytest.mark.parametrize(
    "mask", [masks.streaming(4, 300), masks.streaming(200, 60), masks.prefix(500)], ids=str
)
@KERNELS
def test_first_keys(cp, device, kernel, mask):
    """That a window does not hide, in pages and appended to; what nobody sees is NaN. With a sink, and without."""
    todo = []
    for config in served(device, kernel, 64):
        for few in (None, "sink"):
            case = case_of(
                kernel, few, [700, 2, 129, 2048], head_dim=64, tokens=2, new=2, page_size=16, mask=mask
            )
            todo += [(case, kernel, n, config) for n in (1, splits(kernel, 5))]
    run_all(cp, device, todo)


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
@pytest.mark.parametrize("few", ["sink", "alibi_of_batch", "both"])
def test_calls(cp, few, schedule):
    """On CuPy arrays, as seen before, with numbers on the host, and on NumPy arrays; the same bits each time."""
    case = case_of("decode_split", few, head_dim=64, tokens=2)
    arrays, options = on_gpu(cp, case, schedule=schedule)
    calls = [cufa.flash_decode(*arrays, **options, return_lse=True) for _ in range(3)]
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = case.options[name]
    calls.append(cufa.flash_decode(*arrays, **options, return_lse=True))
    given, there = case.arguments(schedule=schedule)
    found = cufa.flash_decode(*given, **there, return_lse=True, device="cuda")
    assert_right(case, *found)
    for call in calls:
        for x, first in zip(call, found, strict=True):
            np.testing.assert_array_equal(x.get(), first)


def test_numbers_that_change_between_replays(cp):
    """A graph reads them where they are."""
    case = case_of("decode_split", "both", head_dim=64)
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
