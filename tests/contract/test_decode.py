"""The contract of decoding: out and lse within decode_support.Case.bound of float64 for every kernel, number of splits,
length, page size and cache dtype; new tokens are stored and nothing else in the caches changes; memory that no sequence
uses, and keys that no token sees, hold NaN; the spans of each thread block are the schedule's.

Executed kernels run in checked mode: a race, a deadlock or an access out of range fails the test, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS, backends
from decode_kernel_support import assert_spans, cache_of, configs, operands_of, plan_of, served, splits
from decode_support import Case, make_case, numbers_of_heads, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import of_today

from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig, kernels_of
from cufa.kernels.decode import TWO_STAGES, items, row_blocks
from cufa.plan.planner import make_plan
from cufa.problem.options import decode_mask
from cufa.problem.problem import Kept
from cufa.run.emulate.calls import Execution, run_plan
from cufa.schedule.decode import num_tiles

#: Small tiles of the CPU path, so that small caches have edges.
SMALL = TileConfig(block_q=4, block_kv=8, num_warps=0)
SCHEDULES = {"cpu": ("decode_split", "decode_balanced"), "gpu": tuple(kernels_of("decode"))}
PAGE_SIZES = (0, 1, 3, 16, 64, 128, 256)
BOTH = (False, True)
H200, A100 = Device.typical("sm_90"), Device.typical("sm_80")


def check(backend, case: Case, kernel=None, num_splits=None, *, config=None, trace=None, **how):
    """Decoded once; with more than one split asked for, the shares of a balanced kernel are many enough."""
    trace = backend is EMULATE if trace is None else trace
    if backend is CPU:
        config = SMALL if config is None else config
    elif kernel is not None and num_splits is not None:
        num_splits = splits(kernel, num_splits)
    changed = {"window", "mask"} & case.options.keys()
    given = case.hidden() if changed else case
    done = backend.decode(given, kernel, num_splits, config=config, trace=trace, **how)
    case.check(done.out, done.lse)
    given.assert_stored(done.results)
    if trace:
        assert_spans(done.plan, case.lengths, done.records)
    return done


def each(*names: str, kernels=None):
    """Parametrise over backend and kernel: NumPy has one per schedule, a GPU all, the executor those named."""
    found = [
        pytest.param(backend, kernel, id=f"{backend}-{kernel}", marks=MARKS[backend.name])
        for backend in (CPU, EMULATE, GPU)
        if backend.name in names
        for kernel in (kernels or SCHEDULES[backend.name])
    ]
    return pytest.mark.parametrize(("backend", "kernel"), found)


def of_kernel(kernel: str) -> dict[str, object]:
    return {"fp8": cache_of(kernel), "dtype": kernels_of("decode")[kernel].dtypes[-1]}


# --- Every kernel -----------------------------------------------------------------------------------------

#: Executed: one build of each branch.
CASES = {
    # Pages of whole boxes, several tokens of which some are appended.
    "decode_split_tma": {"lengths": [2, 9, 150, 333], "tokens": 4, "new": 2, "head_dim": 64, "page_size": 16},
    # Odd pages; more appended than a window shows; a head dim with half a k16 step; merged in the same launch.
    "decode_balanced": {"lengths": [40, 333, 41, 150], "tokens": 2, "new": 40, "head_dim": 72, "page_size": 3},
    # 64 rows: warps share keys; merged by a second launch.
    "decode_balanced_tma": {"lengths": [150, 0, 1, 333], "heads": 40, "kv_heads": 1, "head_dim": 64},
    # Several blocks of rows, of which one stores what is appended.
    "decode_split": {
        "lengths": [20, 150, 333], "tokens": 4, "new": 20, "heads": 40, "kv_heads": 1, "head_dim": 64
    },
    "decode_split_tma_fp8": {
        "lengths": [0, 1, 150, 333], "tokens": 4, "head_dim": 128, "fp8": True, "dtype": "bfloat16"
    },
    "decode_split_fp8": {"lengths": [150, 2, 333], "head_dim": 80, "fp8": True, "new": 1, "page_size": 16},
    # Scales of tokens, appended in pages of whole boxes; of blocks, appended over their border; of pages.
    "decode_split_tma_fp8_scaled": {
        "lengths": [3, 150, 333], "head_dim": 64, "fp8": "token", "new": 3, "page_size": 16, "dtype": "bfloat16"
    },
    "decode_balanced_tma_fp8_scaled": {"lengths": [170, 5, 333], "head_dim": 128, "fp8": "block", "new": 5},
    "decode_split_fp8_scaled": {"lengths": [150, 9, 333], "head_dim": 80, "fp8": "block", "new": 9, "page_size": 3},
    "decode_balanced_fp8_scaled": {
        "lengths": [150, 0, 333], "tokens": 4, "heads": 40, "kv_heads": 1, "head_dim": 64, "fp8": "token"
    },
}  # fmt: skip
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
            kinds = {config} if config.cluster_merge else {config, config.without_fold()}
            todo += [(case, n, found) for found in kinds for n in (1, 5)]
    plans = [plan_of(case, kernel, splits(kernel, n), config, backend.device) for case, n, config in todo]
    with ThreadPoolExecutor(8) as pool:  # compiles side by side
        list(pool.map(cuda.prepare, plans))
    for case, n, config in todo:
        check(backend, case, kernel, n, config=config)
        check(backend, case, kernel, None, config=config)


@pytest.mark.parametrize("few", ["sink", "alibi", "alibi_of_batch"])
@each("gpu")
def test_one_without_the_other(backend, kernel, few):
    """Appended to, softcapped, in a window; and none of the three."""
    config = served(backend.device, kernel, 64)[0]
    changes = {"tokens": 2, "new": 2, "page_size": 16, "softcap": 3.0, "window": (300, 0)}
    for lengths, more in (([700, 2, 129, 2048], changes), ([700, 0, 1, 129, 2048], {})):
        of_heads = numbers_of_heads(few, len(lengths), 4)
        case = make_case(lengths, head_dim=64, **of_kernel(kernel), **more, **of_heads)
        for n in (1, 5):
            check(backend, case, kernel, n, config=config)


@pytest.mark.parametrize(
    "mask", [masks.streaming(4, 300), masks.streaming(200, 60), masks.prefix(500)], ids=str
)
@each("gpu")
def test_first_keys(backend, kernel, mask):
    """That a window does not hide, in pages and appended to. With a sink, and without."""
    for config, few, n in itertools.product(served(backend.device, kernel, 64), (None, "sink"), (1, 5)):
        of_heads = numbers_of_heads(few, 4, 4) if few else {}
        more = {"head_dim": 64, "tokens": 2, "new": 2, "page_size": 16, "mask": mask}
        case = make_case([700, 2, 129, 2048], **more, **of_kernel(kernel), **of_heads)
        check(backend, case, kernel, n, config=config)


# --- Splits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@backends("cpu")
def test_every_number_of_splits(backend, dtype, page_size):
    """1 to the number of tiles and beyond: the answer does not depend on it, beyond rounding."""
    case = make_case([101, 8, 64], tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 16):
        check(backend, case, "decode_split", num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@backends("cpu")
def test_every_number_of_shares(backend, dtype, page_size):
    """1 to one a tile, and more shares than tiles. Six query rows: two blocks of them."""
    case = make_case([51, 0, 9, 1, 16], heads=6, kv_heads=2, tokens=2, dtype=dtype, page_size=page_size)
    for num_splits in range(1, 60):
        check(backend, case, "decode_balanced", num_splits)


@each("gpu")
def test_every_number_of_splits_on_a_gpu(backend, kernel):
    case = make_case([1000, 64, 1], fp8=cache_of(kernel), head_dim=64)
    config = served(backend.device, kernel, 64)[0]
    for num_splits in range(1, -(-1000 // config.block_kv) + 3):
        check(backend, case, kernel, num_splits)


@each("cpu")
def test_splits_agree_to_rounding(backend, kernel):
    """In float64, where float32's rounding cannot hide a mistake."""
    case = make_case([97], dtype="float64")
    for num_splits in range(1, 14):
        done = check(backend, case, kernel, num_splits)
        np.testing.assert_allclose(done.out, case.expected[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("full", BOTH)
@pytest.mark.parametrize("name", ["decode_split_tma", "decode_split_tma_fp8"])
@backends("emulate")
def test_splits_merged_in_a_cluster(backend, name, full):
    """Whatever the number of blocks and of splits without keys; the same bits in every order. And with sequences that
    fill the cache, whose splits the host counts."""
    fp8 = "fp8" in name
    made = {"head_dim": 128 if fp8 else 64, "fp8": fp8, "dtype": "bfloat16" if fp8 else "float16"}
    config = configs(name, made["head_dim"])[fp8 or 1 if full else 0].merged_in_cluster()
    few = numbers_of_heads("both", 1 if full else 3, 4)
    if full:
        kinds = [
            make_case([420], capacity=420, window=(left, 0), softcap=0.7, **made) for left in (0, 64, 300)
        ]
        kinds += [make_case([500], capacity=500, mask=masks.streaming(130, 20), **few, **made)]
        for case in kinds:
            case.options["cache_seqlens"] = None
    else:
        kinds = [make_case([900, 3, 200], tokens=2, **made), make_case([1100, 3, 200], **made, **few)]
    for case, num_splits in itertools.product(kinds, (1, 2, 8)):
        outs = set()
        for order in ("ascending", 1):
            how = {"config": config, "execution": Execution("checked", order, "late", 1)}
            done = check(backend, case, name, num_splits, **how)
            outs.add((done.out.tobytes(), done.lse.tobytes()))
        assert len(outs) == 1
        assert [launch.cluster for launch in done.plan.launches] == [done.plan.num_splits]


@each("emulate", kernels=["decode_split_tma", "decode_balanced"])
def test_same_bits_in_every_order(backend, kernel):
    case = make_case(**CASES[kernel])
    first = check(backend, case, kernel, 4, execution=Execution("checked", copies="early", threads=1))
    for order in ("descending", 1, 2):
        again = check(backend, case, kernel, 4, execution=Execution("checked", order, "late", 2))
        for name, x in again.results.items():
            assert x.tobytes() == first.results[name].tobytes(), name


@each("emulate", kernels=["decode_split_tma", "decode_balanced_tma", "decode_balanced"])
def test_parts_merged_by_a_launch_of_their_own(backend, kernel):
    """When all parts have been left where they are kept; shares that end one item and begin another."""
    few = numbers_of_heads("both", 4, 4)
    config = dataclasses.replace(configs(kernel, 64)[0], fold_combine=False)
    for case in (make_case([150, 260, 90, 200], head_dim=64, **more) for more in ({}, few)):
        for number in (3, 5, 7):
            done = check(backend, case, kernel, number, config=config)
            assert len(done.plan.launches) == 2
            assert len(done.records) > items(done.plan.problem, done.plan.config)


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        ("decode_split_tma", TWO_STAGES),
        ("decode_split_tma", TWO_STAGES.merged_in_cluster()),
        ("decode_balanced_tma", TWO_STAGES),
    ],
    ids=["splits", "splits in a cluster", "shares"],
)
@backends("emulate")
def test_rings_of_two_stages(backend, kernel, config, head_dim):
    """As an H100 has them: each buffer is filled again and again, and one item follows another."""
    case = make_case([900, 3, 200], head_dim=head_dim, dtype="bfloat16")
    for number in (1, 2):
        check(backend, case, kernel, number, config=config, execution=Execution("checked", copies="late"))


