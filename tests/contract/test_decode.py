"""The contract of decoding: out and lse within decode_support.Case.bound of float64 for every kernel, number of splits,
length, page size and cache dtype; new tokens are stored and nothing else in the caches changes; memory that no sequence
uses, and keys that no token sees, hold NaN; the spans of each thread block are the schedule's.

Lengths, pages, tokens and masks: test_decode_shapes.py; splits and shares: test_decode_cuts.py. Executed kernels run in
checked mode: a race, a deadlock or an access out of range fails the test, too.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from backends import CPU, GPU, backends
from decode_contract import BOTH, CASES, PAGE_SIZES, SCHEDULES, check, check_call, each, of_kernel
from decode_kernel_support import cache_of, merged_by_a_launch, operands_of, plan_of, served, splits
from decode_support import Case, make_case, numbers_of_heads, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import of_today

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig, kernels_of
from cufa.plan.planner import make_plan
from cufa.problem.problem import Kept
from cufa.run.emulate.calls import Execution, run_plan
from cufa.schedule.decode import num_tiles

H200 = Device.typical("sm_90")


# --- Every kernel -----------------------------------------------------------------------------------------

SOFTCAPS = {"decode_balanced": 1.5, "decode_split_tma_fp8": 2.0}
#: Numbers of splits, each with what changes scores: those of one list share a build, or two.
SCORES = {
    "none": [(1, {}), (2, {}), (3, {}), (7, {})],
    "window": [(n, {"window": (left, 0)}) for left, n in zip((0, 1, 15, 16, 100), (2, 3, 1, 7, 4), strict=True)],
    "first keys": [
        (3, {"mask": masks.streaming(4, 60)}), (7, {"mask": masks.streaming(130, 20)}),
        (2, {"mask": masks.streaming(10_000, 3)}), (1, {"mask": masks.streaming(0, 100)}),
        (4, {"mask": masks.prefix(200)}),
    ],
    "chunks": [(n, {"mask": masks.chunks(size)}) for n, size in ((3, 64), (7, 50), (1, 1), (2, 10_000))],
    "exempt tokens of each sequence": [
        (3, {"mask": lambda n: masks.streaming(np.resize([4, 0, 500, 130], len(n)), 60)}),
        (2, {"mask": lambda n: masks.prefix(np.resize([0, 1000, 3, 70], len(n)))}),
        (7, {"mask": lambda n: masks.global_window(np.maximum(n - 2, 0), 20, 0)}),
        (1, {"mask": masks.global_window(3, 40, 0)}), (4, {"mask": masks.streaming(np.array([90]), 3)}),
    ],
    "alibi, sink": [(1, {}), (3, {"window": (100, 0)}), (7, {"window": (40, 0)})],
}  # fmt: skip


@pytest.mark.sampled(each="scores")
@pytest.mark.parametrize("scores", SCORES)
@each("emulate", kernels=CASES)
def test_executed_kernels(backend, kernel, scores):
    """Whatever the number of splits; the workspace serves two launches in a row."""
    made, parts = CASES[kernel], 0
    few = of_today(("both", "sink", "alibi", "alibi_of_batch"), f"few {kernel}", fixed=0)
    for of_heads in few if scores == "alibi, sink" else [None]:
        more = numbers_of_heads(of_heads, len(made["lengths"]), made.get("heads", 4)) if of_heads else {}
        more["softcap"] = None if scores == "none" else SOFTCAPS.get(kernel)
        for num_splits, changes in SCORES[scores]:
            if callable(changes.get("mask")):
                changes = {"mask": changes["mask"](np.array(made["lengths"]))}
            case = make_case(**made, **more, **changes)
            done = check(backend, case, kernel, num_splits, launches=1 + (num_splits == 2))
            parts = max(parts, int(done.records["q_block"].max()) + 1)
    assert parts > 1, "nothing was merged"


ROWS = {
    "one row": {"heads": 2, "kv_heads": 2},
    "a group of 8, several tokens": {"heads": 8, "kv_heads": 1, "tokens": 3},
    "more rows than a block takes": {"heads": 80, "kv_heads": 1},
}


@pytest.mark.parametrize("few", [None, "both"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@each("gpu")
def test_every_config(backend, kernel, head_dim, few):
    """Merged in the same launch, in one of its own and in clusters; the first config also with ALiBi and sinks."""
    from cufa.run.cuda import backend as cuda

    spec, lengths, todo = kernels_of("decode")[kernel], [700, 0, 1, 129, 2048], []
    for dtype, rows in itertools.product(spec.dtypes, ROWS.values()):
        of_heads = numbers_of_heads(few, len(lengths), rows["heads"]) if few else {}
        case = make_case(lengths, head_dim=head_dim, fp8=cache_of(kernel), dtype=dtype, **rows, **of_heads)
        for config in served(backend.device, kernel, head_dim)[: 1 if few else None]:
            kinds = {config} if config.cluster_merge else {config, merged_by_a_launch(config)}
            todo += [(case, n, found) for found in kinds for n in (1, 5)]
    plans = [plan_of(case, kernel, splits(kernel, n), config, backend.device) for case, n, config in todo]
    with ThreadPoolExecutor(8) as pool:  # compiles side by side
        list(pool.map(cuda.prepare, plans))
    for case, n, config in todo:
        check(backend, case, kernel, n, config=config)
        check(backend, case, kernel, None, config=config)


@pytest.mark.parametrize(
    "mask",
    [
        masks.streaming(4, 300), masks.streaming(200, 60), masks.prefix(500), masks.chunks(100), masks.chunks(1024),
        masks.streaming(np.array([900, 0, 3, 64]), 60), masks.prefix(np.array([0, 5, 100, 1000])),
        masks.global_window(np.array([0, 2, 128, 2100]), 60, 0),
    ],
    ids=str,
)  # fmt: skip
@each("gpu")
def test_exempt_tokens_and_chunks(backend, kernel, mask):
    """In pages and appended to. With a sink, and without."""
    for config, few, n in itertools.product(served(backend.device, kernel, 64), (None, "sink"), (1, 5)):
        of_heads = numbers_of_heads(few, 4, 4) if few else {}
        more = {"head_dim": 64, "tokens": 2, "new": 2, "page_size": 16, "mask": mask}
        case = make_case([700, 2, 129, 2048], **more, **of_kernel(kernel), **of_heads)
        check(backend, case, kernel, n, config=config)


# --- The public call --------------------------------------------------------------------------------------


@pytest.mark.sampled(on="gpu", dated=4, pairs=[("cache", "page_size")])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("cache", ["float16", "bfloat16", "float32", "float64", "fp8"])
@backends("cpu", "gpu")
def test_a_call(backend, cache, page_size, layout):
    if backend is GPU and cache in ("float32", "float64"):
        pytest.skip("decoding on a GPU takes 16 bits")
    dtype, fp8 = ("bfloat16", True) if cache == "fp8" else (cache, False)
    case = make_case([700, 0, 1, 70], tokens=2, dtype=dtype, fp8=fp8, page_size=page_size, head_dim=64)
    for how in ({}, {"num_splits": 3}, {"schedule": "balanced"}):
        check_call(backend, case, layout, **how)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", [0, 3, 16, 128])
@pytest.mark.parametrize("fp8", BOTH)
@backends("cpu", "gpu")
def test_append_writes_the_callers_caches(backend, fp8, page_size, layout):
    """Once appended, tokens are part of the cache."""
    case = make_case(
        [70, 2, 300], tokens=2, new=2, page_size=page_size, fp8=fp8, dtype="bfloat16", head_dim=64
    )
    for schedule in ("fixed", "balanced"):
        arrays, options = check_call(backend, case, layout, schedule=schedule)
        lengths = options["cache_seqlens"]
        np.testing.assert_array_equal(backend.host(lengths), case.options["cache_seqlens"])
        options |= {"cache_seqlens": lengths + 2, "k_new": None, "v_new": None}
        case.check(backend.host(cufa.flash_decode(*arrays, **options)), None, layout)


@backends("cpu", "gpu")
def test_without_any_room_the_sink_is_all(backend):
    q, cache = (backend.array(np.ones((2, 4, n, 64), np.float16)) for n in (1, 0))
    sink = backend.array(np.arange(4, dtype=np.float32))
    out, lse = cufa.flash_decode(q, cache, cache, sink=sink, return_lse=True, device=backend.call_device)
    assert not backend.host(out).any()
    np.testing.assert_array_equal(backend.host(lse)[..., 0], [[0, 1, 2, 3]] * 2)


@each("emulate", "gpu", kernels=["decode_split", "decode_balanced_tma"])
def test_full_caches_under_numbers_of_each_sequence(backend, kernel):
    """The host knows all lengths, but not how many tiles each sequence has."""
    numbers = np.array([4, 300, 0])
    for mask in (masks.streaming(numbers, 60), masks.global_window(numbers, 100, 0), masks.chunks(130)):
        case = make_case([500] * 3, capacity=500, head_dim=64, mask=mask)
        case.options["cache_seqlens"] = None
        for num_splits in (1, 3):
            check(backend, case, kernel, num_splits)


@pytest.mark.parametrize("schedule", ["auto", "fixed", "balanced"])
@backends("cpu", "gpu")
def test_numbers_of_each_sequence_are_read_by_every_call(backend, schedule):
    """Where the backend has them. On a GPU, their owner may change them between calls."""
    for make in (masks.prefix, lambda n: masks.streaming(n, 20), lambda n: masks.global_window(n, 20, 0)):
        numbers = backend.array(np.zeros(3, np.int32))
        for values in ([300, 0, 70], [3, 200, 400]):
            numbers[:] = backend.array(np.array(values, np.int32))
            case = make_case([500, 333, 0], tokens=2, head_dim=64, mask=make(np.array(values)))
            assert case.expected is not None and case.bound > 0  # before the mask is on a GPU
            case.options["mask"] = make(numbers)
            check_call(backend, case, schedule=schedule, num_splits=None if schedule == "auto" else 3)


# --- Anything ---------------------------------------------------------------------------------------------


#: What a call may be; on a GPU a few builds of each schedule.
ANY = {
    "cpu": {
        "heads": [(1, 1), (2, 1), (4, 2), (3, 3), (8, 2)], "new": [0, 0, 1, 3], "tokens": [1, 1, 2, 5, 16],
        "dtype": ["float16", "bfloat16", "float32", "float64"], "fp8": BOTH, "page_size": PAGE_SIZES,
        "scale": [None, 0.0, 0.7], "head_dim": [8, 24], "kernel": SCHEDULES["cpu"],
        "num_splits": [None, 1, 2, 3, 7, 30],
    },
    "gpu": {
        "heads": [(1, 1), (2, 2), (3, 3)], "new": range(1, 17), "tokens": range(2, 17), "page_size": [0, 16],
        "head_dim": [64], "kernel": ["decode_split_tma", "decode_balanced_tma"],
        "num_splits": [None, 1, 2, 3, 7, 20, 100],
    },
}  # fmt: skip


@backends("cpu", "gpu")
@given(data=st.data())
@settings(max_examples=75)
def test_anything(backend, data):
    drawn = {name: data.draw(st.sampled_from(x), label=name) for name, x in ANY[backend.name].items()}
    kernel, num_splits = drawn.pop("kernel"), drawn.pop("num_splits")
    drawn["heads"], drawn["kv_heads"] = drawn["heads"]
    lengths = st.lists(st.integers(0, 70 if backend is CPU else 700), min_size=1, max_size=5)
    made = [n + drawn["new"] for n in data.draw(lengths, label="lengths")]
    case = make_case(made, **drawn, seed=data.draw(st.integers(0, 99)))
    config = None
    if backend is CPU:
        sizes = st.sampled_from([1, 4, 16]), st.sampled_from([1, 5, 8, 32])
        config = TileConfig(*map(data.draw, sizes), num_warps=0)
    check(backend, case, kernel, num_splits, config=config)


#: Kernels are compiled for each of these; what else a call may be is drawn.
VARIANTS = [
    {"dtype": "float16"},
    {"dtype": "bfloat16", "tokens": 3},
    {"dtype": "bfloat16", "paged": True},
    {"dtype": "float16", "paged": True, "new": 2, "tokens": 2},
    {"dtype": "float16", "new": 1},
    {"dtype": "bfloat16", "fp8": True, "paged": True, "new": 1},
    {"dtype": "float16", "fp8": True, "tokens": 2},
]


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@backends("emulate")
def test_any_call(backend, variant, arch):
    if variant.get("fp8") and arch == "sm_80":
        pytest.skip("e4m3 is converted by instructions of sm_89 and later")
    fixed, new = {n: x for n, x in variant.items() if n != "paged"}, variant.get("new", 0)
    how = st.one_of(
        st.just({}),
        st.fixed_dictionaries({"num_splits": st.integers(1, 6)}),
        st.fixed_dictionaries({"algorithm": st.just("balanced"), "num_splits": st.integers(1, 12)}),
    )
    lengths = st.sampled_from((0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200))

    @given(
        lengths=st.lists(lengths, min_size=1, max_size=4),
        page_size=st.sampled_from([1, 3, 16, 64, 128] if variant.get("paged") else [0]),
        heads=st.sampled_from([(1, 1), (4, 2), (8, 2), (16, 1)]),
        layout=st.sampled_from(["bhsd", "bshd"]),
        scale=st.sampled_from([None, 0.0, 0.3]),
        seed=st.integers(0, 99),
        how=how,
    )
    @settings(max_examples=12)
    def run(lengths, page_size, heads, layout, scale, seed, how):
        case = make_case(
            [n + new for n in lengths], heads=heads[0], kv_heads=heads[1], head_dim=64, page_size=page_size,
            scale=scale, seed=seed, **fixed,
        )  # fmt: skip
        check(backend, case, arch=arch, layout=layout, execution=Execution("plain"), trace=False, **how)

    run()


# --- Lengths that the host cannot check ------------------------------------------------------------------------


def run_with(backend, case: Case, lengths: list[int]):
    """Operands after a run whose lengths differ from the lengths that the call checked: on a GPU, their owner may
    change them."""
    problem, operands = prepare(case, on_gpu=True, place=backend.array)
    operands["cache_seqlens"] = backend.array(np.array(lengths, np.int32))
    backend.run(make_plan(problem, backend.device), operands, False, None)
    return {name: None if x is None else backend.host(x) for name, x in operands.items()}


@pytest.mark.parametrize("page_size", [0, 16])
@backends("emulate", "gpu")
def test_lengths_beyond_the_cache_count_as_its_capacity(backend, page_size):
    case = make_case([64, 64], capacity=64, page_size=page_size, head_dim=64)
    operands = run_with(backend, case, [2**31 - 1, 65])
    case.check(operands["out"], operands["lse"])


@pytest.mark.parametrize("page_size", [0, 16])
@backends("emulate", "gpu")
def test_new_tokens_without_room_are_dropped(backend, page_size):
    full, case = (make_case([64, 64], capacity=64, page_size=page_size, head_dim=64) for _ in range(2))
    case.options["cache_seqlens"] = np.array([60, 60], np.int32)
    case.options["k_new"] = case.options["v_new"] = np.full((2, 2, 2, 64), 7, np.float16)
    operands = run_with(backend, case, [2**31 - 1, 64])
    full.check(operands["out"], operands["lse"])
    full.assert_stored(operands)


@pytest.mark.emulate
@pytest.mark.parametrize("wild", [-7, 10**6])
def test_a_wild_entry_of_the_block_table_stays_within_the_cache(wild):
    case = make_case([200, 100], head_dim=64, page_size=16)
    operands = operands_of(case)
    operands["block_table"] = operands["block_table"].copy()
    operands["block_table"][0, 3] = wild
    run = run_plan(plan_of(case, "decode_split", 2), operands, Execution("checked"), trace=False)
    assert not run.findings, "\n".join(map(str, run.findings))
    assert not np.isnan(operands["lse"][1]).any()


# --- Counters ---------------------------------------------------------------------------------------------


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("length", "scores", "keys"),
    [
        (512, {}, 512), (500, {"window": (0, 0)}, 4), (500, {"window": (99, 0)}, 100),
        (500, {"window": (300, 0)}, 308), (500, {"mask": masks.chunks(100)}, 100),
        (500, {"mask": masks.chunks(130)}, 116), (2048, {"mask": masks.streaming(4, 99)}, None),
    ],
    ids=str,
)  # fmt: skip
def test_counters(length, scores, keys):
    """Each key that is read is read once, whatever the query group; of a window, in groups of 16 keys, nothing of what
    lies before, of streaming no tile between. Rows of 128 bytes: no bank conflicts."""
    case = make_case([length], heads=8, kv_heads=1, head_dim=64, capacity=length, **scores)
    plan = plan_of(case, "decode_split_tma", 1)
    run = run_plan(plan, operands_of(case.hidden()), Execution("counted"), trace=False)
    if keys is None:
        keys = num_tiles(length, plan.config.block_kv, Kept(100, 4)) * plan.config.block_kv
        assert keys <= 256
    of_lengths = 4 * plan.launches[0].num_threads  # each thread reads its sequence's length
    counters = run.counters["decode_split"]
    assert int(counters["global_read_bytes"].sum()) - case.q.nbytes - of_lengths == 2 * 64 * 2 * keys
    assert int(counters["bank_conflicts"].sum()) == 0
