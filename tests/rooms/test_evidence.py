"""Measurements are of the machine code that runs: a changed kernel is shown as stale until it is measured again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from evidence import code, recorder, report
from evidence.recorder import PARTS
from records_support import H200, SHIPPED
from sampling import of_today

from cufa.build.static_compile import nvrtc_version
from cufa.kernels import KERNELS, kernels_of
from cufa.measure import cards
from cufa.measure.regimes import Regime

README = Path(__file__).parents[2] / "README.md"

HOW = (
    "run `python -m tests.evidence record` on a machine with the GPU, then `stamp`, and commit cufa/records/"
)
AWAITED = {
    "fa3_forward_fp8", "fa2_forward_fp8", "decode_split_fp8_scaled", "decode_balanced_fp8_scaled",
    "decode_split_tma_fp8_scaled", "decode_balanced_tma_fp8_scaled",
}  # fmt: skip
"""Kernels that came in after the recorded runs of the GPU tests. A record of those tests takes them off this list."""
SAMPLE = 4
"""Builds that a day compiles; `python -m tests.evidence stamp --check` compiles all."""


def test_every_kernel_is_timed():
    """A kernel whose machine code has changed since is stale: README and every table of it say so, until it is measured
    again."""
    assert SHIPPED, f"cufa/records has no card: {HOW}"
    timed = {row.json["kernel"] for card in SHIPPED.values() for row in card.rows if row.is_ours}
    assert timed >= {*kernels_of("forward"), *kernels_of("backward")} - AWAITED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_kernel_was_tested_and_timed(name):
    problems = [x.split() for x in recorder.problems_with(SHIPPED[name])]
    assert [x for x in problems if not AWAITED & {*x}] == []
    assert all(any(kernel in x for x in problems) for kernel in AWAITED), "take them off the list"


@pytest.mark.usefixtures("nvrtc")
def test_the_list_of_current_machine_code_is_right():
    """For a sample that changes daily: a build gives the code of its rows if, and only if, the list says so."""
    pytest.importorskip("elftools")
    kept = code.pinned_nvrtc()
    if nvrtc_version() != kept:
        pytest.skip(f"digests are of NVRTC {kept}, this is {nvrtc_version()}")
    sample = of_today(sorted(code.stamped()), "machine code", fixed=0, dated=SAMPLE)
    assert not code.wrong(sample), "run `python -m tests.evidence stamp`, and `make readme`"


def test_a_build_that_gives_other_code_is_found(monkeypatch):
    first = sorted(cards.current_code())[0]
    monkeypatch.setattr(code, "digest_of", lambda build: "another")
    assert code.wrong([first]) == [first]
    monkeypatch.setattr(cards, "current_code", lambda: frozenset())
    assert code.wrong([first]) == []


def test_tiles_that_a_kernel_does_not_have_are_no_build():
    row = next(row for row in next(iter(SHIPPED.values())).rows if row.is_ours)
    config = {**row.json["config"], "no_such_field": 1}
    assert code.build_of(row.json["kernel"], row.problem, row.json["config"], "sm_90", {}) is not None
    assert code.build_of(row.json["kernel"], row.problem, config, "sm_90", {}) is None
    assert code.build_of("fa0_forward", row.problem, row.json["config"], "sm_90", {}) is None
    assert code.digest_of(None) == ""


def test_the_build_of_a_row_contains_its_score_function():
    rows = (row for card in SHIPPED.values() for row in card.rows if row.is_ours and row.problem.score)
    row = next(rows)
    build = code.build_of(row.json["kernel"], row.problem, row.json["config"], "sm_90", {})
    assert build is not None and "DEVICE float slope(" in build.unit and row.json["code"]


def test_readme_shows_the_measurements():
    text = README.read_text(encoding="utf-8")
    assert report.update(text, SHIPPED) == text, "run `make readme`"
    assert report.page(SHIPPED) == report.PAGE.read_text(encoding="utf-8"), "run `make readme`"


class TestParts:
    def test_every_kernel_that_a_call_may_name_is_timed(self):
        timed = set()
        for part in PARTS:
            for case in part.cases(H200):
                for contender in (c for c in case.contenders if c.is_ours):
                    with contextlib.suppress(ValueError):  # no kernel serves it
                        timed.add(contender.plan(case.problem, H200).spec.name)
        assert timed >= {*kernels_of("forward"), *kernels_of("backward")}
        assert timed <= KERNELS.keys()

    def test_the_published_shapes_are_measured_in_both_regimes(self):
        for section in ("forward", "decode", "backward"):
            assert {part.regime for part in PARTS if part.kept_in == section} == set(Regime)