@each("gpu")
def test_spans_are_those_of_the_schedule(backend, kernel):
    case = make_case([3000, 0, 700, 64, 1], heads=8, kv_heads=4, fp8=cache_of(kernel), head_dim=64)
    served(backend.device, kernel, 64)
    for num_splits in (1, 3, 40):
        check(backend, case, kernel, num_splits, trace=True)


# --- Lengths, pages, tokens, heads ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 63, 64, 65])
@each("cpu")
def test_lengths_around_tiles(backend, kernel, length, page_size):
    check(backend, make_case([length], page_size=page_size, dtype="float32"), kernel, 3)


@each("gpu")
def test_lengths_around_tiles_on_a_gpu(backend, kernel):
    """One key more or less than a whole number of tiles, of a ring's tiles, of boxes."""
    lengths = sorted({max(0, n + d) for n in (0, 16, 32, 64, 128, 256) for d in (-1, 0, 1)})
    served(backend.device, kernel, 64)
    for tokens, num_splits in itertools.product((1, 4), (None, 2)):
        case = make_case(lengths, tokens=tokens, fp8=cache_of(kernel), head_dim=64)
        check(backend, case, kernel, num_splits)


@pytest.mark.parametrize("fp8", BOTH)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@each("cpu")
def test_ragged(backend, kernel, page_size, fp8):
    """With default tiles as well, which pages of 3 do not divide."""
    lengths = [700, 0, 1, 255, 256, 257, 300, 13]
    case = make_case(lengths, page_size=page_size, fp8=fp8, dtype="bfloat16", seed=page_size)
    check(backend, case, kernel, 5)
    case.check(backend.decode(case, kernel).out)


