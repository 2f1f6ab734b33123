"""Recording evidence in parts: going on after a lost machine, and measuring again only what a change made stale."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from click.testing import CliRunner
from records_support import H200, SHIPPED, as_json, made_up_record, measured_row

from cufa.bench import (
    evidence,
    evidence_parts,
    host_times,
    overview,
    part_run,
    records,
    renewal,
    report,
    suites,
    summary,
    traces,
)
from cufa.bench.limits import Limits
from cufa.bench.recorded import rows_of
from cufa.bench.regimes import Regime
from cufa.bench.runner import Skipped
from cufa.bench.sustained import Load
from cufa.commands.evidence import evidence_command
from cufa.core.architectures import Device
from cufa.core.params import TRACE_RECORD
from cufa.planner import make_plan

#: Parts of few cases, of several kernels, of which one is kept in the section of another.
PARTS = tuple(x for x in evidence_parts.EVIDENCE if x.suite in ("memory", "fa1-blocks", "energy", "splits"))
NAMES = [part.name for part in PARTS]
FIRST_DAY, SECOND_DAY = "2026-01-02T03:04:05+00:00", "2026-01-09T03:04:05+00:00"


class Card:
    """A GPU whose measuring is replaced; what is asked for, kept and dropped is not."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.compiled: list[str] = []
        self.tested = 0
        self.day = FIRST_DAY
        self.driver = "580.1"

    def environment(self, device):
        gpu = {"driver_version": self.driver, "power.draw": f"{len(self.measured)} W"}
        environment = {"recorded": self.day, "device": device.name, "arch": "sm_90", "gpu": gpu}
        return {**environment, "num_sms": 132, "nvrtc": "13.0", "versions": {}}

    def run_case(self, case, device, limits, *, regime, seconds, seed):
        from test_record_tables import Power

        load = Load(9, 1, 3.0, 0.0, Power(650.0, 1500.0, 0.5)) if regime is Regime.SUSTAINED else None
        rows, skipped = [], []
        for x in case.contenders:
            problem = case.problem_of(x)
            if x.algorithm == "fa4":
                skipped.append(Skipped(case.name, x.label, problem, "not installed"))
                continue
            plan = x.plan(case.problem, device) if x.is_ours else None
            rows.append(measured_row(x.label, problem, 1e-3, plan, case.name, load))
        return rows, skipped

    def run_tests(self, jobs, say, every_case):
        self.tested += 1
        passed = dict.fromkeys(evidence.KERNELS, 3)
        return {"passed": 3, "failed": 0, "skipped": 0, "failures": [], "passed_by_kernel": passed}


@pytest.fixture
def card(monkeypatch):
    card, measure = Card(), part_run.measure

    def counted(record, part, *rest):
        try:
            measure(record, part, *rest)
        finally:
            if part.name in record["parts"]:
                card.measured.append(part.name)

    def cold_compiles(variants):
        card.compiled += [name for name, _ in variants]
        return [(1.0, "a variant") for _ in variants]

    for module in (evidence, renewal):
        monkeypatch.setattr(module, "EVIDENCE", PARTS)
    monkeypatch.setattr(part_run, "measure", counted)
    monkeypatch.setattr(part_run, "run_case", card.run_case)
    monkeypatch.setattr(evidence, "cold_compiles", cold_compiles)
    monkeypatch.setattr(
        evidence,
        "measure_limits",
        lambda device: Limits(4e12, {"bfloat16": 1e15}, 4e12, mma_flops={"tf32": 3e14}),
    )
    monkeypatch.setattr(evidence, "mma_rates", lambda device: {"bfloat16": 6e14})
    monkeypatch.setattr(evidence, "launch_seconds", lambda device: 2e-6)
    monkeypatch.setattr(evidence, "_compile_in_parallel", lambda cases, jobs: None)
    monkeypatch.setattr(evidence, "first_result_seconds", lambda: {"cold": 2.0, "warm": 1.0})
    monkeypatch.setattr(
        evidence, "host_calls", lambda: [{"call": f"on {card.day}", "p10_us": 1, "p50_us": 1, "p90_us": 1}]
    )
    monkeypatch.setattr(evidence, "run_gpu_tests", card.run_tests)
    monkeypatch.setattr(records, "environment", card.environment)
    monkeypatch.setattr(records, "load_all", lambda: SHIPPED)  # for usual times: it is read at every renewal
    monkeypatch.setattr(records, "gpu_state", lambda: None)
    return card


def run(keep=lambda record: None, begun=None, renew=False, with_tests=True, device=H200, limit=math.inf):
    return evidence.record_evidence(
        device, jobs=1, seconds=0.1, with_tests=with_tests, say=lambda what: None, keep=keep, begun=begun,
        renew=renew, limit=limit,
    )  # fmt: skip


@pytest.fixture
def record(card):
    """Of the first day, as it is read back; then nothing has been measured, and it is the second day."""
    found = as_json(run())
    assert found["parts"] == card.measured == NAMES
    card.measured.clear()
    card.compiled.clear()
    card.tested, card.day = 0, SECOND_DAY
    return found


def change(record, kernel):
    """As if a kernel's sources had changed since."""
    old = "0" * 64
    record["kernels"][kernel]["digest"] = old
    for suite in record["suites"].values():
        for row in suite["rows"]:
            if row.get("kernel") == kernel:
                row["digest"] = old
    return record


