"""Recording evidence in parts: measuring again only what a change made stale."""

# ruff: noqa: F811 - fixtures are imported, and asked for by their names

from __future__ import annotations

import copy

import numpy as np
import pytest
from click.testing import CliRunner
from records_support import H200, SHIPPED, as_json, made_up_record, measured_row
from renewal_support import (  # noqa: F401 - fixtures among them
    FIRST_DAY,
    NAMES,
    PARTS,
    SECOND_DAY,
    card,
    change,
    record,
    run,
)

from cufa.commands.evidence import evidence_command
from cufa.gpu.architectures import Device
from cufa.kernels.params import TRACE_RECORD
from cufa.measure import (
    evidence,
    evidence_parts,
    host_times,
    overview,
    records,
    renewal,
    report,
    suites,
    summary,
    traces,
)
from cufa.measure.recorded import rows_of
from cufa.measure.regimes import Regime
from cufa.plan.planner import make_plan


class TestRenewing:
    def test_nothing_is_stale_in_a_new_record(self, record):
        assert renewal.stale_parts(record, H200) == {}
        assert all("was not timed" in problem for problem in evidence.problems_with(record)), (
            "other parts time them"
        )

    def test_only_parts_that_ran_the_kernel_are_measured_again(self, card, record):
        change(record, "fa1_forward")
        assert renewal.stale_parts(record, H200) == {"fa1-blocks, in turns": "fa1_forward changed"}
        before = copy.deepcopy(record["suites"])
        renewed = as_json(run(begun=record, renew=True))
        assert card.measured == ["fa1-blocks, in turns"]
        assert card.compiled == ["fa1_forward"]
        assert card.tested == 1
        assert {name: suite for name, suite in renewed["suites"].items() if name != "fa1-blocks"} == {
            name: suite for name, suite in before.items() if name != "fa1-blocks"
        }
        assert sorted(renewed["parts"]) == sorted(NAMES)
        assert renewal.stale_parts(renewed, H200) == {} and not records.stale_kernels(renewed)
        assert len(renewed["suites"]["fa1-blocks"]["rows"]) == len(before["fa1-blocks"]["rows"])

    def test_what_was_measured_later_says_when_and_with_what(self, card, record):
        card.driver = "590.2"
        renewed = run(begun=change(record, "fa1_forward"), renew=True)
        measured = renewed["suites"]["fa1-blocks"]["measured"]["in turns"]
        assert measured["recorded"] == SECOND_DAY and measured["gpu"]["driver_version"] == "590.2"
        assert "arch" not in measured and measured["seconds"] >= 0
        assert renewed["kernels"]["fa1_forward"]["recorded"] == SECOND_DAY
        assert "recorded" not in renewed["suites"]["memory"]["measured"]["in turns"]
        assert "recorded" not in renewed["kernels"]["naive"]
        assert renewed["environment"]["recorded"] == FIRST_DAY
        page = report.markdown({"x": renewed})
        assert page.count("Measured on 2026-01-09 with driver 590.2: fa1-blocks (in turns).") == 1
        assert "3 GPU tests passed, 0 failed, 0 skipped on 2026-01-09 with driver 590.2." in page
        assert "| fa1_forward on 2026-01-09 | 1.0 |" in page and "| naive | 1.0 |" in page

    def test_a_record_of_one_day_says_nothing_of_days(self, record):
        page = report.markdown({"x": record})
        assert "Measured on" not in page and " on 2026" not in page

    def test_a_kernel_that_calls_run_renews_the_times_of_the_host(self, card, record):
        """fa1 is not among them, what auto takes is."""
        assert run(begun=change(copy.deepcopy(record), "fa1_forward"), renew=True)["host_calls"] == [
            {"call": f"on {FIRST_DAY}", "p10_us": 1, "p50_us": 1, "p90_us": 1}
        ]
        name = "fa3_forward"
        assert name in host_times.kernels(H200)
        renewed = run(begun=change(record, name), renew=True)
        assert renewed["host_calls"][0]["call"] == f"on {SECOND_DAY}"
        assert "Host time of one call, µs on 2026-01-09" in report.markdown({"x": renewed})

    def test_a_kernel_that_was_never_recorded_is_measured_where_it_runs(self, card, record):
        del record["kernels"]["fa1_forward"]
        for suite in record["suites"].values():
            suite["rows"] = [row for row in suite["rows"] if row.get("kernel") != "fa1_forward"]
        (why,) = renewal.stale_parts(record, H200).values()
        assert why.endswith("rows are new")
        renewed = run(begun=record, renew=True)
        assert card.measured == ["fa1-blocks, in turns"]
        assert renewed["kernels"]["fa1_forward"]["tests_passed"] == 3

    def test_tiles_that_the_planner_would_not_take_now_are_stale(self, record):
        row = next(row for row in record["suites"]["memory"]["rows"] if row["label"] == "fa2")
        row["config"]["block_q"] += 64
        assert renewal.stale_parts(record, H200) == {"memory, in turns": "1 rows are planned otherwise now"}

    def test_a_field_that_records_did_not_have_makes_nothing_stale(self, record):
        for row in rows_of(record):
            row.json.get("config", {}).pop("min_head_dim", None)
        assert renewal.stale_parts(record, H200) == {}

    def test_a_case_that_is_no_longer_asked_for_is_stale(self, record):
        rows = record["suites"]["memory"]["rows"]
        rows.append({**rows[0], "label": "another"})
        assert renewal.stale_parts(record, H200) == {"memory, in turns": "1 rows are no longer asked for"}

    def test_results_of_tests_of_other_kernels_do_not_stand(self, card, record):
        renewed = run(begun=change(record, "fa1_forward"), renew=True, with_tests=False)
        assert renewed["tests"] is None
        assert "the GPU tests were not run" in evidence.problems_with(renewed)

    def test_rows_that_took_turns_stay_in_front(self, card, record, monkeypatch):
        """Tables and the summary name regimes in the order in which they find them."""
        both = tuple(evidence_parts.Part("memory", regime) for regime in Regime)
        for module in (evidence, renewal):
            monkeypatch.setattr(module, "EVIDENCE", both)
        begun = run(begun=record, with_tests=False)
        record["parts"].remove("memory, in turns")
        renewal.take_out(record, ["memory, in turns"], H200)
        rows = record["suites"]["memory"]["rows"]
        record["suites"]["memory"]["rows"] = [row for row in rows if row["regime"] == "sustained"]
        again = run(begun=begun, with_tests=False)
        regimes = [row["regime"] for row in again["suites"]["memory"]["rows"]]
        assert regimes == sorted(regimes) and set(regimes) == {"in turns", "sustained"}


