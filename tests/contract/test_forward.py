"""The contract of the forward: out and lse within the bound of support.assert_attention of float64, for every kernel,
dtype, tiling and shape; the same bits in every run; tiles as the schedule says. (Masks: test_forward_masks.py; values
and memory: test_forward_values.py.)

Executed kernels run in checked mode: a race, a deadlock or an access out of range fails the test, too.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, backends, contract, variants
from forward_contract import BOTH, check, one_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_inputs

from cufa.plan.dense import FORWARD
from cufa.plan.planner import fitting_configs
from cufa.run.emulate.calls import Execution, emulate

# --- Shapes -----------------------------------------------------------------------------------------------

#: (batch, heads, kv_heads, seqlen_q, seqlen_k) around the tiles of each backend.
SHAPES = {
    "cpu": [
        (2, 4, 2, *lengths)
        for lengths in [
            (1, 1), (1, 97), (97, 1), (15, 23), (16, 24), (17, 25), (31, 49), (53, 53), (5, 211), (211, 5), (48, 48)
        ]
    ],
    "emulate": [(2, 2, 1, 1, 1), (2, 4, 2, 1, 131), (2, 2, 1, 150, 17), (2, 3, 1, 67, 101)],
    "gpu": [
        (1, 2, 2, *lengths)
        for lengths in [
            (1, 1), (1, 1000), (1000, 1), (7, 13), (127, 129), (128, 128), (257, 63), (3, 2048), (2048, 3), (509, 521)
        ]
    ],
}  # fmt: skip


@pytest.mark.sampled(
    on="gpu", dated=20, pairs=[("spec", "shape"), ("spec", "dtype"), ("spec", "causal"), ("shape", "causal")]
)
@contract(
    "shape, causal",
    cpu=itertools.product(SHAPES["cpu"], BOTH),
    emulate=itertools.product(SHAPES["emulate"], [True]),
    gpu=itertools.product(SHAPES["gpu"], BOTH),
)
def test_lengths(backend, spec, dtype, precision, shape, causal):
    layout, head_dim = ("bhsd", 24) if backend is CPU else ("bshd", 64)
    inputs = make_inputs(*shape, head_dim, dtype, layout=layout, seed=shape[3])
    check(backend, spec, precision, *inputs, causal=causal, layout=layout)


@pytest.mark.sampled(on="gpu", dated=4, pairs=[("spec", "heads")])
@contract(
    "heads, causal",
    cpu=itertools.product([(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (12, 4)], BOTH),
    gpu=itertools.product([(1, 1), (6, 2), (8, 1), (5, 5)], [True]),
    serves=lambda backend, spec, dtype, *_: backend is GPU or dtype == "float32",
)
def test_grouped_heads(backend, spec, dtype, precision, heads, causal):
    """Query heads and key/value heads."""
    inputs = make_inputs(3, *heads, 70, 90, 64, dtype)
    check(backend, spec, precision, *inputs, causal=causal)
    if backend is CPU:  # several heads to a tile
        check(backend, spec, precision, *inputs, causal=causal, config=FORWARD.cpu_config)


@pytest.mark.sampled(on="gpu", dated=40)
@pytest.mark.sampled(on="emulate", fixed=6)
@contract(
    "head_dim",
    cpu=[8, 40, 72, 128, 256],
    emulate=[8, 40, 96, 128, 192, 256],
    gpu=range(8, 257, 8),
    serves=lambda backend, spec, dtype, *_: (
        backend is not CPU or (spec.algorithm, dtype) == ("fa2", "float32")
    ),
)
def test_head_dims(backend, spec, dtype, precision, head_dim):
    if backend is not GPU:
        inputs = make_inputs(1, 1, 1, 70, 90, head_dim, dtype)
        check(backend, spec, precision, *inputs, causal=True, trace=False)
        return
    # Layout and mask alternate over head dims: both are covered for every kernel, at half the compiles.
    layout = ("bhsd", "bshd")[head_dim // 8 % 2]
    for causal in BOTH if head_dim in (64, 128, 256, 40) else ((head_dim // 16) % 2 == 0,):
        inputs = make_inputs(2, 4, 2, 150, 203, head_dim, dtype, layout=layout, seed=head_dim)
        check(backend, spec, precision, *inputs, causal=causal, layout=layout)


def tilings(backend):
    configs = {(spec, config) for _, spec, *_ in variants(backend) for config in spec.configs}
    return itertools.product(sorted({config for _, config in configs}, key=str), BOTH)


@pytest.mark.sampled(on="gpu", dated=10, pairs=[("spec", "config"), ("spec", "dtype"), ("spec", "causal")])
@pytest.mark.sampled(on="emulate", fixed=24, dated=8, pairs=[("spec", "dtype"), ("spec", "precision")])
@contract(
    "config, causal",
    emulate=tilings(EMULATE),
    gpu=tilings(GPU),
    serves=lambda backend, spec, dtype, precision, config, causal: config in spec.configs,
)
def test_every_tiling(backend, spec, dtype, precision, config, causal):
    """Executed: two query blocks and three key blocks, the last ones ragged. Without a mask as a GPU runs it, causal
    with records of the tiles: one build per case. On a GPU: every edge of a tile, at both ends of its head dims."""
    bq, bk, least = config.block_q, config.block_kv, max(config.min_head_dim, 64)
    if backend is EMULATE:
        if config not in fitting_configs(spec, least, backend.device):
            pytest.skip(f"{config} does not fit head_dim {least} on sm_90")
        inputs = make_inputs(2, 2, 1, bq + 5, 2 * bk + 3, least, dtype)
        check(backend, spec, precision, *inputs, causal=causal, config=config, trace=causal)
        return
    edges = [
        (1, 1), (bq, bk), (bq - 1, bk + 1), (bq + 1, bk - 1), (2 * bq + 1, 3 * bk), (1, 2 * bk + 1),
        (bq, 1),
    ]  # fmt: skip
    for head_dim in sorted({least if config.max_head_dim >= 64 else 8, config.max_head_dim}):
        if config not in fitting_configs(spec, head_dim, backend.device):
            continue  # made for another architecture's shared memory
        for lengths in edges:
            inputs = make_inputs(1, 2, 1, *lengths, head_dim, dtype, seed=sum(lengths))
            done = check(backend, spec, precision, *inputs, causal=causal, config=config)
            assert done.plan.config == config


@backends("gpu")
def test_any_shape(backend):
    @settings(max_examples=150)
    @given(
        variant=st.sampled_from(variants(GPU)),
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 4),
        lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
        head_dim=st.sampled_from([8, 40, 64, 96, 128]),
        causal=st.booleans(),
        layout=st.sampled_from(["bhsd", "bshd"]),
        spread=st.sampled_from([0.1, 1.0, 10.0]),
    )
    def run(variant, batch, kv_heads, groups, lengths, head_dim, causal, layout, spread):
        _, spec, dtype, precision = variant
        shape = batch, kv_heads * groups, kv_heads, *lengths, head_dim
        inputs = make_inputs(*shape, dtype, layout=layout, spread=spread)
        check(backend, spec, precision, *inputs, causal=causal, layout=layout)

    run()


# --- The same bits, counters ------------------------------------------------------------------------------


@contract(emulate=True, gpu=True)
def test_same_bits_in_every_run(backend, spec, dtype, precision):
    """Executed: whatever order warps run in, and whenever copies land."""
    shape = (1, 2, 1, 100, 200, 64) if backend is EMULATE else (4, 8, 4, 333, 777, 64)
    inputs = make_inputs(*shape, dtype)
    orders = [None] * 5
    first_order = None
    if backend is EMULATE:
        first_order = Execution("checked", copies="early", threads=1)
        orders = [Execution("checked", order, "late", 2) for order in ("ascending", "descending", 1, 2)]
    first = check(backend, spec, precision, *inputs, causal=True, execution=first_order)
    for order in orders:
        again = check(backend, spec, precision, *inputs, causal=True, execution=order)
        assert again.out.tobytes() == first.out.tobytes() and again.lse.tobytes() == first.lse.tobytes()


@pytest.mark.sampled(dated=4, pairs=[("spec", "causal"), ("lengths", "causal")])
@contract(
    "lengths, causal",
    gpu=itertools.product([(1, 1), (300, 300), (129, 400), (400, 129), (64, 1000), (513, 512)], BOTH),
    serves=lambda *variant: one_dtype(*variant) and variant[1].algorithm != "naive",
)
def test_tile_counters_equal_the_schedule(backend, spec, dtype, precision, lengths, causal):
    inputs = make_inputs(2, 2, 1, *lengths, 64, dtype)
    for config in fitting_configs(spec, 64, backend.device):
        done = check(backend, spec, precision, *inputs, causal=causal, config=config, trace=True)
        records = done.records
        assert (records["end_ns"] >= records["start_ns"]).all() and (records["start_ns"] > 0).all()


@contract("causal", emulate=BOTH, serves=one_dtype)
def test_counters(backend, spec, dtype, precision, causal):
    """Products and bytes follow from the tiles visited."""
    q, k, v = make_inputs(1, 2, 2, 256, 256, 64, dtype)
    run = emulate(q, k, v, algorithm=spec.algorithm, precision=precision, causal=causal, mode="counted")
    assert run.totals["bank_conflicts"] == 0 or spec.name == "naive"
    assert run.totals["global_write_bytes"] >= run.out.nbytes + run.lse.nbytes
    assert run.totals["global_read_bytes"] >= q.nbytes + k.nbytes + v.nbytes
    for launch in run.plan.launches:
        assert len(run.counters[launch.entry]) == int(np.prod(launch.grid))
    if precision is None and spec.name != "naive":
        config = run.plan.config
        products = run.totals["tiles_visited"] * 2 * config.block_q * config.block_kv * 64
        # A warpgroup of FA3 skips tiles of its own 64 rows.
        least = products / 2 if spec.name == "fa3_forward" else products
        assert least <= run.totals["products"] <= products
        assert run.totals["exponentials"] >= run.totals["products"] / 128
