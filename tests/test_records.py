"""Records: what is written, read back and judged."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from records_support import (
    DECODE,
    LIMITS,
    SHIPPED,
    as_json,
    made_up_record,
    versions_suite,
)

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure import evidence, gpu_tests, records
from cufa.measure.cases import Case, contenders
from cufa.measure.decode_cases import make_decode
from cufa.measure.recorded import Recorded, rows_of
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import make
from cufa.problem.mask import CAUSAL


@pytest.fixture
def record():
    return made_up_record()


def test_row_record_is_plain_json_and_keeps_every_sample():
    row = json.loads(json.dumps(versions_suite()["rows"][3]))
    assert row["label"] == "fa2"
    assert row["kernel"] in KERNELS
    assert len(row["samples_ns"]) >= 10
    assert all(type(n) is int for n in row["samples_ns"])
    assert row["p10_ns"] <= row["p50_ns"] <= row["p90_ns"]
    assert row["max_error"] < 1e-5
    assert row["problem"]["seqlen_q"] == 600
    assert (
        row["tiles_visited"] + row["tiles_skipped"] == 2 * 3 * 2
    )  # heads, 256-row and 512-column blocks of 600


def test_digest_ignores_comments_and_white_space(tmp_path, monkeypatch):
    import cufa.build.compiler

    def digest_of(text: str) -> str:
        (tmp_path / "k.cu").write_text(text)
        return cufa.build.compiler.source_digest("k.cu")

    monkeypatch.setattr(cufa.build.compiler, "SOURCE_DIR", tmp_path)
    first = digest_of("int f() { return 1; }")
    assert digest_of("// says why\nint f() {\n  return 1; /* one */ }\n") == first
    assert digest_of("int f() { return 2; }") != first


def test_good_evidence_has_no_problems(record):
    assert evidence.problems_with(record) == []
    assert records.stale_kernels(record) == []


def test_a_changed_kernel_is_stale(record):
    record["kernels"]["fa2_forward"]["digest"] = "0" * 64
    assert records.stale_kernels(record) == ["fa2_forward"]


@pytest.mark.parametrize("name", DECODE)
def test_a_changed_decode_kernel_is_stale(record, name):
    record["kernels"][name]["digest"] = "0" * 64
    assert records.stale_kernels(record) == [name]


@pytest.mark.parametrize("name", ["fa1_forward", "decode_split_fp8"])
def test_a_kernel_in_no_record_is_missed(record, name):
    other = copy.deepcopy(record)
    del record["kernels"][name]
    assert records.unproven_kernels([record]) == records.missing_kernels(record) == [name]
    assert records.unproven_kernels([record, other]) == []
    record["environment"]["arch"] = "sm_80"  # runs no e4m3: none is missed there
    assert bool(records.missing_kernels(record)) == (name == "fa1_forward")


def test_a_kernel_must_be_fresh_in_one_record_not_in_all(record):
    """That of a second card may be older than a kernel, and then says so."""
    older = copy.deepcopy(record)
    older["kernels"]["naive"]["digest"] = "0" * 64
    assert records.unproven_kernels([older]) == ["naive"]
    assert records.unproven_kernels([older, record]) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda r: r["tests"].update(failed=1), "1 GPU tests failed"),
        (lambda r: r.update(tests=None), "were not run"),
        (lambda r: r["suites"]["versions"]["rows"][0].update(max_error=None), "NaN"),
        (lambda r: r["kernels"]["fa1_forward"].update(tests_passed=0), "no GPU test ran fa1_forward"),
        (lambda r: r["kernels"]["decode_split_fp8"].update(tests_passed=0), "ran decode_split_fp8"),
        (lambda r: r["suites"]["all"]["rows"].clear(), "fa3_forward was not timed"),
    ],
)
def test_bad_evidence_is_named(record, break_it, message):
    break_it(record)
    assert any(message in problem for problem in evidence.problems_with(record))


def test_nan_error_is_recorded_as_null():
    problem = make(1, 1, 8, 8, "float32", False)
    rows, _ = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.01)
    row = dataclasses.replace(rows[0], error=float("nan"))
    assert records.row_record(row)["max_error"] is None


def test_saved_and_loaded(record, tmp_path):
    file = records.save(record, records.evidence_path("NVIDIA H200 (PCIe)", tmp_path))
    assert file.name == "nvidia-h200-pcie.json"
    assert records.load_all(tmp_path) == {"nvidia-h200-pcie": as_json(record)}
    assert "\n" not in file.read_text().split('"samples_ns": [')[1].split("]")[0], "samples take one line"


@pytest.mark.parametrize(("failed", "exit_code"), [(0, 0), (2, 1)])
def test_evidence_command_writes_the_record_and_says_what_is_wrong(
    record, monkeypatch, tmp_path, failed, exit_code
):
    """The GPU's part is staged; what is done with its record is real."""
    from click.testing import CliRunner

    from cufa.commands import evidence as command
    from cufa.measure import renewal, traces

    record["tests"]["failed"] = failed
    monkeypatch.setattr(command, "find_device", lambda choice: Device.typical("sm_90"))
    monkeypatch.setattr(evidence, "record_evidence", lambda *a, keep, **k: keep(record) and record)
    monkeypatch.setattr(traces, "evidence_plans", lambda device: [])
    monkeypatch.setattr(renewal, "stale_parts", lambda *of: {})
    result = CliRunner().invoke(command.evidence_command, ["--output", str(tmp_path)])
    assert result.exit_code == exit_code, result.output
    assert records.load_all(tmp_path) == {"h200": as_json(record)}
    assert "GPU tests passed" in result.stdout
    assert ("2 GPU tests failed" in result.stderr) == bool(failed)