@pytest.mark.sampled(on="gpu", dated=6)
@pytest.mark.parametrize("page_size", PAGE_SIZES[1:])
@each("gpu")
def test_pages_and_appended_tokens_on_a_gpu(backend, kernel, page_size):
    if kernels_of("decode")[kernel].uses_copy_engine and page_size % 16:
        pytest.skip("boxes do not fit such pages")
    served(backend.device, kernel, 128)
    case = make_case(
        [700, 2, 333, 65], tokens=2, new=2, page_size=page_size, fp8=cache_of(kernel), head_dim=128
    )  # fmt: skip
    for num_splits in (None, 3):
        check(backend, case, kernel, num_splits)


@pytest.mark.parametrize("fp8", BOTH)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("new", [1, 2, 5, 20])
@backends("cpu")
def test_appended_tokens(backend, new, page_size, fp8):
    case = make_case([new, 40, 64 + new, 15 + new], new=new, page_size=page_size, fp8=fp8, tokens=min(new, 3))
    for kernel in SCHEDULES["cpu"]:
        check(backend, case, kernel, 3)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "rows",
    [{"heads": 8, "kv_heads": 2, "tokens": 16, "new": 16}, {"heads": 40, "tokens": 5, "new": 7, "kv_heads": 1}],
    ids=["16_tokens", "several_blocks_of_rows"],
)  # fmt: skip
@each("gpu")
def test_many_tokens_and_many_appended(backend, kernel, rows, page_size):
    """As many query tokens as there may be; more new tokens than one block of rows has to append."""
    served(backend.device, kernel, 64)
    case = make_case([300, 16, 70], head_dim=64, page_size=page_size, fp8=cache_of(kernel), **rows)
    for num_splits in (None, 3):
        check(backend, case, kernel, num_splits)


