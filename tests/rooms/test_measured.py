"""Measurement rows and the files of cards: what is written, read back, and shown as stale."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from card_support import lines_of, write_lines
from evidence import gpu_tests, recorder
from evidence.card_file import CardFile, without_samples
from records_support import CEILINGS, ENVIRONMENT, LIMITS, SHIPPED, made_up_card, versions_rows

from cufa.kernels import KERNELS
from cufa.measure import cards, measured, timing
from cufa.measure.cases import READ, Case, Work, contenders
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import make
from cufa.measure.timing import Timing

LATER = {**ENVIRONMENT, "recorded": "2026-01-09T03:04:05+00:00", "commit": "0123456789ab"}


def test_a_row_is_plain_json_and_a_run_keeps_every_sample():
    row = json.loads(json.dumps(versions_rows()[3]))
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


def test_nan_error_is_null():
    problem = make(1, 1, 8, 8, "float32", False)
    (row,), _ = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.01)
    about = row.case, row.label, problem, row.timing, Work.of(problem), LIMITS.floor(problem)
    for error in (math.nan, math.inf):
        wrong = measured.row_of(*about, error=error)
        assert wrong.json["max_error"] is None and not wrong.is_number and math.isnan(wrong.error)
    assert row.is_number and measured.row_of(*about, error=0.5).error == 0.5
    assert measured.row_of("", READ, *about[2:]).error is None


class TestWithoutSamples:
    """What is kept says what the samples said."""

    @pytest.fixture
    def pairs(self):
        whole = versions_rows()[:4]
        kept = json.loads(json.dumps(list(without_samples(whole))))
        return [measured.Measured(x) for x in whole], [measured.Measured(x) for x in kept]

    def test_times_and_rates(self, pairs):
        for whole, kept in zip(*pairs, strict=True):
            assert "samples_ns" not in kept.json and not kept.timing.samples
            for name in ("p10", "p50", "p90"):
                assert getattr(kept.timing, name) == pytest.approx(getattr(whole.timing, name), abs=1e-9)
            assert kept.timing.count == whole.timing.count
            assert kept.timing.median_interval == pytest.approx(whole.timing.median_interval, abs=1e-9)
            assert kept.tflops == whole.tflops and kept.gbytes == whole.gbytes

    def test_ratios_of_the_same_rounds_keep_their_interval(self, pairs):
        for a, kept_a in zip(*pairs, strict=True):
            for b, kept_b in zip(*pairs, strict=True):
                if a is not b:
                    expected, found = timing.speedup(a.timing, b.timing), measured.speedup(kept_a, kept_b)
                    assert dataclasses.astuple(found) == pytest.approx(
                        dataclasses.astuple(expected), rel=1e-3
                    )

    def test_ratios_of_other_rounds_come_from_both_medians(self):
        slow, fast = (
            Timing((), Regime.IN_TURNS, timing.Quantiles(9, t, t, t, 0.9 * t, 1.1 * t)) for t in (2.0, 1.0)
        )
        found = timing.speedup(slow, fast)
        assert found.value == 2 and 1.7 < found.low < 1.8 and 2.2 < found.high < 2.35


class TestCards:
    def test_saved_and_loaded(self, tmp_path):
        file = cards.path_of("NVIDIA H200 (PCIe)", tmp_path)
        assert file.name == "nvidia-h200-pcie.jsonl"
        write_lines(file, lines_of({"versions": versions_rows()}, ENVIRONMENT, CEILINGS))
        card = cards.load_all(tmp_path)["nvidia-h200-pcie"]
        assert [row.label for row in card.rows] == [row["label"] for row in versions_rows()]
        assert card.limits.copy_bytes == 4e12 and card.environment["recorded"] == ENVIRONMENT["recorded"]
        assert not card.past and not card.stale and card.device.num_sms == 132

    def test_the_newest_session_of_a_case_is_the_measurement(self):
        """As a whole: a contender that was not there then is not compared with one of another day."""
        rows = versions_rows()
        again = lines_of({"versions": [row for row in rows[:4] if row["label"] != "naive"]}, LATER)
        card = cards.of_lines("x", [*lines_of({"versions": rows}, ENVIRONMENT), *_renumbered(again, 100)])
        first, second = list(measured.by_case(card.rows))
        assert list(first) == ["fa1", "fa2_noskip", "fa2"] and len(second) == 4
        assert {row.recorded for row in first.values()} == {LATER["recorded"]}
        assert [row.label for row in card.past] == ["naive", "fa1", "fa2_noskip", "fa2"]
        assert card.environment["commit"] == LATER["commit"]

    @pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"what": "session"}'])
    def test_a_damaged_file_is_named(self, tmp_path, text):
        (tmp_path / "card.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"card\.jsonl is damaged"):
            cards.load_all(tmp_path)

    def test_shipped_rows_are_read_whole(self):
        for card in SHIPPED.values():
            for row in (*card.rows, *card.past):
                assert row.problem.flops > 0 and row.timing.p10 <= row.timing.p50 <= row.timing.p90
                assert row.timing.count >= 10 and card.sessions[row.recorded]["device"] == row.json["card"]

    def test_a_file_is_added_to(self, tmp_path):
        """Problems once; each line is on disk as soon as it is added."""
        file = CardFile(tmp_path / "card.jsonl", LATER)
        problem = make(1, 1, 8, 8, "float32", False)
        rows, _ = run_case(Case(problem, contenders("fa1", "fa2")), None, LIMITS, seconds=0.01)
        for suite in ("versions", "memory"):
            file.add_rows(suite, rows)
        file.add("tests", passed=1)
        lines = cards.read_lines(file.path)
        assert [x.get("what", "row") for x in lines] == ["session", "problem", *["row"] * 4, "tests"]
        card = CardFile(file.path, LATER).card
        assert [(row.suite, row.label) for row in card.rows][1:3] == [("versions", "fa2"), ("memory", "fa1")]
        assert card.rows[0].problem == problem and card.rows[0].json["commit"] == LATER["commit"]
        assert card.others["tests"]["passed"] == 1

    def test_a_rewritten_file_says_the_same(self, tmp_path):
        """Sessions of a case stand together; rows keep their order."""
        first = lines_of({"versions": versions_rows(), "memory": versions_rows()}, ENVIRONMENT, CEILINGS)
        again = _renumbered(lines_of({"versions": versions_rows()[:4]}, LATER), 100)
        file = write_lines(tmp_path / "card.jsonl", [*first, *again])
        before = cards.load(file)
        CardFile(file, LATER).rewrite()
        after = cards.load(file)
        for name in ("rows", "past"):
            assert [x.json for x in getattr(after, name)] == [x.json for x in getattr(before, name)]
        assert after.past and after.others == before.others and after.sessions == before.sessions


def _renumbered(lines, by):
    """The same lines, with problems of their own."""
    for line in lines:
        name = "id" if line.get("what") == "problem" else "problem"
        yield {**line, name: line[name] + by} if name in line else line


class TestStale:
    @pytest.mark.parametrize("code", [None, "0123456789abcdef"])
    def test_a_row_of_other_machine_code_is_stale(self, code):
        """Whatever its sources; a row without a digest of machine code goes by its sources."""
        rows = versions_rows()
        assert not made_up_card({"versions": rows}).stale
        rows[3]["code"] = code
        card = made_up_card({"versions": rows})
        assert card.stale == [rows[3]["kernel"]]
        assert card.changed == f"Changed since measured: {rows[3]['kernel']}."
        rows[3]["code"] = next(iter(cards.current_code()))
        assert not made_up_card({"versions": rows}).stale
        del rows[3]["code"]
        rows[3]["digest"] = "0" * 64
        assert made_up_card({"versions": rows}).stale

    def test_a_peer_is_never_stale(self):
        rows = versions_rows()[:2]
        del rows[1]["kernel"]
        rows[1]["code"] = None
        assert not made_up_card({"versions": rows}).stale


def test_a_good_card_has_no_problems():
    assert recorder.problems_with(made_up_card()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failed": 1}, "1 GPU tests failed"),
        ({"passed": 0}, "0 passed"),
        (
            {"passed_by_kernel": {**dict.fromkeys(KERNELS, 1), "fa1_forward": 0}},
            "no GPU test ran fa1_forward",
        ),
        ({"passed_by_kernel": {}}, "no GPU test ran decode_split_fp8"),
    ],
)
def test_bad_tests_are_named(change, message):
    assert any(message in problem for problem in recorder.problems_with(made_up_card(**change)))


def test_nan_and_kernels_without_times_are_named():
    rows = versions_rows()
    rows[0]["max_error"] = None
    found = recorder.problems_with(made_up_card({"versions": rows}))
    assert any("naive gave NaN" in problem for problem in found) and "fa3_forward was not timed" in found


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
