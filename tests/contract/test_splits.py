"""The contract of the forward with its keys split over thread blocks: right against float64, the same bits in every
run, in graphs and on several streams, a part for exactly the tiles that are there. (How many splits the planner takes:
test_forward_splits.py; e4m3: test_float8_kernels.py.)"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from backends import EMULATE, GPU, MARKS, backends
from compositions import relative
from support import assert_attention, make_inputs

import cufa
from cufa.kernels import KERNELS
from cufa.run.emulate.calls import Execution

BACKENDS = {"emulate": EMULATE, "gpu": GPU}
SPLITTING = [spec for spec in KERNELS.values() if spec.split_configs and not spec.scales]


def each(*names, **more):
    """Each kernel that splits, on each of these backends, with each value of ``more``; a ``config`` is one of the
    kernel's."""
    cases = itertools.product(names, SPLITTING, *more.values())
    served = [x for x in cases if "config" not in more or x[2] in x[1].split_configs]
    made = [
        pytest.param(BACKENDS[name], spec, *rest, marks=MARKS[name], id="-".join(map(str, (name, spec.name, *rest))))
        for name, spec, *rest in served
    ]  # fmt: skip
    return pytest.mark.parametrize(("backend", "spec", *more), made)


def check(backend, spec, q, k, v, *, num_splits, config=None, trace=False, execution=None, **scores):
    """Also that the GPU at hand runs the kernel."""
    if not spec.runs_on(backend.device.arch.capability):
        pytest.skip(f"{spec.name} does not run on this GPU")
    how = {"num_splits": num_splits, "config": config, "trace": trace, "execution": execution}
    done = backend.forward(q, k, v, algorithm=spec.algorithm, **how, **scores)
    assert_attention(done.out, done.lse, q, k, v, **scores)
    if done.plan is not None:
        assert done.plan.spec is spec and (done.plan.split is not None or num_splits == 1)
    return done


# --- Results ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(on="emulate", fixed=3)
@pytest.mark.sampled(on="gpu", fixed=8)
@each(
    "emulate", "gpu", config=dict.fromkeys(c for spec in SPLITTING for c in spec.split_configs),
    dtype=["float16", "bfloat16"], splits=[1, 3, 16],
)  # fmt: skip
def test_every_tiling(backend, spec, config, dtype, splits):
    """Executed: five ragged tiles over two query blocks; heads share keys, and where they share tiles too, the last
    of four query blocks is ragged."""
    head_dim = min(config.max_head_dim, max(64, config.min_head_dim))
    if not spec.fitting((config,), head_dim, backend.device):
        pytest.skip(f"{config} does not fit head_dim {head_dim} here")
    if backend is EMULATE:
        shape = 1, 4, 1, config.head_rows + 5, 4 * config.block_kv + 3
    else:
        shape = 2, 8, 2, config.head_rows + 3, 16 * config.block_kv + 7
    inputs = make_inputs(*shape, head_dim, dtype)
    done = check(backend, spec, *inputs, num_splits=splits, causal=True, config=config)
    assert done.plan.num_splits == min(splits, 5 if backend is EMULATE else splits)
    if backend is EMULATE and splits == 3:
        assert done.plan.launches[0].grid[:2] == (2 * 4 // config.packed_heads, 3)


#: On an executor of 333 keys, on a GPU of 2001.
SCORES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window": (70, 30)}, {"window": (900, 20)}),
    "top-left, unseen keys": ({"mask": cufa.masks.causal("top-left")},) * 2,
    "another diagonal": ({"mask": cufa.masks.causal(-9)}, {"mask": cufa.masks.causal(777)}),
    "soft cap": ({"softcap": 5.0, "causal": True}, {"softcap": 8.0, "causal": True}),
}


@each("emulate", "gpu", scores=SCORES, layout=["bshd", "bhsd"])
def test_masks_and_caps(backend, spec, scores, layout):
    """Batches, shared keys, and rows of the second query block that see other splits than those of the first."""
    shape, splits = (((2, 4, 2, 131, 333, 64), 3), ((2, 8, 2, 150, 2001, 128), 5))[backend is GPU]
    inputs = make_inputs(*shape, "bfloat16", layout=layout)
    check(backend, spec, *inputs, num_splits=splits, layout=layout, **SCORES[scores][backend is GPU])


def changes_of(heads):
    """What changes scores or weights, with arrays that differ from head to head."""
    some = np.random.default_rng(3).standard_normal((heads, 40)).astype(np.float32)
    found = {
        "ALiBi": {"alibi_slopes": some[:, 0] / 5},
        "sink": {"sink": np.where(np.arange(heads) % 4, some[:, 1], -np.inf).astype(np.float32)},
        "dropout": {"dropout": 0.3, "seed": 2**63 + 5},
        "score": {"score": cufa.score(relative, table=some)},
    }
    return found | {
        "all": {name: x for change in found.values() for name, x in change.items()} | {"softcap": 4.0}
    }