@pytest.mark.parametrize("tokens", range(1, 17))
@backends("cpu")
def test_query_tokens(backend, tokens):
    """Causal among themselves; the first ones of a short sequence see nothing."""
    case = make_case([0, 1, tokens - 1, tokens, tokens + 1, 40], tokens=tokens, dtype="float32", seed=tokens)
    for kernel in SCHEDULES["cpu"]:
        check(backend, case, kernel, 4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 1), (16, 2), (32, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
@backends("cpu")
def test_grouped_heads(backend, heads, kv_heads, tokens):
    case = make_case([20, 41], heads=heads, kv_heads=kv_heads, tokens=tokens)
    for kernel in SCHEDULES["cpu"]:
        check(backend, case, kernel, 4)
        case.check(backend.decode(case, kernel).out)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("heads", [4, 24, 40])
@backends("emulate")
def test_many_query_rows(backend, heads, tokens):
    """Up to 640 rows of a key/value head: every height of tile, and several blocks of rows."""
    case = make_case([40, 0, 130], heads=heads, kv_heads=1, tokens=tokens, head_dim=64)
    for kernel, num_splits in ((None, None), ("decode_split_tma", 2), ("decode_balanced_tma", 7)):
        check(backend, case, kernel, num_splits, execution=Execution("plain"))


@backends("emulate")
def test_heads_and_tokens_of_every_block_of_rows(backend):
    """36 rows share keys: three blocks of 16, whose heads and tokens go on where the block before ended."""
    made = {**CASES["decode_split_tma"], "heads": 12, "kv_heads": 1, "tokens": 3}
    case = make_case(**made, window=(100, 0), **numbers_of_heads("both", 4, 12))
    done = check(backend, case, "decode_split_tma", 2, config=configs("decode_split_tma", 64)[0])
    assert row_blocks(done.plan.problem, done.plan.config) == 3


@pytest.mark.sampled(on="gpu", dated=8)
@pytest.mark.parametrize(
    ("backend", "kernel", "head_dim"),
    [(CPU, None, d) for d in (8, 40, 72, 128, 256)]
    + [
        pytest.param(EMULATE, kernel, d, marks=MARKS["emulate"], id=f"emulate-{kernel}-{d}")
        for kernel in ("decode_split_tma", "decode_balanced_tma")
        for d in (8, 40, 72, 128, 192, 256)
    ]
    + [
        pytest.param(GPU, kernel, d, marks=MARKS["gpu"], id=f"gpu-{kernel}-{d}")
        for kernel in SCHEDULES["gpu"]
        for d in (8, 16, 40, 72, 80, 96, 136, 192)
        if not ("fp8" in kernel and d % 16)
    ],
)
def test_head_dims(backend, kernel, head_dim):
    if backend is GPU:
        served(backend.device, kernel, head_dim)
        case = make_case([300, 17], tokens=2, new=1, fp8=cache_of(kernel), head_dim=head_dim)
        check(backend, case, kernel)
        return
    for fp8 in BOTH if backend is CPU else [False]:
        case = make_case([65, 3], head_dim=head_dim, fp8=fp8, page_size=16)
        check(backend, case, kernel or "decode_split", 2)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize("kernel", ["decode_split", "decode_balanced"])
@backends("gpu")
def test_narrow_copies(backend, kernel, alignment, cp):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    from cufa.run.cuda import backend as cuda

    case, extra = make_case([300, 17], tokens=2, head_dim=64), alignment // 2
    operands = operands_of(case, cp.asarray)
    for name in ("q", "k_cache", "v_cache", "out"):
        x = operands[name]
        wide = cp.full((*x.shape[:3], x.shape[3] + extra), cp.nan, x.dtype)
        wide[..., extra:] = x
        operands[name] = wide[..., extra:]
    plan = plan_of(case, kernel, None, None, backend.device)
    problem = dataclasses.replace(plan.problem, alignment=alignment)
    cuda.run(make_plan(problem, backend.device, kernel=kernel), operands)
    case.check(operands["out"].get(), operands["lse"].get())


# --- Windows, sinks, values -------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 3, 16])
@each("cpu")
def test_windows(backend, kernel, page_size):
    for left, (num_splits, softcap) in itertools.product((0, 1, 15, 16), ((1, None), (3, 2.0), (12, None))):
        made = {"tokens": 4, "new": 5, "page_size": page_size, "softcap": softcap}
        check(backend, make_case([5, 101, 64, 7], window=(left, 0), **made), kernel, num_splits)


@pytest.mark.parametrize("page_size", [0, 16])
@backends("cpu")
def test_a_window_begins_anywhere_within_a_tile(backend, page_size):
    """Of several tokens the first may see the whole of a tile whose first keys the later ones do not see."""
    for left in range(40):
        case = make_case([37, 8, 20], tokens=4, page_size=page_size, window=(left, 0), dtype="float64")
        check(backend, case, "decode_split", left % 4 + 1)


@pytest.mark.parametrize("few", ["both", "alibi_of_batch"])
@backends("emulate")
def test_by_cp_async_on_ampere(backend, few):
    scores = {"window": (100, 0), **numbers_of_heads(few, 4, 4)}
    check(
        backend,
        make_case(**CASES["decode_split_tma"], **scores),
        "decode_split",
        3,
        arch="sm_80",
        trace=False,
    )


@backends("emulate")
def test_rows_without_keys_and_sinks_of_minus_infinity(backend):
    """A row that sees no key gives zeros and its sink as log-sum-exp; a sink of -inf is none, to the last bit."""
    case = make_case([150, 0, 260], tokens=2, head_dim=72, page_size=3, **numbers_of_heads("sink", 3, 4))
    done = check(backend, case, "decode_balanced", 3)
    assert not done.out[1].any()
    np.testing.assert_array_equal(done.lse[1], np.broadcast_to(case.options["sink"][:, None], (4, 2)))
    without = dataclasses.replace(case, options={n: x for n, x in case.options.items() if n != "sink"})
    case.options["sink"] = np.full(4, -np.inf, np.float32)
    none = dataclasses.replace(case)
    for x, y in zip(
        *(check(backend, c, "decode_balanced", 3).results.values() for c in (none, without)), strict=True
    ):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@backends("cpu")
def test_huge_scores(backend, dtype):
    check(backend, make_case([90, 33], dtype=dtype, spread=3000.0), "decode_split", 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@backends("cpu")
def test_values_as_large_as_promised(backend, dtype):
    """|v| * tokens below 3.4e38 (see flash_decode), under equal scores."""
    case = make_case([90, 33], dtype=dtype)
    case.k_cache[...], case.v_cache[...] = 0, 3.3e38 / 90
    check(backend, case, "decode_split", 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@backends("cpu")
def test_fp8_under_any_query(backend, dtype):
    check(backend, make_case([100, 3], fp8=True, dtype=dtype, tokens=2, page_size=16), "decode_split", 3)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1e6, 1e30])
@each("emulate", "gpu", kernels=["decode_split_fp8", "decode_split_tma_fp8"])
def test_bfloat16_queries_of_any_size_over_e4m3(backend, kernel, spread, softcap):
    """They become float16, which has fewer exponents. Rows differ in size, scores are near 1."""
    made = {"heads": 8, "kv_heads": 1, "tokens": 3, "head_dim": 64, "fp8": True, "dtype": "bfloat16"}
    case = make_case([150, 33], **made, spread=spread, scale=1 / (4 * spread), softcap=softcap)
    case.q[...] *= 2.0 ** -np.random.default_rng(1).integers(0, 5, case.q.shape[:3])[..., None]
    check(backend, case, kernel, 3)


# --- Anything ---------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150)
def test_anything_on_a_cpu(data):
    draw = data.draw
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (8, 2)]))
    new = draw(st.sampled_from([0, 0, 1, 3]))
    case = make_case(
        [n + new for n in draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))],
        heads=heads,
        kv_heads=kv_heads,
        tokens=draw(st.sampled_from([1, 1, 2, 5, 16])),
        head_dim=draw(st.sampled_from([8, 24])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"])),
        fp8=draw(st.booleans()),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        new=new,
        scale=draw(st.sampled_from([None, 0.0, 0.7])),
        seed=draw(st.integers(0, 99)),
    )
    config = TileConfig(draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 5, 8, 32])), num_warps=0)
    num_splits = draw(st.sampled_from([None, 1, 2, 3, 7, 30]))
    check(CPU, case, draw(st.sampled_from(SCHEDULES["cpu"])), num_splits, config=config)


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