def test_readme_command_fails_without_markers(tmp_path):
    from click.testing import CliRunner

    from cufa.commands.evidence import evidence_command

    file = tmp_path / "README.md"
    file.write_text("no markers")
    assert CliRunner().invoke(evidence_command, ["readme", str(file)]).exit_code == 1
    assert file.read_text() == "no markers"


def test_another_schema_is_refused(record, tmp_path):
    records.save({**record, "schema": 999}, tmp_path / "new.json")
    with pytest.raises(ValueError, match="schema 999"):
        records.load_all(tmp_path)


OLD_FORWARD = {
    "batch": 2, "heads": 8, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 96, "head_dim": 16, "dtype": "bfloat16",
    "causal": True, "scale": 0.25, "precision": "native", "alignment": 16, "positive_strides": True,
}  # fmt: skip
OLD_DECODE = {
    "batch": 2, "heads": 8, "kv_heads": 2, "tokens": 1, "capacity": 64, "head_dim": 16, "dtype": "bfloat16",
    "cache_dtype": "float8_e4m3", "scale": 0.25, "page_size": 16, "max_pages": 4, "num_pages": 8,
    "ragged": True, "new_tokens": 0, "alignment": 16, "positive_strides": True,
}  # fmt: skip


class TestOldRecords:
    """Those of schema 1, as they were written."""

    @pytest.fixture
    def rows(self):
        common = {"samples_ns": [1000, 1001], "p50_ns": 1000, "max_error": 1e-3}
        forward = {**common, "label": "fa2", "problem": OLD_FORWARD, "tflops": 1.0, "gbytes_per_s": 1.0}
        decode = {
            **common, "case": "a case", "label": "balanced", "problem": OLD_DECODE, "kv_bytes": 640,
            "tbytes_per_s": 0.00064, "kernel": "decode_balanced", "schedule": "balanced", "num_splits": 3,
        }  # fmt: skip
        run = {"schema": 1, "rows": [forward], "skipped": [], "decode": {"rows": [decode]}}
        return rows_of(records.upgrade(run))

    def test_a_mask_that_was_a_bool(self, rows):
        found = rows[0]
        assert found.problem == make(2, 8, 64, 16, "bfloat16", CAUSAL, kv_heads=2, seqlen_k=96)
        assert found.regime is Regime.IN_TURNS and found.case == ""
        assert found.json["flops"] == found.problem.flops

    def test_decoding_that_was_a_road_of_its_own(self, rows):
        found = rows[1]
        assert found.problem == make_decode(
            2, 8, 2, 64, head_dim=16, page_size=16, lengths_given=True, cache_dtype="float8_e4m3"
        )
        assert found.case == "a case" and found.tbytes == pytest.approx(0.00064)
        assert found.json["split"] == {"kind": "balanced", "count": 3}
        assert found.json["flops"] == 4 * 16 * 8 * 10, "ten keys were read in all"

    def test_shipped_evidence_is_read_whole(self):
        for record in SHIPPED.values():
            for row in rows_of(record):
                assert Recorded(row.json).problem.flops > 0 and row.p50_ns > 0


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("test_lengths[1-1-fa2_forward-float16-native-full]", ["fa2_forward"]),
        ("test_x[fa2_noskip]", ["fa2_noskip"]),
        ("test_every_config[decode_split_tma-64]", ["decode_split_tma"]),
        ("test_about_fa2_forward", []),
    ],
)
def test_tests_are_counted_for_the_kernel_in_their_parameters(name, kernels):
    assert gpu_tests._kernels_of(name) == kernels
