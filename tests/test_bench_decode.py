"""`cufa bench decode` without a GPU: its cases, what is recorded of a row, the tables made of a record."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from click.testing import CliRunner
from decode_kernel_support import operands_of, problem_of
from decode_support import make_case

from cufa.bench import decode, report
from cufa.bench.timing import Timing
from cufa.cli import main
from cufa.commands.common import Exit
from cufa.core.architectures import Device

H200 = Device.typical("sm_90")
CASES = {case.title: case for case in decode.cases()}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_contender_can_be_planned(arch):
    for case in CASES.values():
        labels = [contender.label for contender in case.contenders]
        assert len(set(labels)) == len(labels) and decode.READ not in labels
        for contender in case.contenders:
            if contender.problem.cache_dtype == "bfloat16" or arch != "sm_80":
                plan = contender.plan(Device.typical(arch))
                assert contender.schedule in ("auto", plan.schedule)


def test_contenders_of_a_case_read_the_same_cache():
    for case in CASES.values():
        sizes = {c.problem.kv_bytes(case.lengths) for c in case.contenders}
        assert sizes == {case.kv_bytes}
        for contender in case.contenders:
            p = contender.problem
            assert not p.paged or p.num_pages * p.page_size == p.batch * p.capacity


def test_published_shapes_have_peers():
    compared = [case.problem for case in CASES.values() if case.with_peers]
    assert [(p.batch, p.heads, p.kv_heads, p.capacity) for p in compared] == list(decode.PUBLISHED)


def record():
    """Rows as a run would record them: ours twice as fast as the peers, the streaming read faster still."""
    rows = []
    for case in CASES.values():
        plans = {c.label: (c.problem, c.plan(H200)) for c in case.contenders}
        peers = decode.PEERS if case.with_peers else ()
        for label, seconds in [*((c, 2e-5) for c in plans), *((p, 4e-5) for p in peers), (decode.READ, 1e-5)]:
            problem, plan = plans.get(label, (case.problem, None))
            timing = Timing((seconds,) * 10)
            error = None if label == decode.READ else 1e-3
            row = decode.DecodeRow(case.title, label, problem, timing, case.kv_bytes, error, plan)
            rows.append(decode.row_record(row))
    return {"rows": rows}


def test_rows_are_json():
    rows = json.loads(json.dumps(record()))["rows"]
    ours = next(row for row in rows if row["label"] == "balanced")
    assert ours["kernel"] == "decode_balanced_tma" and ours["p50_ns"] == 20_000
    assert ours["tbytes_per_s"] == pytest.approx(ours["kv_bytes"] / 2e-5 * 1e-12, abs=1e-3)


def test_tables():
    lines = list(report._decode(record()))
    for case in CASES:
        assert any(line.startswith(f"| {case} |") for line in lines)
    compared = next(line for line in lines if line.startswith("| 1 × 32/8 × 8k |"))
    assert "| 50% |" in compared and "2.00×" in compared
    assert list(report._decode(None)) == []


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8"])
def test_error_is_the_largest_over_rows_and_nan_where_one_is(dtype, page_size):
    fp8 = dtype == "fp8"
    case = make_case(
        [70, 33, 5], page_size=page_size, head_dim=128, dtype="bfloat16" if fp8 else dtype, fp8=fp8
    )
    if fp8:
        case.options |= {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
    operands, (expected, _) = operands_of(case), case.expected
    bench = decode.DecodeCase("x", (decode.DecodeContender("x", problem_of(case)),), tuple(case.lengths))
    out = expected.astype(case.q.dtype)
    assert decode._error(operands, out, bench) <= 2.0**-7
    for b, h in np.ndindex(3, 4):  # all six pairs are looked at: fewer than eight
        wrong = out.copy()
        wrong[b, h, 0, 7] += 3
        assert decode._error(operands, wrong, bench) == pytest.approx(3, abs=0.1)
        wrong[b, h, 0, 7] = np.nan
        assert np.isnan(decode._error(operands, wrong, bench))


def test_at_least_eight_pairs_are_checked():
    case = make_case([9] * 20, head_dim=8)
    operands, (expected, _) = operands_of(case), case.expected
    bench = decode.DecodeCase("x", (decode.DecodeContender("x", problem_of(case)),), tuple(case.lengths))
    errors = []
    for b, h in np.ndindex(20, 2):
        wrong = expected.astype(np.float16)
        wrong[b, 2 * h] += 3
        errors.append(decode._error(operands, wrong, bench) > 1)
    assert sum(errors) >= 8


def test_needs_a_gpu():
    result = CliRunner().invoke(main, ["bench", "decode", "--device", "cpu"])
    assert result.exit_code == Exit.MISSING


def test_no_cpu_is_proposed_that_would_not_do(monkeypatch):
    if importlib.util.find_spec("cupy"):  # else there is no GPU for certain
        from cufa.backends import cuda

        monkeypatch.setattr(cuda, "device_count", lambda: 0)
    results = [CliRunner().invoke(main, ["bench", *x, "--device", "cuda"]) for x in (["decode"], [])]
    decoding, forward = (" ".join(result.output.split()) for result in results)  # wherever lines break
    assert results[0].exit_code == Exit.MISSING and "--device cpu" not in decoding
    assert "--device cpu" in forward


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--suite", "quick"], "--suite"),
        (["--algorithm", "fa2"], "--algorithm"),
        (["--seqlen", "77", "--kv-heads", "2"], "--kv-heads, --seqlen"),
        (["--causal"], "--causal"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, named):
    result = CliRunner().invoke(main, ["bench", "decode", *options])
    assert result.exit_code == Exit.USAGE and f"{named} cannot be chosen there" in result.output


def test_a_cut_that_knows_the_lengths_is_beside_ours():
    """Fixed splits of a ragged batch, as planned for the longest sequence, are not the best there are."""
    (case,) = (c for c in CASES.values() if c.lengths)
    plans = {c.label: c.plan(H200) for c in case.contenders}
    assert plans["fixed, 8 splits"].num_splits == 8 and plans["balanced"].schedule == "balanced"
