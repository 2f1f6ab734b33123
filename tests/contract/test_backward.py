"""The contract of the backward: dq, dk and dv within the bound of backward_support.assert_gradients of float64, for
every kernel, dtype, tiling, mask and shape; exactly 0 where nothing is seen; any strides, and nothing written around
the results.

Executed kernels run in checked mode: a race, a deadlock or an access out of range fails the test, too. Persistent
blocks have no fixed order of additions; where ``deterministic`` is asked for, the bits are the same in every run.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, backends, contract
from backward_support import NAMES, assert_gradients, expected, make_case, near, serves
from cpu_support import SMALL
from mask_support import assert_visited
from support import assert_tiles, make_inputs

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of
from cufa.kernels.support import refusal
from cufa.plan.dense import BACKWARD
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import Execution
from cufa.schedule import key_order

SPECS = list(kernels_of("backward").values())
BOTH = (False, True)
PLAIN = Execution("plain")


def check(backend, spec, precision, case, *, config=None, trace=None, **how):
    """One call, held to float64; of executed kernels the tiles are held to brute force."""
    trace = backend is EMULATE if trace is None else trace
    config = SMALL if backend is CPU and config is None else config
    how = {"algorithm": spec.algorithm, "precision": precision, "config": config, "trace": trace, **how}
    done = backend.backward(*case.arrays, **case.options, **how)
    assert_gradients(done.gradients, case, precision)
    assert backend is not EMULATE or done.plan.spec is spec
    if trace:
        assert len(done.records) == len(case.k) * case.k.shape[1] * done.plan.schedule.num_kv_blocks
        assert_visited(done.plan, case.seen, done.records)
    return done


def auto(backend, case, **how):
    """As :func:`check`, by the kernel that the call takes."""
    done = backend.backward(*case.arrays, **case.options, **how)
    assert_gradients(done.gradients, case, how.get("precision"))
    return done


def numpy_once(backend, spec, *_) -> bool:
    """NumPy has one backward, whatever the algorithm."""
    return backend is not CPU or spec.algorithm == "fa2"


def gradients(names="", serves=numpy_once, **sizes):
    return contract(names, "backward", serves, **sizes)


# --- Shapes -----------------------------------------------------------------------------------------------

LENGTHS = [(1, 1), (1, 97), (97, 1), (15, 23), (16, 24), (17, 25), (31, 49), (5, 211), (211, 5), (48, 48)]
EDGES = {  # batch, heads, kv_heads, seqlen_q, seqlen_k: in each, sequences and heads that share keys
    "one query, one key": (2, 2, 1, 1, 1),
    "one query": (2, 4, 2, 1, 131),
    "many queries, few keys: rows that see none": (2, 2, 1, 150, 17),
    "eight heads of one": (2, 8, 1, 33, 70),
    "primes": (2, 3, 1, 67, 101),
}


@gradients(
    "shape, causal, deterministic",
    cpu=itertools.product([(2, 4, 2, *x) for x in LENGTHS], BOTH, [False]),
    emulate=itertools.product(EDGES.values(), [True], BOTH),
)
def test_lengths(backend, spec, dtype, precision, shape, causal, deterministic):
    head_dim = 24 if backend is CPU else near(spec, 64)
    case = make_case(*shape, head_dim, dtype, causal=causal, dlse=backend is EMULATE or shape[3] % 2 == 1)
    check(backend, spec, precision, case, deterministic=deterministic)


#: What FlashAttention's own tests run.
SIZES = [
    (1, 239), (3, 799), (799, 3), (97, 97), (128, 128), (200, 200), (256, 512), (307, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", dict.fromkeys(dtype for s in SPECS for dtype in s.dtypes))


@pytest.mark.sampled(dated=6, pairs=[("lengths", "dtype")])
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@DTYPES
@backends("gpu")
def test_the_peers_sizes(backend, dtype, lengths, causal):
    for seed, head_dim in enumerate((64, 128) if max(lengths) < 2000 else (128,)):
        auto(backend, make_case(1, 2, 2, *lengths, head_dim, dtype, seed=seed, causal=causal))


@pytest.mark.slow
@DTYPES
@backends("gpu")
def test_the_peers_largest_size(backend, dtype):
    auto(backend, make_case(1, 1, 1, 4224, 4224, 128, dtype, causal=True))


@pytest.mark.sampled(on="gpu", fixed=44, dated=16, pairs=[("spec", "dtype")])
@gradients(
    "head_dim",
    cpu=[8, 40, 72, 128, 256],
    emulate=[8, 24, 48, 72, 104, 136, 192, 200],  # odd numbers of accumulators side by side
    gpu=range(8, 257, 8),
    serves=lambda backend, spec, dtype, precision, head_dim: (
        (spec.algorithm, dtype) == ("fa2", "float32") if backend is CPU else serves(spec, head_dim)
    ),
)
def test_head_dims(backend, spec, dtype, precision, head_dim):
    if backend is not GPU:
        case = make_case(1, 2, 2, 70, 90, head_dim, dtype, causal=True)
        check(backend, spec, precision, case, trace=False)
        return
    # Masks alternate over head dims: all are covered for every kernel, at half the compiles.
    for causal in BOTH if head_dim in (64, 128, 256, 40) else ((head_dim // 16) % 2 == 0,):
        case = make_case(2, 4, 2, 130, 190, head_dim, dtype, causal=causal, dlse=True, seed=head_dim)
        check(backend, spec, precision, case)


@gradients(
    "heads, config",
    cpu=itertools.product([(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (24, 2)], [SMALL, BACKWARD.cpu_config]),
    serves=lambda backend, spec, dtype, *_: (spec.algorithm, dtype) == ("fa2", "float32"),
)
def test_grouped_heads(backend, spec, dtype, precision, heads, config):
    check(backend, spec, precision, make_case(3, *heads, 20, 41, 16, dtype, causal=True), config=config)


@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 3), (16, 1)], ids=str)
@backends("gpu")
def test_grouped_heads_of_calls(backend, heads, deterministic):
    for causal in BOTH:
        case = make_case(3, *heads, 200, 310, 64, "bfloat16", causal=causal)
        auto(backend, case, deterministic=deterministic)


# --- Tilings ----------------------------------------------------------------------------------------------


def tilings():
    return dict.fromkeys(config for spec in SPECS for config in spec.configs)


@pytest.mark.sampled(fixed=5, dated=2)
@gradients(
    "config, deterministic",
    emulate=itertools.product(tilings(), BOTH),
    serves=lambda backend, spec, dtype, precision, config, _: config in spec.configs,
)
def test_every_tiling(backend, spec, dtype, precision, config, deterministic):
    """Three tiles of queries and three of keys, the last ones ragged; two heads share their keys."""
    least, most = near(spec, max(config.min_head_dim, 40)), near(spec, config.max_head_dim)
    head_dim = most if dtype == spec.dtypes[-1] else least
    arch = next(
        x
        for x in ("sm_90", "sm_80", "sm_86")
        if x == "sm_86" or config in fitting_configs(spec, head_dim, Device.typical(x))
    )
    lengths = 2 * config.block_q + 5, 2 * config.block_kv + 3
    case = make_case(1, 2, 1, *lengths, head_dim, dtype, causal=deterministic, dlse=True)
    how = {"config": config, "arch": arch, "deterministic": deterministic and not config.plain_only}
    check(backend, spec, precision, case, trace=False, **how)


@pytest.mark.sampled(dated=6, pairs=[("spec", "head_dim")])
@gradients(
    "head_dim, deterministic",
    gpu=itertools.product([40, 64, 96, 128, 192, 256], BOTH),
    serves=lambda backend, spec, dtype, precision, head_dim, _: serves(spec, head_dim),
)
def test_every_tiling_on_a_gpu(backend, spec, dtype, precision, head_dim, deterministic):
    """Whatever the planner would have chosen. Lengths hang over both tiles."""
    for config in fitting_configs(spec, head_dim, backend.device):
        lengths = 2 * config.block_q + 7, 2 * config.block_kv + 13
        case = make_case(1, 4, 2, *lengths, head_dim, dtype, causal=True, dlse=True)
        planned = cufa.plan_backward(case.q, case.k, causal=True, deterministic=deterministic, device="cpu")
        problem = dataclasses.replace(planned.problem, precision=precision or "native")
        if refusal(spec, problem, config=config) is None:
            check(backend, spec, precision, case, config=config, deterministic=deterministic)


@gradients(
    "largest", lambda *x: numpy_once(*x) and x[2] == "float16", cpu=[6e4, 1.2e5], emulate=[6e4], gpu=[6e4]
)
def test_dS_as_large_as_promised(backend, spec, dtype, precision, largest):
    """Within ±65,504 in kernels (see flash_attention_backward); NumPy keeps it in float32. Gradients are small."""
    case = make_case(1, 2, 1, 64, 64, near(spec, 64), dtype)
    q, k, v = (
        case.q * np.float16(2**-6),
        case.k * np.float16(2**-6),
        4 * np.sign(case.v[..., :1]) + 0 * case.v,
    )
    out, lse = cufa.attention_reference(q, k, v, return_lse=True)
    P = np.exp(q.astype(float) @ k.astype(float).mT * q.shape[-1] ** -0.5 - lse[..., None])
    dS = P * (v[..., 0].astype(float)[:, :, None] * q.shape[-1] - out.sum(axis=-1, keepdims=True))
    dout = np.full_like(q, largest / np.abs(dS).max())
    case = dataclasses.replace(
        case, dout=dout, q=q, k=k, v=v, out=out.astype(dtype), lse=lse.astype(np.float32)
    )
    exacts = expected(case)
    assert max(np.abs(x).max() for x in exacts) < 65504
    found = backend.backward(*case.arrays, algorithm=spec.algorithm, precision=precision).gradients
    for x, exact in zip(found, exacts, strict=True):
        assert np.abs(x - exact).max() <= 2e-3 * np.abs(exact).max()


@backends("cpu", "emulate")
def test_the_gradient_of_lse_of_rows_that_see_nothing_is_not_read(backend):
    case = make_case(1, 2, 1, 150, 60, 64, "float32" if backend is CPU else "float16", causal=True, dlse=True)
    dlse = case.dlse.copy()
    dlse[:, :, :90] = np.nan
    done = backend.backward(*case.arrays, causal=True, dlse=dlse, algorithm="fa2")
    assert_gradients(done.gradients, case)


@pytest.mark.parametrize("axis", ["batch", "heads", "seqlen_q", "seqlen_k"])
@backends("cpu", "gpu")
def test_zero_size_axes(backend, axis):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 5, "seqlen_k": 5, axis: 0}
    b, h, sq, sk = sizes.values()
    q, k, v = make_inputs(b, h, h, sq, sk, 64, "float16")
    forward = backend.forward(q, k, v)
    dout = np.full_like(q, np.nan) if backend is CPU else q
    done = backend.backward(dout, q, k, v, forward.out, forward.lse)
    for x, y in zip(done.gradients, (q, k, v), strict=True):
        assert x.shape == y.shape and not x.any()


# --- Memory -----------------------------------------------------------------------------------------------


@gradients(
    "alignment",
    emulate=[8, 4, 2],
    serves=lambda backend, spec, dtype, precision, alignment: (
        not spec.uses_copy_engine and (alignment >= 4 or dtype != "float32")
    ),
)
def test_narrow_copies(backend, spec, dtype, precision, alignment):
    """Rows that start at odd multiples of 8, 4 and 2 bytes."""

    def moved(x):
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + alignment // x.itemsize), x.dtype)
        wide[..., -x.shape[-1] :] = x
        return wide[..., -x.shape[-1] :]

    case = make_case(1, 2, 2, 70, 90, 64, dtype, causal=True)
    names = ("dout", "q", "k", "v", "out")
    case = dataclasses.replace(case, **{name: moved(getattr(case, name)) for name in names})
    done = check(backend, spec, precision, case)
    assert done.plan.problem.alignment == alignment


def _within(x):
    """Inside a larger array of NaN, at an odd address."""
    import cupy

    around = cupy.full([n + 3 for n in x.shape], -1, x.dtype)
    view = around[1:-2, 2:-1, 1:-2, 1:-2]
    view[...] = x
    return view


STRIDES = {
    "bshd": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "within": _within,
    "reversed": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "every other": lambda x: x.repeat(2, axis=2)[:, :, ::2],
}


@pytest.mark.parametrize("strides", STRIDES)
@DTYPES
@backends("gpu")
def test_any_strides(backend, dtype, strides):
    case = make_case(2, 4, 2, 100, 150, 64, dtype, causal=True, dlse=True)
    auto(backend, case, place=STRIDES[strides])


@backends("emulate", "gpu")
def test_layout_bshd(backend):
    case = make_case(2, 4, 2, 70, 90, 64, "float16", causal=True)
    arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in case.arrays[:5]]
    done = backend.backward(*arrays, case.lse, layout="bshd", causal=True, algorithm="fa2")
    assert_gradients([x.swapaxes(1, 2) for x in done.gradients], case)


@backends("gpu")
def test_broadcast_inputs(backend, cp):
    case = make_case(3, 4, 4, 100, 150, 64, "float16")
    case = dataclasses.replace(case, dout=np.broadcast_to(case.dout[:1, :1, :1], case.q.shape).copy())
    arrays = [backend.array(x) for x in case.arrays]
    arrays[0] = cp.broadcast_to(arrays[0][:1, :1, :1], case.q.shape)
    assert_gradients([x.get() for x in cufa.flash_attention_backward(*arrays)], case)


@pytest.mark.parametrize("deterministic", BOTH)
@backends("gpu")
def test_memory_that_was_full_of_nan(backend, deterministic):
    """The workspace comes from a pool whose memory held something else."""
    case = make_case(2, 4, 2, 333, 500, 64, "bfloat16", mask=Band(40, 10))
    for _ in range(3):
        poison = backend.array(np.full(1 << 26, 0xFF, np.uint8))
        del poison
        auto(backend, case, deterministic=deterministic)


@backends("gpu")
def test_nothing_is_written_around_the_results(backend):
    case = make_case(1, 4, 2, 77, 99, 64, "float16", causal=True)
    around = {n: backend.array(np.full((3, 6, 103, 80), 7, np.float16)) for n in NAMES}
    views = {}
    for name, x in around.items():
        _, h, s, d = getattr(case, name[1:]).shape
        views[name] = x[1:2, 1 : 1 + h, 2 : 2 + s, 8 : 8 + d]
    got = cufa.flash_attention_backward(*map(backend.array, case.arrays), causal=True, **views)
    assert_gradients([x.get() for x in got], case)
    for x in views.values():
        x[...] = 7
    assert all((x == 7).all() for x in around.values())


@pytest.mark.slow
@backends("gpu")
def test_strides_of_more_than_32_bits(backend, cp):
    """Two sequences 2^31 elements apart, all operands in one buffer."""
    case = make_case(2, 2, 1, 70, 90, 64, "bfloat16", causal=True)
    apart, room = 1 << 31, 1 << 15
    memory = cp.empty(apart + 16 * room, cp.uint16)

    def placed(n, x):
        steps = (apart, *(s // x.itemsize for s in x.strides[1:]))
        view = cp.lib.stride_tricks.as_strided(memory[n * room :], x.shape, [x.itemsize * s for s in steps])
        view[...] = cp.asarray(x).view(memory.dtype)
        return view.view(x.dtype)

    arrays = [placed(n, x) for n, x in enumerate(case.arrays[:5])]
    results = {name: placed(5 + n, getattr(case, name[1:])) for n, name in enumerate(NAMES)}
    got = cufa.flash_attention_backward(*arrays, cp.asarray(case.lse), causal=True, **results)
    assert_gradients([x.get() for x in got], case)


# --- Order ------------------------------------------------------------------------------------------------


def exact(spec):
    return "float32" if spec.dtypes == ("float32",) else None


RNG = np.random.default_rng(8)
HOLES = RNG.random((150, 200)) < 0.02
HOLES[:100, 64:192] = False
IRREGULAR = {
    "documents": masks.documents([60, 50, 40], causal=False, seqlen=150),
    "causal documents": masks.documents([10, 130, 10]),
    "prefix by sequence": masks.prefix([3, 190]),
    "bits": HOLES,
    "bits of query heads": RNG.random((2, 4, 150, 200)) < 0.004,
}


def assert_same_bits(spec, case, **how):
    """Whatever order warps run in, whenever copies land; where asked for, however many blocks run at once."""
    # Under irregular masks a fixed order visits tiles in another order: dK and dV then have other bits too.
    for ordered in BOTH:
        first, second = (
            check(EMULATE, spec, exact(spec), case, execution=execution, deterministic=ordered, **how)
            for execution in (
                Execution("checked" if ordered else "plain", copies="early", threads=1),
                Execution("plain", "descending" if ordered else 1, "late", 3),
            )
        )
        for name in NAMES[0 if ordered else 1 :]:
            assert second.results[name].tobytes() == first.results[name].tobytes(), name


@pytest.mark.emulate
@pytest.mark.sampled(each="spec", fixed=0)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_same_bits_in_every_order(spec, head_dim):
    case = make_case(1, 2, 1, 150, 300, near(spec, head_dim), spec.dtypes[-1], mask=Band(200, 30))
    assert_same_bits(spec, case)


@pytest.mark.emulate
@pytest.mark.sampled(each="spec", fixed=0)
@pytest.mark.parametrize("name", IRREGULAR)
@pytest.mark.parametrize(("head_dim", "element"), [(64, 0), (128, -1)])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_same_bits_under_irregular_masks(spec, head_dim, element, name):
    """The tickets of key blocks are listed."""
    keys = 150 if "documents" in name else 200
    case = make_case(2, 4, 2, 150, keys, near(spec, head_dim), spec.dtypes[element], mask=IRREGULAR[name])
    assert_same_bits(spec, case, trace=False)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(100, 40), Band(5, None, 30)], ids=str)
@backends("gpu")
def test_traced_tiles_are_the_schedules(backend, mask):
    done = auto(backend, make_case(2, 4, 2, 500, 700, 64, "bfloat16", mask=mask), trace=True)
    assert_tiles(done.plan, done.records)


ALONE = Execution("plain", threads=1)


@pytest.mark.emulate
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(40, 25)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_key_blocks_are_taken_in_the_order_written_down(spec, mask, deterministic):
    """``key_item`` of the kernels is ``key_order.key_blocks``: on one CPU thread blocks begin one by one."""
    case = make_case(2, 4, 2, 100, 600, near(spec, 64), spec.dtypes[-1], mask=mask)
    assert_in_order(check(EMULATE, spec, exact(spec), case, execution=ALONE, deterministic=deterministic))


def assert_in_order(done) -> None:
    expected, records = done.plan.order, done.records
    by_start = records[np.argsort(records["start_ns"], kind="stable")]
    np.testing.assert_array_equal(by_start["q_block"], expected.q_block)
    head = by_start["batch"] * done.plan.problem.kv_heads + by_start["head"]
    np.testing.assert_array_equal(head, expected.head)


#: Of more than 96 columns: persistent blocks, and a thread block each.
IN_BATCHES = [
    pytest.param(spec, config, head_dim, id=f"{spec.name}-{config.block_q}-{config.persistent}")
    for spec, head_dim in ((KERNELS["fa3_backward"], 104), (KERNELS["fa3_backward_wide"], 136))
    for config in spec.configs
    if config.fits(head_dim)
]


@pytest.mark.emulate
@pytest.mark.parametrize("usual", [1, 3])
@pytest.mark.parametrize(("spec", "config", "head_dim"), IN_BATCHES)
def test_head_batches_are_taken_in_the_order_written_down(monkeypatch, spec, config, head_dim, usual):
    """Where memory is slow a head batch without persistent blocks has two heads at most, whatever it has elsewhere."""
    case = make_case(2, 4, 4, 100, 300, head_dim, "bfloat16", causal=True)
    blocks = -(-300 // config.block_kv)
    monkeypatch.setattr(Device, "slow_memory", True)
    monkeypatch.setattr(key_order, "_BATCH_BYTES", 1)
    monkeypatch.setattr(key_order, "_BATCH_ITEMS", usual * blocks * config.cluster)
    for name in ("_LAST_ITEMS", "_LAST_SMALL_ITEMS"):
        monkeypatch.setattr(key_order, name, blocks)
    done = check(EMULATE, spec, None, case, execution=ALONE, config=config)
    assert_in_order(done)
    size = usual if config.persistent else min(usual, 2)
    batches = [range(first, min(first + size, 8)) for first in range(0, 8, size)]
    assert done.plan.order.head.tolist() == [h for batch in batches for _ in range(blocks) for h in batch]


@pytest.mark.emulate
@pytest.mark.parametrize("narrow", BOTH)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_head_batches_of_listed_tickets_are_taken_in_the_order_written_down(monkeypatch, spec, narrow):
    """From right to left. Under a narrow mask the last batch has enough key blocks: here those of all heads."""
    monkeypatch.setattr(key_order, "_bytes_of_queries", lambda problem: key_order.L2_SHARE)
    mask = np.random.default_rng(3).random((100, 300)) < (0.1 if narrow else 0.8)
    case = make_case(2, 4, 2, 100, 300, near(spec, 64), spec.dtypes[-1], mask=mask)
    done = check(EMULATE, spec, exact(spec), case, execution=ALONE, deterministic=True)
    assert_in_order(done)
    blocks = done.plan.schedule.num_kv_blocks
    expected = [0, 1, 2, 3] * blocks if narrow else [head for head in range(4) for _ in range(blocks)]
    assert done.plan.order.head.tolist() == expected
    assert done.plan.order.q_block[[0, -1]].tolist() == [blocks - 1, 0]


# --- The executor's call ----------------------------------------------------------------------------------


@pytest.mark.emulate
def test_counters():
    """Bytes follow from the arrays, products from the tiles visited: five of a tile each."""
    case = make_case(1, 2, 2, 256, 256, 64, "float16", causal=True)
    run = cufa.emulate_backward(*case.arrays, causal=True, mode="counted")
    assert run.totals["bank_conflicts"] == 0
    assert run.totals["global_write_bytes"] >= sum(x.nbytes for x in run.results.values())
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    config = run.plan.config
    per_tile = 5 * config.block_q * config.block_kv * 64
    assert run.totals["products"] == run.totals["tiles_visited"] * per_tile


def test_arguments_of_the_executor_are_checked_as_the_calls_are():
    case = make_case(1, 2, 1, 20, 30, 64, "float16")
    with pytest.raises(TypeError, match="q is float64"):
        cufa.emulate_backward(*(x.astype(np.float64) for x in case.arrays))
    with pytest.raises(ValueError, match="lse has shape"):
        cufa.emulate_backward(*case.arrays[:5], case.lse[:, :, 1:])
    with pytest.raises(TypeError, match="deterministic must be"):
        cufa.emulate_backward(*case.arrays, deterministic="yes")
    with pytest.raises(ValueError, match="nothing to execute"):
        cufa.emulate_backward(*(x[:, :, :0] if x.shape[2] == 20 else x for x in case.arrays))