def executed(case: Case, lengths: list[int], kernel: str | None = None, num_splits: int | None = None):
    """With these lengths in place of those that the call was checked with, as arrays on a GPU may hold."""
    problem, operands = prepare(case, on_gpu=True)
    operands["cache_seqlens"] = np.array(lengths, np.int32)
    run = run_plan(
        make_plan(problem, H200, kernel=kernel, num_splits=num_splits), operands, Execution("checked")
    )
    assert not run.findings, "\n".join(map(str, run.findings))
    return operands


@pytest.mark.emulate
@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_beyond_the_cache_count_as_its_capacity(page_size):
    case = make_case([64, 64], capacity=64, page_size=page_size, head_dim=64)
    operands = executed(case, [2**31 - 1, 65])
    case.check(operands["out"], operands["lse"])


@pytest.mark.emulate
@pytest.mark.parametrize("page_size", [0, 16])
def test_new_tokens_without_room_are_dropped(page_size):
    full, case = (make_case([64, 64], capacity=64, page_size=page_size, head_dim=64) for _ in range(2))
    case.options["cache_seqlens"] = np.array([60, 60], np.int32)
    case.options["k_new"] = case.options["v_new"] = np.full((2, 2, 2, 64), 7, np.float16)
    operands = executed(case, [2**31 - 1, 64])
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
        (500, {"window": (300, 0)}, 308), (2048, {"mask": masks.streaming(4, 99)}, None),
    ],
    ids=str,
)  # fmt: skip
def test_counters(length, scores, keys):
    """Each key that is read is read once, whatever the query group; of a window, in groups of 16 keys, nothing of what
    lies before, of streaming no tile between. Rows of 128 bytes: no bank conflicts."""
    case = make_case([length], heads=8, kv_heads=1, head_dim=64, capacity=length, **scores)
    mask = decode_mask(case.options.get("window"), case.options.get("mask"))
    plan = plan_of(case, "decode_split_tma", 1, mask=mask)
    run = run_plan(plan, operands_of(case.hidden()), Execution("counted"), trace=False)
    if keys is None:
        keys = num_tiles(length, plan.config.block_kv, Kept(100, 4)) * plan.config.block_kv
        assert keys <= 256
    of_lengths = 4 * plan.launches[0].num_threads  # each thread reads its sequence's length
    counters = run.counters["decode_split"]
    assert int(counters["global_read_bytes"].sum()) - case.q.nbytes - of_lengths == 2 * 64 * 2 * keys
    assert int(counters["bank_conflicts"].sum()) == 0
