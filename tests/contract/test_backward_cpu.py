"""The backward by NumPy, beyond what every backend promises (test_backward.py): tiles of any size, bad numbers that
reach only what sees them, any strides, what an observer is told of each tile, threads and memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings

import numpy as np
import pytest
from backward_support import NAMES, Case, assert_gradients, expected, make_case
from cpu_support import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS
from support import DTYPES, make_inputs, make_problem
from test_forward_cpu import LAYOUTS

import cufa
from cufa import attention_reference, masks
from cufa.kernels import TileConfig
from cufa.plan.dense import BACKWARD
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.options import resolve_mask
from cufa.run.cpu import backward as cpu_backward
from cufa.run.cpu import tiles as cpu_tiles


def plan_for(case: Case, config=SMALL) -> Plan:
    scores = dict(case.scores)
    mask = resolve_mask(scores.pop("causal", False), scores.pop("window", None), scores.pop("mask", None))
    problem = make_problem(case.q, case.k, case.v, mask=mask, softcap=scores.pop("softcap", None))
    problem = dataclasses.replace(problem, operation="backward", **scores)
    return make_plan(problem, None, config=config)


def gradients(case: Case, *, config=SMALL, strides=lambda x: x, **options):
    """(dq, dk, dv) of one run. What is not written shows as NaN; a warning fails the test."""
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    operands = {n: getattr(case, n) if n in ("lse", "dlse") else strides(getattr(case, n)) for n in names}
    for name in NAMES:
        operands[name] = strides(np.full(getattr(case, name[1:]).shape, np.nan, case.q.dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_backward.run(plan_for(case, config), operands, **options)
    return tuple(operands[name] for name in NAMES)


# --- Results ----------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=75)
def test_any_shape_in_any_tiles(data):
    """In float64, where rounding cannot hide a mistake."""
    draw = data.draw
    heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]))
    length, block = st.integers(1, 40), st.sampled_from([1, 2, 3, 8, 16, 64])
    scores = {"mask": draw(BANDS), "softcap": draw(st.sampled_from([None, None, 0.5, 30.0]))}
    case = make_case(
        draw(st.integers(1, 3)), *heads, draw(length), draw(length), draw(st.sampled_from([8, 24])), "float64",
        seed=draw(st.integers(0, 99)), dlse=draw(st.booleans()), **scores,
    )  # fmt: skip
    got = gradients(case, config=TileConfig(draw(block), draw(block), 0))
    for x, exact in zip(got, expected(case), strict=True):
        np.testing.assert_allclose(x, exact, rtol=1e-10, atol=1e-11)


def test_a_part_of_the_keys_given_the_whole_ones_out_and_lse_has_its_share():
    """Sequences spread over several machines: dk and dv of each part are its own, dq adds up."""
    case = make_case(1, 4, 2, 50, 60, 16, "float64")
    dq, dk, dv = expected(case)
    parts = [slice(0, 23), slice(23, 60)]
    shares = [gradients(dataclasses.replace(case, k=case.k[:, :, x], v=case.v[:, :, x])) for x in parts]
    np.testing.assert_allclose(sum(share[0] for share in shares), dq, rtol=1e-10, atol=1e-12)
    for i, whole in ((1, dk), (2, dv)):
        joined = np.concatenate([share[i] for share in shares], axis=2)
        np.testing.assert_allclose(joined, whole, rtol=1e-10, atol=1e-12)


# --- Infinities, NaN, rows that see nothing ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_have_no_gradient_and_give_none(dtype):
    """Not even where the loss's gradients of them are no numbers."""
    case = make_case(2, 2, 1, 60, 11, 8, dtype, causal=True, dlse=True)
    clean = gradients(case)
    assert_gradients(clean, case)
    case.dout[:, :, :49], case.dlse[:, :, :49], case.out[:, :, :49] = np.nan, np.inf, np.nan
    for x, y in zip(gradients(case), clean, strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mask", [CAUSAL, Band(10, 5)], ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["dout", "q", "k", "v"])
def test_infinite_and_nan_inputs(name, bad, mask):
    """NaN where the reference has NaN, and nowhere else: what is not seen plays no part."""
    for position in (0, 20, 59):
        case = make_case(1, 2, 2, 60, 60, 8, "float32", mask=mask)
        getattr(case, name)[0, 1, position, 3] = bad
        with np.errstate(all="ignore"):
            out, lse = attention_reference(case.q, case.k, case.v, return_lse=True, mask=mask)
        case = dataclasses.replace(case, out=out.astype(np.float32), lse=lse.astype(np.float32))
        for x, exact in zip(gradients(case), expected(case), strict=True):
            np.testing.assert_allclose(x.astype(float), exact, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_seen_plays_no_part(bad):
    """Bad numbers on both sides of the mask, in boundary tiles and in tiles that are skipped."""
    mask = Band(10, 5)
    case = make_case(1, 2, 1, 90, 90, 8, "float64", mask=mask, dlse=True)
    clean = gradients(case)
    for x in (case.q, case.k, case.v, case.dout, case.out, case.lse[..., None], case.dlse[..., None]):
        x[:, :, 61:] = bad
    case.lse[:, :, 61:] = np.nan
    got = gradients(case)
    rows, keys = slice(0, 56), slice(0, 51)  # that see no bad key, and that no bad query sees
    np.testing.assert_allclose(got[0][:, :, rows], clean[0][:, :, rows], rtol=1e-10)
    for x, y in zip(got[1:], clean[1:], strict=True):
        np.testing.assert_allclose(x[:, :, keys], y[:, :, keys], rtol=1e-10)


def test_huge_logits():
    case = make_case(1, 2, 2, 50, 70, 16, "float32", spread=3000.0, causal=True)
    assert_gradients(gradients(case), case)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "few",
    [
        {"sink": [-1e9, 0.5]}, {"sink": [3e38, -3e38]}, {"alibi_slopes": [1e-42, 3e38]}, {"softcap": 1e-30},
        {"alibi_slopes": [1e-30, 1e3], "causal": True}, {"mask": masks.documents([3, 0, 30])}, {"scale": 1e-38},
        {"seqlens_k": [0], "sink": [0.5, -np.inf]},
    ],
)  # fmt: skip
def test_no_call_depends_on_the_callers_error_state(few, dtype):
    q, k, v = make_inputs(1, 2, 1, 33, 33, 8, dtype)
    dout, tiny, e4m3 = q[:, :, ::-1], (v.astype(float) * 1e-42).astype(dtype), np.ones(k.shape, np.uint8)
    packed = {name: x for name, x in few.items() if name not in ("mask", "seqlens_k")}
    cached = {name: x for name, x in packed.items() if name != "causal"}
    with np.errstate(all="raise"):
        out, lse = cufa.flash_attention(q, k, v, return_lse=True, device="cpu", **few)
    subnormal, dlse = (out.astype(float) * 2**-14).astype(dtype), (lse * 1e-30).astype(np.float32)
    one, lower = q[:, :, :1].astype(np.float16), lse - 9
    with np.errstate(all="raise"):
        cufa.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, device="cpu", **few)
        cufa.attention_reference(q, k, tiny, **few)
        cufa.attention_reference_backward(dout, q, k, tiny, **few)
        cufa.merge_attention_states(subnormal, lse, subnormal, lower)
        of_one = (x[0].swapaxes(0, 1) for x in (q, k, tiny))
        cufa.flash_attention_varlen(*of_one, [0, 33], [0, 33], device="cpu", **packed)
        cufa.flash_decode(q[:, :, :1], k, tiny, device="cpu", cache_seqlens=[33], **cached)
        cufa.decode_reference(q[:, :, :1], k, tiny, cache_seqlens=[33], **cached)
        cufa.flash_decode(one, e4m3, e4m3, k_scale=1e-42, v_scale=1e-42, device="cpu")
        assert set(np.geterr().values()) == {"raise"}


