"""The public backward call on NumPy arrays: results, layouts, and an answer to everything that can be wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_support import NAMES, Case, assert_gradients, make_case
from support import DTYPES, OnlyDLPack, make_inputs

import cufa
from cufa.problem.mask import CAUSAL
from cufa.run.cpu import backward as cpu_backward

pytestmark = pytest.mark.usefixtures("on_cpu")


def gradients(case: Case, **options):
    return cufa.flash_attention_backward(*case.arrays, **case.options, **options)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_after_the_forward_call(dtype, dlse):
    """With what the forward call returns, and not the reference's."""
    case = make_case(2, 4, 2, 65, 97, 40, dtype, causal=True, dlse=dlse)
    out, lse = cufa.flash_attention(case.q, case.k, case.v, causal=True, return_lse=True)
    got = gradients(dataclasses.replace(case, out=out, lse=lse))
    assert all(type(x) is np.ndarray for x in got)
    assert_gradients(got, case)


@pytest.mark.parametrize(
    "scores",
    [
        {"window": (20, 3)},
        {"window": (30, None), "causal": True, "softcap": 5.0},
        {"mask": cufa.masks.window(0, 40, "top-left")},
        {"mask": cufa.masks.causal(70), "softcap": 0.5, "scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_options_and_layouts(layout, scores):
    case = make_case(2, 4, 2, 65, 97, 40, "bfloat16", **scores)
    arrays = case.arrays
    if layout == "bshd":
        arrays = (*(np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays[:5]), arrays[5])
    got = cufa.flash_attention_backward(*arrays, layout=layout, **case.options)
    if layout == "bshd":
        got = tuple(x.swapaxes(1, 2) for x in got)
    assert_gradients(got, case)
    planned = cufa.plan_backward(*arrays[1:4], layout=layout, **scores)
    assert planned.problem.scores_text in str(planned)


def test_results_are_written_and_returned():
    case = make_case(1, 4, 2, 33, 50, 16, "float32")
    given = {name: np.full(getattr(case, name[1:]).shape, np.nan, np.float32) for name in NAMES}
    got = gradients(case, **given)
    assert all(x is y for x, y in zip(got, given.values(), strict=True))
    assert_gradients(got, case)
    only = gradients(case, dk=given["dk"])
    assert only[1] is given["dk"] and only[0] is not given["dq"]


def test_fused_arrays_are_used_in_place():
    """q, k and v, and their gradients, as thirds of one array each."""
    q, k, v = np.split(make_inputs(1, 6, 6, 50, 50, 24, "float32")[0], 3, axis=1)
    out, lse = cufa.flash_attention(q, k, v, return_lse=True)
    dout = make_inputs(1, 2, 2, 50, 50, 24, "float32", seed=1)[0]
    around = np.full((1, 6, 100, 48), np.nan, np.float32)
    dq, dk, dv = np.split(around[:, :, ::2, 8:32], 3, axis=1)
    cufa.flash_attention_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    case = Case(dout, q, k, v, out, lse, None, {})
    assert_gradients((dq, dk, dv), case)
    around[:, :, ::2, 8:32] = np.nan
    assert np.isnan(around).all(), "wrote outside of the results"


def test_dlpack_producers_in_numpy_out():
    case = make_case(1, 2, 1, 16, 16, 8, "float32", dlse=True)
    arrays = [OnlyDLPack(x) for x in case.arrays]
    got = cufa.flash_attention_backward(*arrays, dlse=OnlyDLPack(case.dlse))
    assert all(type(x) is np.ndarray for x in got)
    assert_gradients(got, case)


def test_deterministic_and_algorithm_change_nothing_on_a_cpu():
    case = make_case(1, 4, 2, 40, 50, 16, "float32", causal=True)
    for x, y in zip(gradients(case), gradients(case, deterministic=True, algorithm="fa2"), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_gradient_of_the_sink_is_written_where_the_caller_says():
    q = np.random.default_rng(0).standard_normal((1, 2, 9, 8), np.float32)
    out, lse = cufa.flash_attention(q, q, q, sink=[0.0, 1.0], return_lse=True)
    dsink = np.full(2, np.nan, np.float32)
    given = q, q, q, q, out, lse
    found = cufa.flash_attention_backward(*given, sink=[0.0, 1.0], dsink=dsink)
    assert found[3] is dsink
    np.testing.assert_array_equal(dsink, cufa.flash_attention_backward(*given, sink=[0.0, 1.0])[3])
    with pytest.raises(ValueError, match=r"dsink= .*pass sink= too"):
        cufa.flash_attention_backward(*given, dsink=dsink)


# --- What can be wrong ------------------------------------------------------------------------------------


def _call(**changes):
    case = make_case(1, 4, 2, 8, 10, 16, "float32")
    options = {n: getattr(case, n) for n in ("dout", "q", "k", "v", "out", "lse")} | changes
    arrays = [options.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")]
    return cufa.flash_attention_backward(*arrays, **options)


def _array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


BAD = [
    ({"dout": None}, TypeError, r"dout must be an array.*NoneType"),
    ({"lse": None}, TypeError, r"lse must be an array.*NoneType"),
    ({"q": _array(4, 8, 16)}, ValueError, r"q has shape \(4, 8, 16\).*four axes"),
    ({"k": _array(1, 2, 9, 16)}, ValueError, r"v has shape \(1, 2, 10, 16\) but k has \(1, 2, 9, 16\)"),
    ({"dout": _array(1, 4, 8, 8)}, ValueError, r"dout has shape \(1, 4, 8, 8\) but q has \(1, 4, 8, 16\)"),
    ({"out": _array(1, 8, 4, 16)}, ValueError, r"out has shape \(1, 8, 4, 16\) but q has"),
    ({"dout": _array(1, 4, 8, 16, dtype=np.float16)}, TypeError, r"dout is float16 but q is float32.*astype"),
    ({"out": _array(1, 4, 8, 16, dtype=np.float64)}, TypeError, r"out is float64 but q is float32"),
    ({"dout": _array(1, 4, 8, 32)[..., ::2]}, ValueError, r"dout has strides.*ascontiguousarray\(dout\)"),
    ({"lse": _array(1, 4, 10)}, ValueError, r"lse has shape \(1, 4, 10\).*\(1, 4, 8\)$"),
    ({"lse": _array(1, 8, 4)}, ValueError, r"lse has shape \(1, 8, 4\).*swapaxes\(1, 2\)"),
    ({"lse": _array(1, 4, 8, dtype=np.float16)}, TypeError, r"lse is float16.*float32.*astype\('float32'\)"),
    ({"lse": _array(1, 4, 8, dtype=np.float64)}, TypeError, r"lse is float64; for q of float32"),
    ({"lse": _array(1, 8, 4).swapaxes(1, 2)}, ValueError, r"lse has strides.*ascontiguousarray\(lse\)"),
    ({"dlse": _array(1, 4)}, ValueError, r"dlse has shape \(1, 4\)"),
    ({"dlse": _array(1, 4, 8, dtype=np.float64)}, TypeError, r"dlse is float64"),
    ({"dlse": 1.0}, TypeError, r"dlse must be an array"),
    ({"deterministic": "yes"}, TypeError, r"deterministic must be True or False, not 'yes'"),
    ({"deterministic": 1.0}, TypeError, r"deterministic must be True or False, not 1\.0"),
    ({"causal": 2}, TypeError, r"causal must be True or False, not 2"),
    ({"causal": True, "mask": CAUSAL}, ValueError, r"mask=causal and causal=True"),
    ({"window": (1, -1)}, ValueError, r"window"),
    ({"softcap": 0}, ValueError, r"softcap=0"),
    ({"scale": -1.0}, ValueError, r"scale=-1\.0"),
    ({"layout": "sbhd"}, ValueError, r"layout='sbhd'"),
    ({"algorithm": "fa4"}, ValueError, r"algorithm='fa4' is not known; use one of auto, fa3, fa2"),
    ({"precision": "tf16"}, ValueError, r"precision='tf16'"),
    ({"device": "tpu"}, ValueError, r"device='tpu'"),
    ({"device": "cuda"}, ValueError, r"device='cuda' but no usable GPU"),
    ({"dq": _array(1, 2, 10, 16)}, ValueError, r"dq has shape \(1, 2, 10, 16\) but the result has \(1, 4, 8"),
    ({"dk": _array(1, 4, 8, 16)}, ValueError, r"dk has shape \(1, 4, 8, 16\) but the result has \(1, 2, 10"),
    ({"dv": _array(1, 2, 10, 16, dtype=np.float16)}, TypeError, r"dv is float16.*empty_like\(v\)"),
    ({"dv": "here"}, TypeError, r"dv must be an array"),
    ({"dq": np.broadcast_to(_array(16), (1, 4, 8, 16))}, ValueError, r"dq is read-only"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input_names_the_argument(changes, error, message, monkeypatch):
    monkeypatch.setattr(cpu_backward, "run", lambda *call: pytest.fail("computed something"))
    with pytest.raises(error, match=message):
        _call(**changes)


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_an_algorithm_without_a_backward_means_auto(device):
    plan = cufa.plan_backward((1, 4, 256, 64), algorithm="fa1", device=device)
    assert plan.spec is cufa.plan_backward((1, 4, 256, 64), device=device).spec
    assert plan.reasons[0] == "algorithm='fa1' has no backward: auto"


@pytest.mark.parametrize("other", ["dout", "q", "k", "v", "out", "lse", "dlse", "dk", "dv", "itself"])
def test_a_result_that_shares_memory(other):
    case = make_case(1, 2, 2, 8, 8, 16, "float32", dlse=True)
    memory = np.full(4 * case.q.size, 7, np.float32)
    given = {"dq": memory[: case.q.size].reshape(case.q.shape)}
    if other in NAMES:
        given[other] = given["dq"]
    elif other == "itself":
        given["dq"] = np.lib.stride_tricks.as_strided(memory, case.q.shape, (0, 64, 4, 4))
    elif other in ("lse", "dlse"):
        shared = np.lib.stride_tricks.as_strided(memory[5:], case.lse.shape, case.lse.strides)
        case = dataclasses.replace(case, **{other: shared})
    else:
        case = dataclasses.replace(case, **{other: given["dq"]})
    with pytest.raises(ValueError, match="elements share memory" if other == "itself" else "dq overlaps"):
        gradients(case, **given)
    assert (memory == 7).all()


def test_float64_takes_lse_of_float64():
    case = make_case(1, 2, 2, 8, 8, 16, "float64")
    with pytest.raises(TypeError, match=r"lse is float32; for q of float64 it must be float64"):
        cufa.flash_attention_backward(*case.arrays[:5], case.lse.astype(np.float32))


# --- Plans ------------------------------------------------------------------------------------------------


def test_plan_without_a_gpu_prints_what_would_run():
    text = str(cufa.plan_backward((2, 16, 4096, 128), dtype="bfloat16", causal=True, device="sm_90"))
    for part in ("backward batch 2", "fa3_backward", "sm_90", "causal", "skipped", "because", "launch "):
        assert part in text
    assert "dQ in float32" in text
    assert "NumPy" in str(cufa.plan_backward((2, 16, 4096, 128), device="cpu"))


def test_plan_knows_determinism():
    plans = [cufa.plan_backward((1, 2, 64, 64), device="sm_90", deterministic=x) for x in (False, np.True_)]
    assert [p.problem.deterministic for p in plans] == [False, True]
    assert "deterministic" in str(plans[1]) and "deterministic" not in str(plans[0].problem)
    with pytest.raises(TypeError, match="deterministic must be"):
        cufa.plan_backward((1, 2, 64, 64), deterministic="yes")


def test_workspace_is_linear():
    """At most dQ in float32 and two numbers per query."""
    for seqlen in (100, 4096, 1 << 17):
        plan = cufa.plan_backward((2, 16, seqlen, 128), (2, 4, seqlen, 128), device="sm_90")
        assert plan.workspace <= 2 * 16 * (seqlen + 128) * (4 * 128 + 8)


def test_flops_and_bytes():
    problem = cufa.plan_backward((2, 8, 100, 64), (2, 2, 300, 64), device="cpu").problem
    assert problem.flops == 10 * 2 * 8 * 100 * 300 * 64
    assert problem.io_bytes == 2 * (8 * 100 * (4 * 64 * 2 + 4) + 2 * 300 * 4 * 64 * 2)
    forward = cufa.plan((2, 8, 100, 64), (2, 2, 300, 64), device="cpu").problem
    assert problem.flops == 2.5 * forward.flops


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_plan_of_nothing_has_no_launch(axis, device):
    shape = tuple(0 if i == axis else n for i, n in enumerate((2, 4, 100, 64)))
    planned = cufa.plan_backward(shape, causal=True, device=device)
    assert planned.launches == () and "without a launch" in str(planned)


def test_plan_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="float64"):
        cufa.plan_backward((1, 1, 64, 64), dtype="float64", device="sm_90")
    with pytest.raises(ValueError, match="int8"):
        cufa.plan_backward((1, 1, 64, 64), dtype="int8")
