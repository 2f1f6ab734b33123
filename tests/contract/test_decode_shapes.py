"""The contract of decoding over its shapes: lengths around tiles, pages, tokens, heads, windows, sinks and values."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS, backends
from decode_contract import BOTH, CASES, PAGE_SIZES, SCHEDULES, check, each
from decode_kernel_support import cache_of, configs, operands_of, plan_of, served
from decode_support import make_case, numbers_of_heads

from cufa.kernels import kernels_of
from cufa.kernels.decode import row_blocks
from cufa.plan.planner import make_plan
from cufa.run.emulate.calls import Execution

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


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1e6, 1e30])
@each("emulate", "gpu", kernels=["decode_split_fp8", "decode_split_tma_fp8"])
def test_bfloat16_queries_of_any_size_over_e4m3(backend, kernel, spread, softcap):
    """They become float16, which has fewer exponents. Rows differ in size, scores are near 1."""
    made = {"heads": 8, "kv_heads": 1, "tokens": 3, "head_dim": 64, "fp8": True, "dtype": "bfloat16"}
    case = make_case([150, 33], **made, spread=spread, scale=1 / (4 * spread), softcap=softcap)
    case.q[...] *= 2.0 ** -np.random.default_rng(1).integers(0, 5, case.q.shape[:3])[..., None]
    check(backend, case, kernel, 3)
