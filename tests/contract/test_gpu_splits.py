"""The forward with its keys split, on a GPU: right against float64, the same bits in every run, in graphs and on
several streams at once, and what the planner takes by itself."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_attention, forward_operands, make_inputs, make_problem, poisoned_like

import cufa
from cufa.kernels import KERNELS
from cufa.plan.planner import make_plan

pytestmark = pytest.mark.gpu

SPLITTING = [spec for spec in KERNELS.values() if spec.split_configs]
SPECS = pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
CONFIGS = pytest.mark.parametrize(
    ("spec", "config"),
    [
        pytest.param(spec, config, id=f"{spec.name}-{i}")
        for spec in SPLITTING
        for i, config in enumerate(spec.split_configs)
    ],
)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (900, 20)},
    "top-left": {"mask": cufa.masks.causal("top-left")},
    "chunk of a prefill": {"mask": cufa.masks.causal(777)},
    "soft cap": {"softcap": 8.0, "causal": True},
}


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def cuda():
    from cufa.run.cuda import backend as cuda

    return cuda


def runs_here(cuda, spec):
    if not spec.runs_on(cuda.current_device().arch.capability):
        pytest.skip(f"{spec.name} does not run on this GPU")


def call(cp, q, k, v, **options):
    """Into a poisoned output: NumPy in, NumPy out."""
    q, k, v = (cp.asarray(x) for x in (q, k, v))
    out = poisoned_like(q, cp)
    _, lse = cufa.flash_attention(q, k, v, out=out, return_lse=True, **options)
    return cp.asnumpy(out), cp.asnumpy(lse)


@pytest.mark.sampled(fixed=8)
@CONFIGS
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_tiling(cp, cuda, spec, config, dtype, splits):
    runs_here(cuda, spec)
    head_dim = min(config.max_head_dim, max(64, config.min_head_dim))
    if not spec.fitting((config,), head_dim, cuda.current_device()):
        pytest.skip(f"{config} does not fit head_dim {head_dim} here")
    inputs = make_inputs(2, 8, 2, config.head_rows + 3, 16 * config.block_kv + 7, head_dim, dtype)
    q, k, v = (cp.asarray(x) for x in inputs)
    plan = make_plan(
        make_problem(*inputs, causal=True), cuda.current_device(), spec.algorithm, config, num_splits=splits
    )
    assert plan.num_splits == splits
    given = forward_operands(q, k, v, cp)
    cuda.run(plan, given)
    assert_attention(cp.asnumpy(given["out"]), cp.asnumpy(given["lse"]), *inputs, causal=True)


@SPECS
@pytest.mark.parametrize("scores", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_masks(cp, cuda, spec, scores, layout):
    runs_here(cuda, spec)
    q, k, v = make_inputs(2, 8, 2, 150, 2001, 128, "bfloat16", layout=layout)
    out, lse = call(cp, q, k, v, algorithm=spec.algorithm, num_splits=5, layout=layout, **scores)
    assert_attention(out, lse, q, k, v, layout=layout, **scores)


@SPECS
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((1, 32, 16, 128), (1, 8, 8192, 128)),
        ((1, 32, 128, 128), (1, 8, 8192, 128)),
        ((4, 16, 128, 128), (4, 16, 4096, 128)),
        ((1, 8, 64, 64), (1, 8, 4096, 64)),
        ((1, 8, 33, 256), (1, 2, 3001, 256)),
    ],
)
def test_what_the_planner_takes(cp, cuda, spec, q, k):
    runs_here(cuda, spec)
    batch, heads, seqlen_q, head_dim = q
    inputs = make_inputs(batch, heads, k[1], seqlen_q, k[2], head_dim, "bfloat16")
    out, lse = call(cp, *inputs, algorithm=spec.algorithm, causal=True)
    assert_attention(out, lse, *inputs, causal=True)


@SPECS
def test_more_splits_than_tiles_and_rows_without_keys(cp, cuda, spec):
    runs_here(cuda, spec)
    for shape in ((1, 1, 1, 1, 1, 64), (2, 4, 2, 300, 40, 64)):
        inputs = make_inputs(*shape)
        out, lse = call(cp, *inputs, algorithm=spec.algorithm, num_splits=64, causal=True)
        assert_attention(out, lse, *inputs, causal=True)


@SPECS
def test_a_hundred_runs_have_the_same_bits(cp, cuda, spec):
    """On one stream, and on four at once: each has its own workspace."""
    runs_here(cuda, spec)
    q, k, v = (cp.asarray(x) for x in make_inputs(1, 16, 4, 70, 4099, 128, "bfloat16"))
    options = {"algorithm": spec.algorithm, "num_splits": 7, "causal": True, "return_lse": True}
    first, first_lse = cufa.flash_attention(q, k, v, **options)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    cp.cuda.runtime.deviceSynchronize()
    results = []
    for i in range(100):
        with streams[i % 4]:
            results.append(cufa.flash_attention(q, k, v, **options))
    cp.cuda.runtime.deviceSynchronize()
    for out, lse in results:
        assert bool((out.view(cp.uint16) == first.view(cp.uint16)).all())
        assert bool((lse == first_lse).all())


@SPECS
def test_a_graph_replays_over_new_values(cp, cuda, spec):
    runs_here(cuda, spec)
    first, second = (make_inputs(1, 8, 2, 40, 3000, 64, seed=seed) for seed in (0, 1))
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
    assert_attention(cp.asnumpy(out), None, *second)


@SPECS
def test_as_many_splits_as_one(cp, cuda, spec):
    """A split changes roundings only."""
    runs_here(cuda, spec)
    inputs = make_inputs(1, 8, 8, 96, 5000, 128, "bfloat16", spread=4.0)
    _, whole = call(cp, *inputs, algorithm=spec.algorithm, num_splits=1)
    for splits in (2, 5, 16, 40):
        _, lse = call(cp, *inputs, algorithm=spec.algorithm, num_splits=splits)
        np.testing.assert_allclose(lse, whole, rtol=3e-6, atol=3e-6)
