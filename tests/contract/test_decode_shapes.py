"""The contract of decoding over its shapes: lengths around tiles, pages, tokens, heads, windows, sinks and values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backends import backends
from decode_contract import BOTH, CASES, PAGE_SIZES, check, each, of_kernel
from decode_kernel_support import configs, operands_of, plan_of
from decode_support import make_case, numbers_of_heads
from sampling import of_today
from support import DTYPES

from cufa.kernels import kernels_of
from cufa.kernels.decode import row_blocks
from cufa.plan.planner import make_plan
from cufa.run.emulate.calls import Execution

# --- Tables -----------------------------------------------------------------------------------------------

#: Arguments of make_case.
ON_A_CPU = {
    "lengths around tiles": [
        {"lengths": [n], "page_size": size, "dtype": "float32"}
        for n in (0, 1, 7, 8, 9, 63, 64, 65)
        for size in PAGE_SIZES
    ],
    "ragged": [
        {
            "lengths": [700, 0, 1, 255, 256, 257, 300, 13],
            "page_size": n,
            "fp8": x,
            "dtype": "bfloat16",
            "seed": n,
        }
        for n in PAGE_SIZES
        for x in BOTH
    ],
    "appended tokens": [
        {"lengths": [n, 40, 64 + n, 15 + n], "new": n, "page_size": size, "fp8": fp8, "tokens": min(n, 3)}
        for n in (1, 2, 5, 20)
        for size in PAGE_SIZES
        for fp8 in BOTH
    ],
    # Causal among themselves; the first ones of a short sequence see nothing.
    "query tokens": [
        {"lengths": [0, 1, n - 1, n, n + 1, 40], "tokens": n, "dtype": "float32", "seed": n}
        for n in range(1, 17)
    ],
    "grouped heads": [
        {"lengths": [20, 41], "heads": heads, "kv_heads": kv_heads, "tokens": tokens}
        for heads, kv_heads in ((1, 1), (6, 6), (6, 3), (6, 1), (16, 2), (32, 1))
        for tokens in (1, 5)
    ],
    "head dims": [
        {"lengths": [65, 3], "head_dim": n, "fp8": fp8, "page_size": 16}
        for n in (8, 40, 72, 128, 256)
        for fp8 in BOTH
    ],
    "windows": [
        {
            "lengths": [5, 101, 64, 7],
            "tokens": 4,
            "new": 5,
            "page_size": n,
            "softcap": cap,
            "window": (left, 0),
        }
        for n in (0, 3, 16)
        for left in (0, 1, 15, 16)
        for cap in (None, 2.0)
    ],
    # Of several tokens the first may see the whole of a tile whose first keys the later ones do not see.
    "a window that begins anywhere within a tile": [
        {"lengths": [37, 8, 20], "tokens": 4, "page_size": n, "window": (left, 0), "dtype": "float64"}
        for n in (0, 16)
        for left in range(40)
    ],
    "huge scores": [{"lengths": [90, 33], "dtype": dtype, "spread": 3000.0} for dtype in DTYPES],
}


@pytest.mark.parametrize("what", ON_A_CPU)
@each("cpu")
def test_on_a_cpu(backend, kernel, what):
    """In several splits of small tiles; with default tiles as well, which pages of 3 do not divide."""
    for n, made in enumerate(ON_A_CPU[what]):
        case = make_case(**made)
        check(backend, case, kernel, 1 + n % 5)
        if what in ("ragged", "grouped heads"):
            case.check(backend.decode(case, kernel).out)


ON_A_GPU = {
    # One key more or less than a whole number of tiles, of a ring's tiles, of boxes.
    "lengths around tiles": [
        {
            "lengths": sorted({max(0, n + d) for n in (0, 16, 32, 64, 128, 256) for d in (-1, 0, 1)}),
            "tokens": tokens,
        }
        for tokens in (1, 4)
    ],
    "pages": [
        {"lengths": [700, 2, 333, 65], "tokens": 2, "new": 2, "page_size": n, "head_dim": 128}
        for n in PAGE_SIZES[1:]
    ],
    # As many query tokens as there may be; more new tokens than one block of rows has to append.
    "many tokens": [
        {"lengths": [300, 16, 70], "page_size": n, **rows}
        for n in (0, 16)
        for rows in (
            {"heads": 8, "kv_heads": 2, "tokens": 16, "new": 16},
            {"heads": 40, "kv_heads": 1, "tokens": 5, "new": 7},
        )
    ],
    "head dims": [
        {"lengths": [300, 17], "tokens": 2, "new": 1, "head_dim": n}
        for n in (8, 16, 40, 72, 80, 96, 136, 192)
    ],
    "sinks or ALiBi alone": [
        {"lengths": lengths, **more, **numbers_of_heads(few, len(lengths), 4)}
        for few in ("sink", "alibi", "alibi_of_batch")
        for lengths, more in (
            ([700, 0, 1, 129, 2048], {}),
            ([700, 2, 129], {"tokens": 2, "new": 2, "page_size": 16, "softcap": 3.0, "window": (300, 0)}),
        )
    ],
}


@pytest.mark.parametrize("what", ON_A_GPU)
@each("gpu")
def test_on_a_gpu(backend, kernel, what):
    spec = kernels_of("decode")[kernel]
    for made in of_today(ON_A_GPU[what], f"{what} {kernel}", fixed=2, dated=2):
        made = {"head_dim": 64, **of_kernel(kernel), **made}
        cut = made.get("page_size", 0) % spec.page_multiple or made["head_dim"] % spec.head_dim_multiple
        if not cut and configs(kernel, made["head_dim"], backend.device):
            for num_splits in (None, 1, 5):
                check(backend, make_case(**made), kernel, num_splits)


# --- Rows -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("head_dim", [8, 40, 72, 128, 192, 256])
@each("emulate", kernels=["decode_split_tma", "decode_balanced_tma"])
def test_head_dims(backend, kernel, head_dim):
    check(backend, make_case([65, 3], head_dim=head_dim, page_size=16), kernel, 2)


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


# --- Sinks and values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", ["both", "alibi_of_batch"])
@backends("emulate")
def test_by_cp_async_on_ampere(backend, few):
    scores = {"window": (100, 0), **numbers_of_heads(few, 4, 4)}
    case = make_case(**CASES["decode_split_tma"], **scores)
    check(backend, case, "decode_split", 3, arch="sm_80", trace=False)


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
    found = (check(backend, x, "decode_balanced", 3).results.values() for x in (none, without))
    for x, y in zip(*found, strict=True):
        assert x.tobytes() == y.tobytes()


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
