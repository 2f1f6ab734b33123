"""Kernels are what their evidence was recorded for: a changed kernel must be measured again on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from cufa.bench import evidence, records, report, suites
from cufa.bench.limits import Limits
from cufa.bench.recorded import rows_of
from cufa.core.architectures import Device
from cufa.kernels import KERNELS

RECORDS = records.load_all()
README = Path(__file__).parents[1] / "README.md"

HOW = "run `make gpu-evidence` on a machine with a GPU and commit cufa/records/"


def test_there_is_evidence_of_every_kernel():
    assert RECORDS, f"cufa/records is empty: {HOW}"
    missing = records.unrecorded_kernels(RECORDS.values())
    assert not missing, f"no evidence of {missing}: {HOW}"


@pytest.mark.parametrize("name", RECORDS)
def test_no_kernel_changed_after_its_evidence(name):
    stale = records.stale_kernels(RECORDS[name])
    assert not stale, f"changed since {name}.json was recorded: {stale}; {HOW}"


@pytest.mark.parametrize("name", RECORDS)
def test_every_kernel_was_tested_and_timed(name):
    record = RECORDS[name]
    assert not record["tests"]["failures"]
    assert not evidence.problems_with(record)


@pytest.mark.parametrize("name", RECORDS)
def test_rows_were_recorded_for_these_sources(name):
    digests = {kernel: records.digest(spec) for kernel, spec in KERNELS.items()}
    for row in rows_of(RECORDS[name]):
        if row.is_ours:
            assert row.json["digest"] == digests[row.json["kernel"]], row.label


def test_readme_shows_the_records():
    text = README.read_text(encoding="utf-8")
    assert report.update(text, RECORDS) == text, "run `make readme`"
    assert report.page(RECORDS) == report.PAGE.read_text(encoding="utf-8"), "run `make readme`"


def test_results_of_tests_are_kept_with_the_kernels_that_they_were_found_for():
    """Tests may run after the benchmark in a process of their own; a kernel that changed meanwhile is told."""
    passes = dict.fromkeys(KERNELS, 7)
    kernels = {name: {"digest": records.digest(spec)} for name, spec in KERNELS.items()}
    record = {"tests": None, "kernels": kernels}
    tests = {"passed": 1, "failed": 0, "passed_by_kernel": passes}
    evidence.add_tests(record, tests)
    assert record["tests"] is tests
    assert all(kernel["tests_passed"] == 7 for kernel in record["kernels"].values())
    record["kernels"]["naive"]["digest"] = "another"
    with pytest.raises(ValueError, match="naive changed since the record was made"):
        evidence.add_tests(record, tests)


class TestRecording:
    """A GPU is not needed: what is measured is replaced, the order and what is kept are not."""

    PARTS = suites.EVIDENCE[:3]

    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch):
        """Names of the parts that were measured, in order."""
        found = []
        monkeypatch.setattr(evidence, "EVIDENCE", self.PARTS)
        monkeypatch.setattr(evidence, "_kernel_records", lambda device: {})
        monkeypatch.setattr(evidence, "measure_limits", lambda device: Limits(1.0, {}, 1.0))
        monkeypatch.setattr(evidence, "_compile_in_parallel", lambda cases, jobs: None)
        monkeypatch.setattr(evidence, "first_result_seconds", dict)
        monkeypatch.setattr(evidence, "host_calls", list)
        monkeypatch.setattr(evidence, "_measure", lambda suites, part, *rest: found.append(part.name))
        monkeypatch.setattr(records, "environment", lambda device: {"device": device.name})
        return found

    def run(self, keep, begun=None):
        device = Device.typical("sm_90")
        return evidence.record_evidence(
            device, jobs=1, seconds=0.1, with_tests=False, say=lambda what: None, keep=keep, begun=begun
        )

    def test_a_lost_machine_costs_no_part_that_was_done(self, measured):
        kept = []

        def keep(record):
            kept.append(copy.deepcopy(record))
            if len(kept) == 2:
                raise ConnectionError("the machine is gone")

        with pytest.raises(ConnectionError):
            self.run(keep)
        names = [part.name for part in self.PARTS]
        assert kept[-1]["parts"] == names[:2]
        record = self.run(kept.append, begun=kept[-1])
        assert measured == names == record["parts"]

    def test_a_record_of_another_gpu_is_not_gone_on_with(self, measured):
        with pytest.raises(ValueError, match="the record is of A100, this GPU is H200"):
            self.run(list, begun={"environment": {"device": "A100"}, "kernels": {}})
        assert not measured