@pytest.mark.parametrize("kernel", ["fa1_forward", "decode_split_tma"])
def test_shipped_records_say_of_every_part_whether_it_is_stale(kernel):
    """Part for part: a change of one kernel names those in which it ran, and no others."""
    record = copy.deepcopy(SHIPPED["nvidia-h200"])
    device = renewal.device_of(record)
    assert device == Device("NVIDIA H200", H200.arch, 132)
    ran = {
        part.name
        for part in evidence_parts.EVIDENCE
        for row in rows_of(record)
        if row.json.get("kernel") == kernel and part.keeps(row.suite, row.json)
    }
    stale = renewal.stale_parts(change(record, kernel), device)
    assert ran == {name for name, why in stale.items() if kernel in why}


def test_the_least_time_of_a_part_is_that_of_its_regime():
    """Half a second per shape in turns; alone, each contender three seconds and half a one to warm up."""
    in_turns, alone = (next(x for x in PARTS if x.suite == name) for name in ("memory", "energy"))
    assert renewal.least_seconds(in_turns, H200) == 4 * 0.5
    assert renewal.least_seconds(alone, H200) == 8 * 3 * 3.5


class TestCommand:
    """`cufa evidence stale`, and the traces that --renew takes again."""

    @pytest.mark.parametrize(("kernel", "exit_code"), [(None, 0), ("fa1_forward", 1)])
    def test_stale_prints_what_would_be_measured_and_why(self, record, monkeypatch, kernel, exit_code):
        monkeypatch.setattr(
            records, "load_all", lambda: {"h200": change(record, kernel) if kernel else record}
        )
        found = CliRunner().invoke(evidence_command, ["stale"])
        assert found.exit_code == exit_code
        line = "h200.json: fa1-blocks, in turns: fa1_forward changed; 3 s or more\n"  # six shapes
        assert found.output == (line if kernel else "")

    def test_only_traces_of_changed_kernels_are_taken_again(self, tmp_path):
        plans = list(traces.evidence_plans(H200))[:3]

        def keep(plan, device="H200", digest=None):
            found = np.zeros(1, TRACE_RECORD)
            digest = digest or records.digest(plan.spec)
            environment = {"device": device}
            trace = traces.Trace(plan.spec.name, digest, plan.problem, plan.config, 132, environment, found)
            return traces.save(trace, tmp_path)

        current, stale = keep(plans[0]), keep(plans[1], digest="older")
        elsewhere = keep(plans[1], device="A100", digest="older")
        not_asked_for = keep(make_plan(suites.make(1, 1, 64, 64, "float16"), H200))
        assert traces.renewed(H200, plans, tmp_path) == plans[1:]
        assert current.exists() and elsewhere.exists()
        assert not stale.exists() and not not_asked_for.exists()