# --- Memory layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_strides(dtype, layout):
    case = make_case(2, 4, 2, 33, 50, 16, dtype, causal=True, dlse=True)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    for x, y in zip(gradients(case, strides=LAYOUTS[layout]), gradients(case), strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), atol=tolerance)


def test_a_gradient_that_is_the_same_for_all_by_broadcasting():
    case = make_case(2, 3, 3, 20, 30, 8, "float32")
    case = dataclasses.replace(case, dout=np.broadcast_to(case.dout[:1, :1, :1], case.q.shape))
    assert_gradients(gradients(case), case)


# --- Tiles, threads, memory -------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(20, 3), Band(5, None, 30)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(60, 60), (17, 100), (100, 17), (1, 1)])
def test_visited_tiles_are_the_schedules_keys_outermost(seqlen_q, seqlen_k, mask):
    case = make_case(2, 4, 2, seqlen_q, seqlen_k, 8, "float32", mask=mask)
    tiles = []
    gradients(case, observer=tiles.append)
    ranges = plan_for(case).schedule.ranges
    visited = [range(a, b) for a, b in zip(ranges.first, ranges.end, strict=True)]
    for b, h in np.ndindex(2, 4):
        of_head = [(x.kv_block, x.q_block) for x in tiles if (x.batch, x.head) == (b, h)]
        assert of_head == [(j, i) for j, of_block in enumerate(visited) for i in of_block]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_told_of_a_tile_is_what_it_added(softcap):
    mask, scale = Band(40, 3), 8**-0.5
    case = make_case(1, 4, 2, 70, 50, 8, "float32", mask=mask, softcap=softcap, dlse=True)
    steps: list[cpu_backward.GradientStep] = []
    dq, dk, dv = gradients(case, observer=steps.append)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    sums: dict[tuple[str, int, int], np.ndarray] = {}
    for x in steps:
        rows, keys = np.arange(70)[_block(x.q_block, 16)], np.arange(50)[_block(x.kv_block, 24)]
        dout, q = case.dout[0, x.head, rows], case.q[0, x.head, rows]
        k, v = case.k[0, x.head // 2, keys], case.v[0, x.head // 2, keys]
        S, slope = scale * q @ k.T, 1.0
        if softcap is not None:
            S, slope = softcap * np.tanh(S / softcap), 1 - np.tanh(S / softcap) ** 2
        close(x.P, np.where(mask.visible(rows, keys, 70, 50), np.exp(S - x.lse[:, None]), 0))
        close(x.dP, dout @ v.T)
        close(x.dS, x.P * (x.dP - x.delta[:, None]) * slope)
        of_keys, of_rows = (x.head // 2, x.kv_block), (x.head, x.q_block)
        close(x.dV, sums.get(("dv", *of_keys), 0) + x.P.T @ dout)
        close(x.dK, sums.get(("dk", *of_keys), 0) + x.dS.T @ q)
        close(x.dQ, sums.get(("dq", *of_rows), 0) + scale * x.dS @ k)
        sums |= {("dv", *of_keys): x.dV, ("dk", *of_keys): x.dK, ("dq", *of_rows): x.dQ}
    for (name, head, block), total in sums.items():
        result, rows = (dq, 16) if name == "dq" else (dk, 24) if name == "dk" else (dv, 24)
        np.testing.assert_array_equal(
            result[0, head, _block(block, rows)], np.float32(scale) * total if name == "dk" else total
        )


def _block(number, size):
    return slice(number * size, (number + 1) * size)


@pytest.mark.parametrize("config", [SMALL, BACKWARD.cpu_config], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 300, 300, 16), (2, 6, 3, 70, 90, 16), (1, 2, 2, 700, 600, 64)])
def test_bit_identical_whatever_the_threads(shape, config):
    case = make_case(*shape, "float32", causal=True)
    alone = gradients(case, config=config, num_threads=1)
    for num_threads in (1, 2, 3, 8, None):
        for x, y in zip(gradients(case, config=config, num_threads=num_threads), alone, strict=True):
            np.testing.assert_array_equal(x, y)


def test_calls_from_several_threads():
    case = make_case(1, 8, 8, 200, 200, 32, "float32", causal=True)
    alone = gradients(case)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: gradients(case), range(8)):
            for x, y in zip(got, alone, strict=True):
                np.testing.assert_array_equal(x, y)


def extra_memory(seqlen: int) -> int:
    """Of eight heads, causal. What out and lse hold does not matter."""
    rng = np.random.default_rng(0)
    dout, q, k, v, out = (
        rng.standard_normal((1, 8, seqlen, 64)).astype(DTYPES["bfloat16"]) for _ in range(5)
    )
    case = Case(dout, q, k, v, out, np.full(q.shape[:3], 9, np.float32), None, {"causal": True})
    run = functools.partial(gradients, case, config=BACKWARD.cpu_config, num_threads=2)
    return cpu_tiles.extra_memory(run)


def test_memory_grows_with_the_length_not_its_square():
    """Four times the length, sixteen times the scores."""
    assert extra_memory(2048) < 5 * extra_memory(512)
