"""The forward with its keys split over thread blocks, executed on a CPU in checked mode: right against float64, the
same bits in every run, parts for exactly the tiles that are there. And what is planted in it is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from changed_sources import with_changed
from support import assert_attention, make_inputs

import cufa
from cufa.build import compiler
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.run.emulate.calls import emulate

ARCH = "sm_90"
SPLITTING = [spec for spec in KERNELS.values() if spec.split_configs]
CONFIGS = [
    pytest.param(spec, config, id=f"{spec.name}-{i}")
    for spec in SPLITTING
    for i, config in enumerate(spec.split_configs)
]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "top-left, keys that nobody sees": {"mask": cufa.masks.causal("top-left")},
    "diagonal before the keys": {"mask": cufa.masks.causal(-9)},
    "soft cap": {"softcap": 5.0, "causal": True},
}


def check(spec, q, k, v, *, num_splits, scores=None, layout="bhsd", config=None, **options):
    scores = scores or {}
    options = {"mode": "checked", "arch": ARCH, "trace": False, **options}
    run = emulate(
        q,
        k,
        v,
        algorithm=spec.algorithm,
        num_splits=num_splits,
        config=config,
        layout=layout,
        **scores,
        **options,
    )
    assert run.plan.spec is spec
    assert run.plan.split is not None
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_attention(run.out, run.lse, q, k, v, layout=layout, **scores)
    return run


@pytest.mark.sampled(fixed=3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("spec", "config"), CONFIGS)
def test_every_tiling(spec, config, dtype):
    """Three splits of five ragged tiles, over two query blocks; heads share keys, and where they share tiles too, the
    last of four query blocks is ragged."""
    head_dim = max(64, config.min_head_dim)
    if not spec.fitting((config,), head_dim, Device.typical(ARCH)):
        pytest.skip(f"{config} does not fit head_dim {head_dim} on {ARCH}")
    shape = (1, 4, 1, config.head_rows + 5, 4 * config.block_kv + 3, head_dim)
    run = check(spec, *make_inputs(*shape, dtype), num_splits=3, scores={"causal": True}, config=config)
    assert run.plan.launches[0].grid[:2] == (2 * 4 // config.packed_heads, 3)


@pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
@pytest.mark.parametrize("scores", MASKS.values(), ids=MASKS)
def test_masks_and_caps(spec, scores):
    """Batches, shared keys, and rows of the second query block that see other splits than those of the first."""
    inputs = make_inputs(2, 4, 2, 131, 333, 64, "bfloat16", layout="bshd")
    check(spec, *inputs, num_splits=3, scores=scores, layout="bshd")


@pytest.mark.sampled(fixed=2)
@pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 192, 256])
def test_head_dims(spec, head_dim):
    check(spec, *make_inputs(1, 2, 1, 17, 300, head_dim), num_splits=2, scores={"causal": True})


@pytest.mark.parametrize("alignment", [8, 4, 2])
def test_narrow_copies(alignment):
    extra = alignment // 2
    wide = make_inputs(1, 2, 2, 20, 150, 64 + extra)
    run = check(KERNELS["fa2_forward"], *(x[..., extra:] for x in wide), num_splits=2)
    assert run.plan.problem.alignment == alignment


@pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 64), (1, 2, 1, 3, 65, 64), (2, 3, 3, 150, 17, 64)])
def test_more_splits_than_tiles(spec, shape):
    """Query blocks that see fewer tiles than there are splits, or none: rows of zeros whose log-sum-exp is -inf."""
    run = check(spec, *make_inputs(*shape), num_splits=40, scores={"causal": True})
    assert run.plan.num_splits == math.ceil(shape[4] / run.plan.config.block_kv)


@pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
def test_every_run_gives_the_same_bits(spec):
    """Whatever order warps and blocks run in; and as many splits as one give what one gives, but for rounding."""
    inputs = make_inputs(1, 4, 1, 40, 700, 64, "bfloat16", spread=3.0)
    runs = [
        check(spec, *inputs, num_splits=4, schedule=order, threads=n)
        for order, n in (("ascending", 1), ("descending", 2), (7, 3))
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.out.view(np.uint16), runs[0].out.view(np.uint16))
        np.testing.assert_array_equal(run.lse.view(np.uint32), runs[0].lse.view(np.uint32))
    whole = emulate(*inputs, algorithm=spec.algorithm, num_splits=1, arch=ARCH)
    assert whole.plan.split is None
    np.testing.assert_allclose(runs[0].lse, whole.lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("spec", SPLITTING, ids=lambda spec: spec.name)
def test_records_are_of_every_split_that_has_tiles(spec):
    """Each tile that the schedule visits is visited by one split of its query block, in the order of keys."""
    inputs = make_inputs(1, 4, 2, 150, 400, 64)
    run = check(spec, *inputs, num_splits=3, scores={"causal": True}, trace=True)
    visits, packed = run.plan.schedule.visits, run.plan.config.packed_heads
    for block, count in enumerate(visits):
        for head in range(0, 4, packed):
            mine = run.records[(run.records["head"] == head) & (run.records["q_block"] == block)]
            mine = np.sort(mine, order="first_tile")
            each = -(-count // 3)
            assert mine["tiles_visited"].sum() == count
            assert len(mine) == -(-count // each)
            assert mine["first_tile"].tolist() == [each * i for i in range(len(mine))]


def test_nan_and_inf_stay_in_their_rows():
    """A row of a part that is there, of a query whose values are not finite, does not reach its neighbours."""
    q, k, v = make_inputs(1, 2, 1, 20, 300, 64, "bfloat16")
    q[0, 1, 3] = np.nan
    for spec in SPLITTING:
        run = emulate(q, k, v, algorithm=spec.algorithm, num_splits=3, arch=ARCH)
        bad = np.isnan(run.out.astype(np.float32)).any(-1)
        assert bad.sum() == 1
        assert bad[0, 1, 3]


# --- Planted bugs: what the tests above would say ---------------------------------------------------------

PLANTED = {
    "a split is lost": (
        "forward/splits.cuh",
        "(count + each - 1) / each, vector",
        "(count + each - 1) / each - 1, vector",
        True,
    ),
    "a split takes its neighbour's first tile": (
        "forward/splits.cuh",
        "part.first = min(tiles.first + split * each, tiles.end);",
        "part.first = min(tiles.first + split * each + (split > 0), tiles.end);",
        True,
    ),
    "the merge weighs in the wrong base": (
        "shared/parts.cuh",
        "weight = ex2(m_part - m_new);",
        "weight = ex2((m_part - m_new) * 1.44269504f);",
        True,
    ),
    "the log-sum-exp is left in base 2": (
        "shared/softmax.cuh",
        "NEG_INF : (m + lg2(l)) * LN_2;",
        "NEG_INF : m + lg2(l);",
        True,
    ),
    "a part's sum is one lane's": (
        "forward/fa3/consumer_items.cuh",
        "      softmax.reduce_sum();\n      leave_part",
        "      leave_part",
        True,
    ),
    "the merge does not wait for the splits": (
        "forward/fa3/kernel.cu",
        "    grid_await_previous();\n",
        "",
        False,
    ),
    "a mask starts at the row of another head": (
        "forward/splits.cuh",
        "PACKED_HEADS == 1 ? row : row % HEAD_ROWS; }",
        "row; }",
        True,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, tmp_path, monkeypatch):
    file, line, changed, is_wrong = PLANTED[name]
    assert (compiler.SOURCE_DIR / file).read_text(encoding="utf-8").count(line) == 1
    sources = with_changed(tmp_path, file, lambda text: text.replace(line, changed))
    monkeypatch.setattr(compiler, "SOURCE_DIR", sources)
    spec = KERNELS["fa3_forward"]
    config = next(c for c in spec.split_configs if c.packed_heads == 4 and c.fits(64))
    q, k, v = make_inputs(1, 4, 1, 16, 5 * config.block_kv, 64, spread=3.0)
    run = emulate(
        q,
        k,
        v,
        algorithm="fa3",
        num_splits=3,
        causal=True,
        mode="checked",
        arch=ARCH,
        trace=False,
        config=config,
    )
    if is_wrong:
        with pytest.raises(AssertionError):
            assert_attention(run.out, run.lse, q, k, v, causal=True)
    else:
        assert any("no griddepcontrol.wait comes before" in found.message for found in run.findings)
