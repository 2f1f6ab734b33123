"""Kernels are what their evidence was recorded for: a changed kernel must be measured again on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from records_support import SHIPPED

from cufa.kernels import KERNELS
from cufa.measure import evidence, records, report
from cufa.measure.recorded import rows_of

README = Path(__file__).parents[1] / "README.md"

HOW = "run `cufa evidence --renew` on a machine with the GPU of a record, and commit cufa/records/"


def test_every_kernel_is_fresh_in_one_record():
    """A second card's record may be older: every table of it says which kernels have changed since."""
    assert SHIPPED, f"cufa/records is empty: {HOW}"
    stale = records.unproven_kernels(SHIPPED.values())
    assert not stale, f"changed since they were recorded, or never recorded: {stale}; {HOW}"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_kernel_was_tested_and_timed(name):
    record = SHIPPED[name]
    assert not record["tests"]["failures"]
    assert not evidence.problems_with(record)


@pytest.mark.parametrize("name", SHIPPED)
def test_rows_are_of_the_sources_that_their_record_names(name):
    """Or of those that are, where their machine code is still the same."""
    record = SHIPPED[name]
    for row in rows_of(record):
        if row.is_ours:
            kernel = row.json["kernel"]
            named = record["kernels"][kernel]["digest"], records.digest(KERNELS[kernel])
            assert row.json["digest"] in named, row.label


def test_readme_shows_the_records():
    text = README.read_text(encoding="utf-8")
    assert report.update(text, SHIPPED) == text, "run `make readme`"
    assert report.page(SHIPPED) == report.PAGE.read_text(encoding="utf-8"), "run `make readme`"


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