class TestSecondCard:
    """Made-up records of two cards: the second is slower, was recorded later, and one kernel has changed since."""

    @pytest.fixture
    def two(self):
        first, second = made_up_record(), made_up_record()
        first["environment"]["device"] = "Wide GPU"
        second["environment"] |= {"device": "A narrow GPU", "recorded": SECOND_DAY}
        second["limits"]["copy_bytes"] = 3e12
        for made_up, factor in ((first, 1), (second, 2)):
            rows = [
                measured_row(label, suites.make(4, 16, 4096, 128, "bfloat16"), seconds * factor)
                for label, seconds in (("fa2", 1e-3), ("torch flash", 1.5e-3))
            ]
            rows[0] = measured_row(
                "fa2", rows[0].problem, 1e-3 * factor, make_plan(rows[0].problem, H200, "fa2")
            )
            section = {
                "title": "forward",
                "rows": [as_json(records.row_record(x)) for x in rows],
                "skipped": [],
            }
            made_up["suites"]["forward"] = section
        change(second, "fa2_forward")
        return {"a-narrow-gpu": second, "wide-gpu": first}

    def test_both_have_a_table_the_wider_one_first(self, two):
        text = "\n".join(overview.overview(two))
        assert text.index("**Wide GPU**, 2026-01-02") < text.index("**A narrow GPU**, 2026-01-09")
        assert text.count("| FA2, 1k to 16k | PyTorch's FA2 | 1.50× |") == 2
        assert summary.summary(two).startswith("On an Wide GPU (2026-01-02, ")
        assert report.markdown(two).index("## Wide GPU") < report.markdown(two).index("## A narrow GPU")

    def test_what_has_changed_since_is_said_of_the_older_one_alone(self, two):
        sentence = "Changed since this was measured: fa2_forward."
        for text in ("\n".join(overview.overview(two)), report.markdown(two)):
            assert text.count(sentence) == 1
            assert text.index("Changed since") > text.index("A narrow GPU")
        # The summary is of the widest card alone: here of the one that is current, then of the older one.
        assert "Changed since" not in summary.summary(two)
        older = {"a-narrow-gpu": two["a-narrow-gpu"]}
        assert summary.summary(older).splitlines().count(sentence) == 1
        assert not records.unproven_kernels(two.values())

    def test_pages_with_one_card_are_as_before(self, two):
        alone = {"wide-gpu": two["wide-gpu"]}
        assert "A narrow GPU" not in report.page(alone) and "Changed since" not in report.page(alone)


def test_a_record_measured_anew_as_a_whole_is_of_the_new_day():
    begun, again = ({"recorded": day, "gpu": {"driver_version": "1"}} for day in (FIRST_DAY, SECOND_DAY))
    later = SECOND_DAY.replace("03:04", "05:06")

    def record(**other):
        measured = {"in turns": {"seconds": 1.0, **again, **other}, "sustained": {"recorded": later}}
        tests = {"measured": {"recorded": SECOND_DAY}}
        return {"environment": begun, "suites": {"forward": {"measured": measured}}, "tests": tests}

    whole, part = record(), record()
    del part["suites"]["forward"]["measured"]["in turns"]["recorded"]
    untouched = copy.deepcopy(part)
    renewal.settle(part)
    assert part == untouched
    renewal.settle(whole)
    assert whole["environment"]["recorded"] == later
    assert renewal.other_days(whole) == "" == renewal.when_else(whole, whole["tests"]["measured"])
    assert renewal.when_else(whole, whole["limits_measured"]) == f" on {FIRST_DAY[:10]}"
    settled = copy.deepcopy(whole)
    renewal.settle(whole)
    assert whole["limits_measured"] == settled["limits_measured"]