@each("emulate", "gpu", changes=[*changes_of(4)], queries=[16, 70])
def test_with_other_changes(backend, spec, changes, queries):
    """16 queries: heads share tiles. A sink joins once, however many splits, and in rows that see no key (under the
    second mask, rows from 61 on)."""
    if not spec.runs_on(backend.device.arch.capability):
        pytest.skip(f"{spec.name} does not run on this GPU")
    batch, heads, keys, most = ((2, 4, 300, 3), (1, 32, 3001, 24))[backend is GPU]
    first, packed = keys // 128 * 128 - 4, 4 if queries == 16 else 1
    q, k, v = make_inputs(batch, heads, heads // 4, queries, keys, 64, "bfloat16")
    options, more = changes_of(heads)[changes], {}
    if backend is EMULATE:
        configs = spec.fitting(spec.split_configs, 64, backend.device)
        more = {"mode": "checked", "config": next(x for x in configs if x.packed_heads == packed)}
    for splits, mask in (
        (most, {"causal": True}),
        (1000, {"mask": cufa.masks.window(keys, 0, keys + first)}),
    ):
        how = {"algorithm": spec.algorithm, "num_splits": splits, **mask, **options}
        if backend is EMULATE:
            done = cufa.emulate(q, k, v, **how, **more)
            assert not done.findings and done.plan.num_splits > 1
            out, lse = done.results["out"], done.results["lse"]
        else:
            planned = {name: x for name, x in how.items() if name != "seed"}
            assert cufa.plan(q.shape, k.shape, dtype="bfloat16", device="cuda", **planned).num_splits > 1
            out, lse = cufa.flash_attention(q, k, v, return_lse=True, device="cuda", **how)
        exact, exact_lse = cufa.attention_reference(q, k, v, return_lse=True, **mask, **options)
        assert np.abs(out.astype(np.float64) - exact).max() < 2e-2 * np.abs(exact).max()
        np.testing.assert_allclose(lse, exact_lse, atol=2e-3, rtol=2e-3)


#: On an executor of 300 keys, on a GPU of 3001; 70 queries, two sequences.
LISTED = {
    "padded": lambda keys: {
        "seqlens_q": [9, 70],
        "seqlens_k": [keys // 3, keys - 5],
        "causal": True,
        "sink": [0.5] * 4,
    },
    "no keys": lambda keys: {"seqlens_k": [0, keys], "alibi_slopes": [0.1, 0, 0.2, 0.3], "softcap": 9.0},
    "streaming": lambda keys: {"mask": cufa.masks.streaming(5, 10)},
    "columns": lambda keys: {"mask": cufa.masks.evict(np.arange(keys) % 90)},
    "bits": lambda keys: {
        "mask": np.random.default_rng(0).random((2, 1, 70, keys)) < 0.02,
        "dropout": 0.2,
        "seed": 3,
    },
    "a tile alone": lambda keys: {"mask": np.arange(keys) == np.full((70, 1), keys // 2)},
}


@each("emulate", "gpu", listed=LISTED)
def test_lengths_and_irregular_masks(backend, spec, listed):
    """Splits in which a query block sees no tile; rows of padding."""
    if not spec.runs_on(backend.device.arch.capability):
        pytest.skip(f"{spec.name} does not run on this GPU")
    keys, most = ((300, 3), (3001, 24))[backend is GPU]
    q, k, v = make_inputs(2, 4, 2, 70, keys, 64, "bfloat16")
    options = {
        name: np.array(x, np.int32 if "seq" in name else np.float32) if isinstance(x, list) else x
        for name, x in LISTED[listed](keys).items()
    }
    for splits in (most, 1000):
        how = {"algorithm": spec.algorithm, "num_splits": splits, **options}
        if backend is EMULATE:
            done = cufa.emulate(q, k, v, mode="checked", **how)
            assert not done.findings and done.plan.num_splits > 1
            out, lse = done.results["out"], done.results["lse"]
        else:
            out, lse = cufa.flash_attention(q, k, v, return_lse=True, device="cuda", **how)
        exact, exact_lse = cufa.attention_reference(q, k, v, return_lse=True, **options)
        assert np.abs(out.astype(np.float64) - exact).max() < 2e-2 * np.abs(exact).max()
        np.testing.assert_allclose(lse, exact_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.sampled(fixed=2)
@each("emulate", head_dim=[8, 40, 96, 128, 192, 256])
def test_head_dims(backend, spec, head_dim):
    check(backend, spec, *make_inputs(1, 2, 1, 17, 300, head_dim), num_splits=2, causal=True)


@pytest.mark.parametrize("alignment", [8, 4, 2])
@backends("emulate")
def test_narrow_copies(backend, alignment):
    extra = alignment // 2
    wide = make_inputs(1, 2, 2, 20, 150, 64 + extra)
    done = check(backend, KERNELS["fa2_forward"], *(x[..., extra:] for x in wide), num_splits=2)
    assert done.plan.problem.alignment == alignment


@each("gpu", shape=[
    ((1, 32, 16, 128), (1, 8, 8192, 128)), ((1, 32, 128, 128), (1, 8, 8192, 128)),
    ((4, 16, 128, 128), (4, 16, 4096, 128)), ((1, 8, 64, 64), (1, 8, 4096, 64)), ((1, 8, 33, 256), (1, 2, 3001, 256)),
])  # fmt: skip
def test_what_the_planner_takes(backend, spec, shape):
    (batch, heads, seqlen_q, head_dim), k = shape
    inputs = make_inputs(batch, heads, k[1], seqlen_q, k[2], head_dim, "bfloat16")
    check(backend, spec, *inputs, num_splits=None, causal=True)


@each("emulate", "gpu", shape=[(1, 1, 1, 1, 1, 64), (1, 2, 1, 3, 65, 64), (2, 3, 3, 150, 17, 64)])
def test_more_splits_than_tiles(backend, spec, shape):
    """Query blocks that see fewer tiles than there are splits, or none: rows of zeros whose log-sum-exp is -inf."""
    done = check(backend, spec, *make_inputs(*shape), num_splits=40, causal=True)
    if backend is EMULATE:
        assert done.plan.num_splits == math.ceil(shape[4] / done.plan.config.block_kv)


# --- The same bits ----------------------------------------------------------------------------------------


@each("emulate")
def test_every_run_gives_the_same_bits(backend, spec):
    """Whatever order warps and blocks run in; and as many splits as one give what one gives, but for rounding."""
    inputs = make_inputs(1, 4, 1, 40, 700, 64, "bfloat16", spread=3.0)
    first, *runs = (
        check(backend, spec, *inputs, num_splits=4, execution=Execution("checked", order, threads=n))
        for order, n in (("ascending", 1), ("descending", 2), (7, 3))
    )
    for run in runs:
        assert run.out.tobytes() == first.out.tobytes() and run.lse.tobytes() == first.lse.tobytes()
    whole = check(backend, spec, *inputs, num_splits=1)
    np.testing.assert_allclose(first.lse, whole.lse, rtol=2e-6, atol=2e-6)


@each("gpu")
def test_a_hundred_runs_have_the_same_bits(backend, spec, cp):
    """On one stream, and on four at once: each has its own workspace."""
    inputs = make_inputs(1, 16, 4, 70, 4099, 128, "bfloat16")
    options = {"num_splits": 7, "causal": True}
    first = check(backend, spec, *inputs, **options)
    q, k, v = (cp.asarray(x) for x in inputs)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    cp.cuda.runtime.deviceSynchronize()
    results = []
    for i in range(100):
        with streams[i % 4]:
            how = {"algorithm": spec.algorithm, "return_lse": True}
            results.append(cufa.flash_attention(q, k, v, **how, **options))
    cp.cuda.runtime.deviceSynchronize()
    for out, lse in results:
        assert out.get().tobytes() == first.out.tobytes() and lse.get().tobytes() == first.lse.tobytes()


@each("gpu")
def test_a_graph_replays_over_new_values(backend, spec, cp):
    first, second = (make_inputs(1, 8, 2, 40, 3000, 64, seed=seed) for seed in (0, 1))
    check(backend, spec, *first, num_splits=6)
    q, k, v = (cp.asarray(x) for x in first)
    out = cp.empty_like(q)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cufa.flash_attention(q, k, v, out=out, algorithm=spec.algorithm, num_splits=6)
        stream.begin_capture()
        cufa.flash_attention(q, k, v, out=out, algorithm=spec.algorithm, num_splits=6)
        graph = stream.end_capture()
        for x, new in zip((q, k, v), second, strict=True):
            x.set(new)
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert_attention(out.get(), None, *second)


# --- Tiles, bad numbers -----------------------------------------------------------------------------------


@each("emulate")
def test_records_are_of_every_split_that_has_tiles(backend, spec):
    """Each tile that the schedule visits is visited by one split of its query block, in the order of keys."""
    inputs = make_inputs(1, 4, 2, 150, 400, 64)
    done = check(backend, spec, *inputs, num_splits=3, causal=True, trace=True)
    visits, packed, records = done.plan.schedule.visits, done.plan.config.packed_heads, done.records
    for block, count in enumerate(visits):
        for head in range(0, 4, packed):
            mine = records[(records["head"] == head) & (records["q_block"] == block)]
            mine, each_split = np.sort(mine, order="first_tile"), -(-count // 3)
            assert mine["tiles_visited"].sum() == count
            assert len(mine) == -(-count // each_split)
            assert mine["first_tile"].tolist() == [each_split * i for i in range(len(mine))]


@each("emulate")
def test_nan_stays_in_its_row(backend, spec):
    """A query that is not finite does not reach its neighbours in a part."""
    q, k, v = make_inputs(1, 2, 1, 20, 300, 64, "bfloat16")
    q[0, 1, 3] = np.nan
    out = backend.forward(q, k, v, algorithm=spec.algorithm, num_splits=3).out
    bad = np.isnan(out.astype(np.float32)).any(-1)
    assert bad.sum() == 1 and bad[0, 1, 3]
