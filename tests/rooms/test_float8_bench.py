"""`cufa bench fp8`: distributions, recipes, and the accuracy that rows state. On the CPU."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

import cufa
from cufa.cli import main
from cufa.gpu.architectures import Device
from cufa.measure import check, float8_cases, inputs, measured, runner, suites
from cufa.measure.cases import Case, Contender
from cufa.measure.distributions import DISTRIBUTIONS, NEEDLES, drawn, needle_keys, rounded
from cufa.measure.limits import Limits
from cufa.measure.quantized import QUANTIZE, Quantized
from cufa.problem.element import ELEMENTS

pytestmark = pytest.mark.usefixtures("on_cpu")
LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)
BASELINE = Contender(name="bfloat16")


def accuracy(problem, distribution, contender, seed=0):
    """Without a measurement."""
    case = Case(problem, (contender,), "case", distribution=distribution)
    made = inputs.Inputs(problem, on_gpu=False, seed=seed, distribution=distribution)
    entry = runner.prepare(contender, case, None, [made])
    arrays = entry.arrays[0]
    expected = check.sampled_reference(problem, arrays, seed=seed, count=check.MANY_ROWS)
    return check.accuracy(problem, distribution, entry.results()["o"], arrays["v"], expected["o"])


@pytest.mark.in_turn
def test_the_papers_outliers():
    """FlashAttention-3, table 3: 9.1e-3 with rotation, 2.4e-2 without."""
    problem = suites.make(1, 4, 2048, 128, "bfloat16")
    rmse = {
        x: accuracy(problem, "outliers", Contender(quantized=x)).rmse for x in map(_recipe, (False, True))
    }
    assert rmse[_recipe(True)] <= 9.5e-3
    assert 1.5 * rmse[_recipe(True)] < rmse[_recipe(False)] <= 2.4e-2
    assert accuracy(problem, "outliers", BASELINE).rmse < 1e-3


def _recipe(rotated: bool) -> Quantized:
    return Quantized("tensor", rotated)


@pytest.mark.in_turn
def test_the_sum_of_magnitudes_has_no_bias():
    """Saturated or lost weights would shrink every result by more than rounded scores do, 0.06% to 0.22%."""
    problem = suites.make(1, 64, 16, 128, "bfloat16", seqlen_k=1536)
    made = inputs.Inputs(problem, on_gpu=False, seed=0, distribution="normal").arrays(problem)
    out = Quantized(rotated=True).run(Quantized().problem(problem), made, on_gpu=False)()
    exact = cufa.attention_reference(*(made[role] for role in "qkv"))
    assert abs(np.abs(out.astype(np.float64)).sum() / np.abs(exact).sum() - 1) < 3e-3


@pytest.mark.parametrize("recipe", [None, Quantized("block"), Quantized("token", True, True)], ids=str)
def test_needles_are_found_where_bfloat16_finds_them(recipe):
    problem = suites.make(1, 2, 2 * NEEDLES, 64, "bfloat16", seqlen_k=4096)
    found = accuracy(problem, "needle", Contender(quantized=recipe))
    assert found.found == found.exact_found == 1


def test_a_result_without_needles_is_seen():
    problem = suites.make(1, 2, 2 * NEEDLES, 64, "bfloat16", seqlen_k=512)
    made = inputs.Inputs(problem, on_gpu=False, seed=0, distribution="needle").arrays(problem)
    expected = check.sampled_reference(problem, made, count=check.MANY_ROWS)["o"]
    for row, value in expected.items():
        made["o"][row] = value
    others = np.roll(made["o"], 1, axis=2)
    right, wrong = (check.accuracy(problem, "needle", x, made["v"], expected) for x in (made["o"], others))
    assert right.found == 1 and right.rmse < 1e-3
    assert wrong.found == 0 and wrong.rmse > 10 * right.rmse


def test_distributions_are_what_they_say():
    problem = suites.make(2, 4, 64, 64, "bfloat16", kv_heads=2, seqlen_k=2048)
    rng = np.random.default_rng(0)
    normal = lambda shape, n: rng.standard_normal(shape, np.float32)  # noqa: E731
    x = {name: drawn(name, problem, normal) for name in DISTRIBUTIONS}
    assert all([array.shape for array in y.values()] == list(problem.shapes[:3]) for y in x.values())
    assert np.abs(x["normal"]["k"]).max() < 7 < np.abs(x["outliers"]["k"]).max()
    assert 0.0003 < (np.abs(x["outliers"]["k"]) > 5).mean() < 0.001

    def weights(name, head=1):
        scores = x[name]["q"][0, head] @ x[name]["k"][0, head // 2].T / 8
        return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)

    own = weights("needle")[np.arange(64), np.array(needle_keys(2048))[np.arange(64) % NEEDLES]]
    assert 0.05 < own.mean() < 0.2
    assert weights("sinks")[:, :4].sum(axis=1).mean() > 0.5
    start, end = (x["drift"]["k"][:, :, part].mean(axis=2) for part in (slice(64), slice(-64, None)))
    assert np.abs(end).mean() > 5 * np.abs(start).mean()


def test_rounding_by_bits_is_to_nearest_even():
    x = np.random.default_rng(0).standard_normal(1000, np.float32) * 1e3
    x[:2] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # ties
    element = ELEMENTS["bfloat16"]
    np.testing.assert_array_equal(
        rounded(x, element).view(np.uint16), x.astype(element.dtype).view(np.uint16)
    )


def test_rows_state_their_accuracy_and_come_back():
    problem = suites.make(1, 2, 96, 64, "bfloat16")
    recipe = Quantized("block", rotated=True, smooth=True)
    ours = BASELINE, Contender(quantized=recipe), Contender(QUANTIZE, quantized=recipe)
    case = Case(problem, ours, "a case", distribution="drift")
    assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
    rows, skipped = runner.run_case(case, None, LIMITS, seconds=0.01)
    assert not skipped and [row.label for row in rows] == ["bfloat16", str(recipe), QUANTIZE]
    plain, e4m3, cost = rows
    assert e4m3.problem.scales == ("block", "block", "head") and e4m3.problem.out_dtype == "bfloat16"
    assert cost.accuracy is None and cost.error is None and not cost.json["flops"]
    assert cost.json["io_bytes"] == 3 * problem.batch * problem.heads * 96 * 64 * 3
    assert e4m3.error == pytest.approx(e4m3.accuracy.largest, rel=1e-3) and plain.error < e4m3.error
    row = measured.Measured(json.loads(json.dumps(e4m3.json)))
    assert row.json["accuracy"] == dataclasses.asdict(e4m3.accuracy) and row.problem == e4m3.problem
    assert row.json["accuracy"]["quantiles"]["1"] == e4m3.accuracy.largest
    assert cost.is_peer is False


def test_the_command_prints_errors_beside_times():
    shape = "--seqlen 64 --heads 1 --head-dim 32 --seqlen-k 256 --seconds 0.01 --device cpu"
    result = CliRunner().invoke(main, ["bench", "fp8", *shape.split()], terminal_width=120)
    assert result.exit_code == 0, result.output
    for words in (*DISTRIBUTIONS, "CPU p50", "RMSE", "needles found", "e4m3 per token, rotated"):
        assert words in result.output
    result = CliRunner().invoke(main, ["bench", "fp8", "--algorithm", "fa2", *shape.split()])
    assert result.exit_code == 2 and "leave out --algorithm" in result.output


def test_cases_of_a_gpu_have_long_needles_and_joules():
    assert float8_cases.NEEDLE_KEYS[True] == 128 << 10
    device = Device.typical("sm_90")
    needle = next(x for x in suites.SUITES["fp8"].cases(device) if x.distribution == "needle")
    asked = {
        c.label: c.plan(needle.problem, device).constants["ADDED_TILES"]
        for c in needle.contenders
        if "sums" in c.label
    }
    assert asked == {f"e4m3 per head, rotated, sums by {x}": x == "tile" for x in ("tile", "row")}
    speed = list(suites.SUITES["fp8-speed"].cases(None))
    shapes = {(x.problem.head_dim, x.problem.seqlen_q) for x in speed}
    assert shapes >= {(128, 4096), (256, 1024), (64, 16384)}
    assert all(QUANTIZE in {c.algorithm for c in x.contenders} for x in speed)


def test_a_cache_with_scales_of_tokens_is_timed_beside_one_with_scales_of_heads():
    device = Device.typical("sm_90")
    case = next(x for x in suites.SUITES["decode"].cases(device) if "e4m3" in x.name)
    kernels = [c.plan(case.problem, device).spec.name for c in case.contenders if c.is_ours]
    assert kernels == ["decode_split_tma_fp8", "decode_split_tma_fp8_scaled"]
    small = dataclasses.replace(case.problem, batch=2, heads=4, kv_heads=2, seqlen_k=200)
    ours = [dataclasses.replace(c, problem=c.problem and dataclasses.replace(small, scales=c.problem.scales))
            for c in case.contenders if c.is_ours]  # fmt: skip
    rows, skipped = runner.run_case(Case(small, tuple(ours), "small"), None, LIMITS, seconds=0.01)
    assert not skipped and len(rows) == 2
    assert all(row.error < 1e-2 for row in rows)


def test_the_ceiling_of_e4m3_is_twice_that_of_16_bits():
    limits = Limits(1e12, {"bfloat16": 1e15, "float16": 1e15, "tf32": 5e14}, 1e13)
    problem = suites.make(4, 16, 4096, 128, "bfloat16")
    (slow, _), (fast, name) = limits.floor(problem), limits.floor(Quantized().problem(problem))
    assert slow == 2 * fast and name == "e4m3 products (2 × bfloat16)"
