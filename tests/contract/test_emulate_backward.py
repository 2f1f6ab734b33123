"""The backward kernels executed on a CPU in checked mode: right against float64, no findings, tiles as every score has
them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_support import (
    NAMES,
    Case,
    assert_gradients,
    make_case,
    near,
    seen,
    serves,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS, tiles_of

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of
from cufa.kernels.backward.fa2 import BackwardConfig
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import Emulation, emulate_backward
from cufa.schedule import key_order

SPECS = list(kernels_of("backward").values())
VARIANTS = [
    pytest.param(s, d, None if p == "native" else p, id=f"{s.name}-{d}" + (f"-{p}" if p != "native" else ""))
    for s in SPECS
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]
CONFIGS = [
    pytest.param(s, c, v.values[1], v.values[2], id=f"{v.id}-{i}")
    for v in VARIANTS
    for s in [v.values[0]]
    for i, c in enumerate(s.configs)
]
#: The smallest tiles that the 16-bit kernel can be built for: the most tiles for the length.
SMALLEST = BackwardConfig(32, 32, num_warps=2, num_stages=2, warp_keys=16)
EACH = pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
EVERY_MASK = {"full": FULL, "causal": CAUSAL, "band": Band(40, 25)}


def check(spec, precision, case: Case, **options) -> Emulation:
    """One checked run: no findings, errors within bounds, tile counters as brute force has them."""
    options = {"mode": "checked", **case.options, **options}
    run = emulate_backward(*case.arrays, algorithm=spec.algorithm, precision=precision, **options)
    assert run.plan.spec is spec
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_gradients([run.results[name] for name in NAMES], case, precision)
    if options.get("trace", True):
        assert_visited(run, case)
    return run


def assert_visited(run: Emulation, case: Case) -> None:
    """A query tile is visited when a row of it sees a key of the block, and clear when it is whole and every row sees
    every key there is. Once per key/value head."""
    schedule = run.plan.schedule
    some, clear = tiles_of(seen(case).T, schedule.block_kv, schedule.block_q)
    assert len(run.records) == len(case.k) * case.k.shape[1] * schedule.num_kv_blocks
    tile = np.arange(schedule.num_q_blocks)
    for record in run.records:
        first, first_clear = int(record["first_tile"]), int(record["first_clear"])
        inside = (tile >= first) & (tile < first + int(record["tiles_visited"]))
        free = (tile >= first_clear) & (tile < first_clear + int(record["tiles_clear"]))
        np.testing.assert_array_equal(inside, some[record["q_block"]])
        np.testing.assert_array_equal(free, clear[record["q_block"]])


@pytest.mark.sampled(fixed=5, dated=2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("spec", "config", "dtype", "precision"), CONFIGS)
def test_every_tiling(spec, config, dtype, precision, deterministic):
    """Three tiles of queries and three of keys, the last ones ragged; two heads share their keys."""
    head_dim = (
        near(spec, config.max_head_dim)
        if dtype == spec.dtypes[-1]
        else near(spec, max(config.min_head_dim, 40))
    )
    for arch in ("sm_90", "sm_80", "sm_86"):
        if config in fitting_configs(spec, head_dim, Device.typical(arch)):
            break
    lengths = 2 * config.block_q + 5, 2 * config.block_kv + 3
    case = make_case(1, 2, 1, *lengths, head_dim, dtype, causal=deterministic, dlse=True)
    deterministic = (
        deterministic and not config.plain_only
    )  # persistent blocks have no fixed order of additions
    check(spec, precision, case, config=config, arch=arch, deterministic=deterministic, trace=False)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", EVERY_MASK.values(), ids=EVERY_MASK)
@EACH
def test_masks_and_caps(spec, dtype, precision, mask, softcap):
    shape = (1, 2, 1, 140, 300, near(spec, 64))
    check(spec, precision, make_case(*shape, dtype, mask=mask, softcap=softcap, dlse=True))


@pytest.mark.parametrize("head_dim", [8, 24, 48, 72, 104, 136, 192, 200])
@EACH
def test_head_dims(spec, dtype, precision, head_dim):
    """Odd numbers of accumulators side by side, and of those that warps share out."""
    if not serves(spec, head_dim):
        pytest.skip(f"{spec.name} has no tiles for it")
    check(spec, precision, make_case(1, 1, 1, 70, 90, head_dim, dtype, causal=True), trace=False)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@pytest.mark.parametrize(
    ("spec", "dtype", "precision"), [v for v in VARIANTS if not v.values[0].uses_copy_engine]
)
def test_narrow_copies(spec, dtype, precision, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""
    case = make_case(1, 2, 2, 70, 90, 64, dtype, causal=True)
    if alignment < case.q.itemsize:
        pytest.skip(f"{dtype} is never aligned to {alignment} bytes only")

    def moved(x):
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + alignment // x.itemsize), x.dtype)
        wide[..., -x.shape[-1] :] = x
        return wide[..., -x.shape[-1] :]

    names = ("dout", "q", "k", "v", "out")
    case = dataclasses.replace(case, **{name: moved(getattr(case, name)) for name in names})
    run = check(spec, precision, case)
    assert run.plan.problem.alignment == alignment


EDGES = {  # batch, heads, kv_heads, seqlen_q, seqlen_k: in each, sequences and heads that share keys
    "one query, one key": (2, 2, 1, 1, 1),
    "one query": (2, 4, 2, 1, 131),
    "many queries, few keys: rows that see none": (2, 2, 1, 150, 17),
    "eight heads of one": (2, 8, 1, 33, 70),
    "primes": (2, 3, 1, 67, 101),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
@EACH
def test_edges(spec, dtype, precision, shape, deterministic):
    case = make_case(*shape, near(spec, 64), dtype, causal=True, dlse=True)
    check(spec, precision, case, deterministic=deterministic)


@pytest.mark.sampled(each="spec", fixed=0)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_same_bits_in_every_order(spec, head_dim):
    """Whatever order warps run in, whenever copies land; where asked for, however many blocks run at once."""
    assert_same_bits_in_every_order(spec, head_dim)


def assert_same_bits_in_every_order(spec, head_dim, **how) -> None:
    case = make_case(1, 2, 1, 150, 300, near(spec, head_dim), spec.dtypes[-1], mask=Band(200, 30))
    precision = "float32" if spec.dtypes == ("float32",) else None
    first = check(spec, precision, case, copies="early", threads=1, deterministic=True, **how)
    for n, schedule in enumerate(("descending", 1)):
        ordered = n % 2 == 0
        options = {"schedule": schedule, "copies": "late", "threads": 3, "deterministic": ordered}
        run = check(spec, precision, case, mode="plain", **options, **how)
        for name in NAMES[0 if ordered else 1 :]:
            got, same = (x.results[name].view(np.uint8) for x in (run, first))
            np.testing.assert_array_equal(got, same, err_msg=name)


def test_query_tiles_of_any_band():
    """``query_tiles`` of mask_by_keys.cuh against every score, on the smallest tiles."""

    @given(
        mask=BANDS,
        lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
        seed=st.integers(0, 9),
        deterministic=st.booleans(),
    )
    @settings(max_examples=100)
    def run(mask, lengths, seed, deterministic):
        case = make_case(1, 2, 1, *lengths, 8, "float16", mask=mask, seed=seed)
        options = {"config": SMALLEST, "mode": "plain", "schedule": seed, "deterministic": deterministic}
        check(KERNELS["fa2_backward"], None, case, **options)

    run()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", EVERY_MASK.values(), ids=EVERY_MASK)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_key_blocks_are_taken_in_the_order_written_down(spec, mask, deterministic):
    """``key_item`` of the kernels is ``key_order.key_blocks``: on one CPU thread blocks begin one by one."""
    case = make_case(2, 4, 2, 100, 600, near(spec, 64), spec.dtypes[-1], mask=mask)
    precision = "float32" if spec.dtypes == ("float32",) else None
    options = {"mode": "plain", "threads": 1, "deterministic": deterministic}
    assert_in_order(check(spec, precision, case, **options))


def assert_in_order(run: Emulation) -> None:
    expected = run.plan.order
    by_start = run.records[np.argsort(run.records["start_ns"], kind="stable")]
    np.testing.assert_array_equal(by_start["q_block"], expected.q_block)
    head = by_start["batch"] * run.plan.problem.kv_heads + by_start["head"]
    np.testing.assert_array_equal(head, expected.head)


#: Of more than 96 columns: blocks that run on, and a thread block each.
IN_GROUPS = [
    pytest.param(spec, config, head_dim, id=f"{spec.name}-{config.block_q}-{config.persistent}")
    for spec, head_dim in ((KERNELS["fa3_backward"], 104), (KERNELS["fa3_backward_wide"], 136))
    for config in spec.configs
    if config.fits(head_dim)
]


@pytest.mark.parametrize("usual", [1, 3])
@pytest.mark.parametrize(("spec", "config", "head_dim"), IN_GROUPS)
def test_groups_of_heads_are_taken_in_the_order_written_down(monkeypatch, spec, config, head_dim, usual):
    """Where memory is slow groups are of two heads at most where blocks do not run on, whatever they are elsewhere."""
    case = make_case(2, 4, 4, 100, 300, head_dim, "bfloat16", causal=True)
    blocks = -(-300 // config.block_kv)
    monkeypatch.setattr(Device, "slow_memory", True)
    monkeypatch.setattr(key_order, "_GROUP_BYTES", 1)
    monkeypatch.setattr(key_order, "_GROUP_ITEMS", usual * blocks * config.cluster)
    monkeypatch.setattr(key_order, "_LAST_ITEMS", blocks)
    run = check(spec, None, case, mode="plain", threads=1, config=config)
    assert_in_order(run)
    size = usual if config.persistent else min(usual, 2)
    groups = [range(first, min(first + size, 8)) for first in range(0, 8, size)]
    assert run.plan.order.head.tolist() == [head for group in groups for _ in range(blocks) for head in group]