class TestGoingOn:
    def test_a_ceiling_that_older_records_lack_is_added_and_the_others_stay(self, record):
        assert record["limits"]["mma_flops"] == {"tf32": 3e14}
        kept = record["limits"].copy()
        kept.pop("mma_flops")
        record["limits"] = kept.copy()
        found = run(begun=record)
        assert found["limits"] == {**kept, "mma_flops": {"bfloat16": 6e14}, "launch_seconds": 2e-6}
        assert as_json(run(begun=as_json(found)))["limits"] == found["limits"]

    def test_a_lost_machine_costs_no_part_that_was_done(self, card):
        kept = []

        def keep(record):
            kept.append(copy.deepcopy(record))
            if len(kept) == 2:
                raise ConnectionError("the machine is gone")

        with pytest.raises(ConnectionError):
            run(keep)
        assert kept[-1]["parts"] == NAMES[:2]
        record = run(kept.append, begun=kept[-1])
        assert card.measured == NAMES == record["parts"]

    @pytest.mark.parametrize("day", [FIRST_DAY, SECOND_DAY])
    def test_nor_a_case_that_was_done_on_the_same_day(self, card, monkeypatch, day):
        """What a part has of another day is measured anew."""
        monkeypatch.setattr(part_run, "KEEP_SECONDS", 0.0)
        cases, run_case, kept = [], card.run_case, []

        def lost(case, device, limits, *, seed, **options):
            if len(cases) == 4 and not kept[-1].get("resumed"):
                raise ConnectionError("the machine is gone")
            cases.append((options["regime"], case.name, str(case.problem)))
            return run_case(case, device, limits, seed=seed, **options)

        monkeypatch.setattr(part_run, "run_case", lost)
        with pytest.raises(ConnectionError):
            run(lambda record: kept.append(as_json(record)))
        begun = kept[-1]["begun"]["cases"]
        assert kept[-1]["parts"] == [] and begun == 4
        card.day, left = day, {**kept[-1], "resumed": True}
        kept.append(left)
        whole = run(begun=as_json(left))
        assert "begun" not in whole and whole["parts"] == NAMES
        assert len(cases) == len(set(cases)) + (0 if day == FIRST_DAY else begun)
        expected = run()["suites"]
        assert {name: len(x["rows"]) for name, x in whole["suites"].items()} == {
            name: len(x["rows"]) for name, x in expected.items()
        }

    @pytest.mark.parametrize("slow", [*NAMES, "tests"])
    def test_what_would_end_after_the_limit_is_not_begun(self, card, monkeypatch, slow):
        def usual(what):
            return 1e6 if what == slow else 0.0

        monkeypatch.setattr(renewal, "usual_seconds", lambda part, device, recorded: usual(part.name))
        monkeypatch.setattr(renewal, "usual_test_seconds", lambda recorded: usual("tests"))
        kept, done = [], NAMES if slow == "tests" else NAMES[: NAMES.index(slow)]
        what = "testing" if slow == "tests" else slow
        with pytest.raises(
            evidence.OutOfTime, match=rf"{what} usually takes \d{{4,7}} s, and \d+ s are left"
        ):
            run(kept.append, limit=1000.0)
        assert card.measured == kept[-1]["parts"] == done
        assert not card.tested
        assert run(begun=as_json(kept[-1]))["parts"] == NAMES  # without a limit it ends
        assert card.compiled and len(set(card.compiled)) == len(card.compiled), "kernels are timed once"

    def test_a_part_usually_takes_what_it_took_and_at_least_what_its_regime_does(self):
        part, least = PARTS[0], renewal.least_seconds(PARTS[0], H200)
        measured = {part.kept_in: {"measured": {part.regime.value: {"seconds": least + 70.0}}}}
        recorded = [{"suites": measured, "tests": {"seconds": 9.0}}, {"suites": {}, "tests": None}]
        assert renewal.usual_seconds(part, H200, recorded) == least + 70.0
        assert renewal.usual_test_seconds(recorded) == 9.0
        assert renewal.usual_seconds(part, H200, []) == least
        assert renewal.usual_test_seconds([]) == 0.0

    def test_a_record_of_another_gpu_is_not_gone_on_with(self, card):
        with pytest.raises(ValueError, match="the record is of A100, this GPU is H200"):
            run(begun={"environment": {"device": "A100"}, "kernels": {}})
        assert not card.measured

    def test_nor_one_of_other_kernels(self, card, record):
        with pytest.raises(
            ValueError, match="naive changed since the record was made; `cufa evidence --renew`"
        ):
            run(begun=change(record, "naive"))
        assert not card.measured


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
        for record, factor in ((first, 1), (second, 2)):
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
            record["suites"]["forward"] = section
        change(second, "fa2_forward")
        return {"a-narrow-gpu": second, "wide-gpu": first}

    def test_both_have_a_table_the_wider_one_first(self, two):
        text = "\n".join(overview.overview(two))
        assert text.index("**Wide GPU**, 2026-01-02") < text.index("**A narrow GPU**, 2026-01-09")
        assert text.count("| FA2, 1k to 16k | PyTorch's FA2 | 1.50× |") == 2
        assert summary.summary(two).startswith("On an Wide GPU (2026-01-02, ")
        assert report.markdown(two).index("## Wide GPU") < report.markdown(two).index("## A narrow GPU")

    def test_what_has_changed_since_is_said_of_the_older_one_alone(self, two):
        for text in ("\n".join(overview.overview(two)), report.markdown(two)):
            assert text.count("Changed since this was measured: fa2_forward.") == 1
            assert text.index("Changed since") > text.index("A narrow GPU")
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
