"""The forward by NumPy, beyond what every backend promises (test_forward.py): tiles of any size, bad numbers that reach
only rows which see them, any strides, and what an observer is told of each tile."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import ALGORITHMS, TILED, attend, plan_for
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS
from support import DTYPES, EPSILON, make_inputs, poisoned_like

from cufa import attention_reference
from cufa.kernels import TileConfig
from cufa.plan.dense import FORWARD
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import default_scale
from cufa.run.cpu import forward as cpu


def within_rounding(out, lse, q, k, v, num_tiles, **scores) -> None:
    """A bound from the arithmetic alone, for tiles so small that steps add up: each tile rescales O and l,
    each score is a sum of head_dim products."""
    expected, expected_lse = attention_reference(q, k, v, return_lse=True, **scores)
    wide = EPSILON["float64" if q.dtype == np.float64 else "float32"]
    q, k, v = (np.abs(x.astype(np.float64)).max() for x in (q, k, v))
    head_dim = out.shape[-1]
    score_error = wide * head_dim * (q * k * head_dim**0.5)
    relative = 4 * wide * (num_tiles + 8) + 2 * score_error
    atol = v * relative + EPSILON[str(out.dtype)] * np.abs(expected).max()
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, rtol=EPSILON["float32"], atol=relative)


@given(data=st.data())
@settings(max_examples=75)
def test_any_shape_in_any_tiles(data):
    draw = data.draw
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]))
    length = st.integers(1, 40)
    inputs = make_inputs(
        draw(st.integers(1, 3)), heads, kv_heads, draw(length), draw(length), draw(st.sampled_from([8, 24])),
        draw(st.sampled_from(sorted(DTYPES))), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    block = st.sampled_from([1, 2, 3, 8, 16, 64])
    config = TileConfig(draw(block), draw(block), 0)
    algorithm = draw(st.sampled_from(ALGORITHMS))
    scores = {"mask": draw(BANDS), "softcap": draw(st.sampled_from([None, None, 0.5, 30.0]))}
    out, lse = attend(*inputs, algorithm=algorithm, config=config, **scores)
    within_rounding(out, lse, *inputs, -(-inputs[1].shape[2] // config.block_kv), **scores)


# --- Infinities, NaN, rows that see nothing ---------------------------------------------------------------


def same_special_values(q, k, v, algorithm, causal) -> None:
    """NaN where the reference has NaN, infinities likewise, numbers close; for out and lse."""
    got = attend(q, k, v, algorithm=algorithm, causal=causal)
    expected = attention_reference(q, k, v, causal=causal, return_lse=True)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 20, 59])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinite_and_nan_inputs(algorithm, position, bad, causal):
    """One bad number in each operand in turn, in the first, a middle and the last tile."""
    for target in range(3):
        inputs = make_inputs(1, 2, 2, 60, 60, 8, "float32", seed=target)
        inputs[target][0, 1, position, 3] = bad
        same_special_values(*inputs, algorithm, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_whose_every_score_is_minus_infinity(algorithm, causal):
    q, k, v = make_inputs(1, 2, 2, 60, 60, 8, "float32")
    k[...] = np.abs(k)
    q[0, 0, 30] = -np.inf
    v[0, 0, 5, 3] = np.inf  # which the row sees, with a weight of 0 over a sum of 0
    same_special_values(q, k, v, algorithm, causal)
    out, lse = attend(q, k, v, algorithm=algorithm, causal=causal)
    assert (out[0, 0, 30] == 0).all() and lse[0, 0, 30] == -np.inf


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("mask", "first", "end"), [(CAUSAL, 0, 37), (Band(10, 5), 20, 61)], ids=["causal", "window"]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_that_are_not_seen_play_no_part(algorithm, mask, first, end, bad):
    """Bad keys and values outside of first ... end-1: in boundary tiles, in wholly masked ones, and in tiles that some
    rows skip. Rows that see one are NaN."""
    q, k, v = make_inputs(2, 4, 2, 90, 90, 8, "float32")
    clean, clean_lse = attend(q, k, v, algorithm=algorithm, mask=mask)
    for x in (k, v):
        x[:, :, :first], x[:, :, end:] = bad, bad
    out, lse = attend(q, k, v, algorithm=algorithm, mask=mask)
    seen = mask.dense(90, 90)
    unharmed = ~(seen[:, :first].any(axis=1) | seen[:, end:].any(axis=1))
    assert 20 < unharmed.sum() < 90
    np.testing.assert_allclose(out[:, :, unharmed], clean[:, :, unharmed], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, :, unharmed], clean_lse[:, :, unharmed], rtol=1e-6)
    assert np.isnan(out[:, :, ~unharmed]).all()


def test_the_callers_error_state_is_untouched():
    q, k, v = make_inputs(1, 2, 2, 40, 9, 8, "float16", spread=1e4)
    with np.errstate(all="raise"):
        attend(q, k, v, causal=True)
        assert set(np.geterr().values()) == {"raise"}


# --- Memory layout ----------------------------------------------------------------------------------------


def padded(x: np.ndarray) -> np.ndarray:
    """The same values inside a larger array of NaN."""
    around = np.full([n + 3 for n in x.shape], np.nan).astype(x.dtype)
    view = around[1:-2, 2:-1, 1:-2, 2:-1]
    view[...] = x
    return view


def misaligned(x: np.ndarray) -> np.ndarray:
    buffer = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    buffer[...] = x
    return buffer


LAYOUTS = {
    "bshd": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "padded": padded,
    "reversed": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "column-major": np.asfortranarray,
    "every other": lambda x: np.repeat(np.repeat(x, 2, axis=2), 2, axis=3)[:, :, ::2, ::2],
    "misaligned": misaligned,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_strides(algorithm, dtype, layout):
    inputs = make_inputs(2, 4, 2, 33, 50, 16, dtype)
    expected, expected_lse = attend(*inputs, algorithm=algorithm, causal=True)
    q, k, v = (LAYOUTS[layout](x) for x in inputs)
    out = LAYOUTS[layout](poisoned_like(q))
    lse = LAYOUTS[layout](poisoned_like(expected_lse)[..., None])[..., 0]
    cpu.run(plan_for(q, k, algorithm, causal=True), q, k, v, out, lse)
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_nothing_is_written_around_out():
    q, k, v = make_inputs(1, 2, 2, 20, 30, 8, "float32")
    around = np.full((3, 4, 22, 10), 7.0, np.float32)
    cpu.run(plan_for(q, k), q, k, v, around[1:2, 1:3, 1:-1, 1:-1], None)
    assert (around == 7).sum() == around.size - q.size


# --- Tiles ------------------------------------------------------------------------------------------------


def record(q, k, v, **options):
    tiles = []
    result = attend(q, k, v, observer=tiles.append, **options)
    return tiles, result


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(20, 3), Band(5, None, 30)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(60, 60), (17, 100), (100, 17), (1, 1)])
@pytest.mark.parametrize("algorithm", TILED)
def test_visited_tiles_are_the_schedules_in_the_algorithms_order(algorithm, seqlen_q, seqlen_k, mask):
    q, k, v = make_inputs(2, 4, 2, seqlen_q, seqlen_k, 8, "float32")
    tiles, _ = record(q, k, v, algorithm=algorithm, mask=mask)
    ranges = plan_for(q, k, algorithm, mask=mask).schedule.ranges
    visited = [
        (i, j) for i, (a, b) in enumerate(zip(ranges.first, ranges.end, strict=True)) for j in range(a, b)
    ]
    if algorithm == "fa1":  # keys outermost
        visited.sort(key=lambda tile: (tile[1], tile[0]))
    expected = [(b, h, i, j) for b in range(2) for h in range(4) for i, j in visited]
    assert [(x.batch, x.head, x.q_block, x.kv_block) for x in tiles] == expected


@pytest.mark.parametrize("algorithm", TILED)
def test_every_observed_number_is_that_of_exact_attention_over_the_keys_so_far(algorithm):
    """S and P of the tile; alpha; m and l, which go on from the row's last tile; O over the tiles that its rows have
    seen, which is normalised in FA1 alone."""
    q, k, v = make_inputs(1, 2, 1, 50, 80, 8, "float64")
    tiles, _ = record(q, k, v, algorithm=algorithm, causal=True)
    visible = CAUSAL.dense(50, 80)
    S = np.where(visible, default_scale(8) * q[0] @ k[0].mT, -np.inf)
    seen, state = {}, {}
    for tile in tiles:
        rows = slice(16 * tile.q_block, min(16 * (tile.q_block + 1), 50))
        columns = slice(24 * tile.kv_block, min(24 * (tile.kv_block + 1), 80))
        np.testing.assert_allclose(tile.S, S[tile.head, rows, columns], rtol=1e-12, atol=1e-14)
        m, l = state.get((tile.head, tile.q_block), (-np.inf, 0))
        np.testing.assert_array_equal(tile.m_before, np.broadcast_to(m, tile.m_before.shape))
        np.testing.assert_array_equal(tile.l_before, np.broadcast_to(l, tile.l_before.shape))
        state[tile.head, tile.q_block] = tile.m_after, tile.l_after
        keys = seen.setdefault((tile.head, tile.q_block), [])
        keys.extend(range(columns.start, columns.stop))
        so_far, m = S[tile.head, rows][:, keys], tile.m_after[:, None]
        finite = np.where(m == -np.inf, 0, m)
        np.testing.assert_allclose(m, so_far.max(axis=1, keepdims=True), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(tile.P, np.exp(tile.S - finite), rtol=1e-12)
        np.testing.assert_allclose(tile.alpha[:, None], np.exp(tile.m_before[:, None] - finite), rtol=1e-12)
        weights = np.exp(so_far - finite)
        l = weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(tile.l_after[:, None], l, rtol=1e-12)
        expected = weights @ v[0, 0, keys]
        if algorithm == "fa1":
            expected /= np.where(l == 0, 1, l)
        np.testing.assert_allclose(tile.O, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_observing_changes_nothing(algorithm):
    inputs = make_inputs(2, 4, 2, 40, 60, 8, "float32")
    _, (out, lse) = record(*inputs, algorithm=algorithm, config=FORWARD.cpu_config)
    plain, plain_lse = attend(*inputs, algorithm=algorithm, config=FORWARD.cpu_config)
    np.testing.assert_allclose(out, plain, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-6)
