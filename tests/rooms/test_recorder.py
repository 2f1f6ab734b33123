"""Recording: only what a card lacks is measured, case by case."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from evidence import __main__ as tool
from evidence import code, overview, recorder, report, traced
from evidence.card_file import CardFile
from evidence.recorder import PARTS, Part
from records_support import ENVIRONMENT, H200, SHIPPED, made_up_card, measured_row, rows_json

from cufa.calls import tuning
from cufa.measure import cards
from cufa.measure.limits import Limits
from cufa.measure.regimes import Regime
from cufa.measure.suites import make
from cufa.plan.planner import make_plan

LATER = "2026-01-09T03:04:05+00:00"
SOME = tuple(part for part in PARTS if part.suite in ("memory", "fa1-blocks"))


@pytest.fixture
def gpu(monkeypatch):
    """No GPU: a row of each contender of a case, as if it had been measured."""
    ran = []

    def run_case(case, device, limits, **how):
        ran.append(case)
        plans = ((c, c.plan(case.problem, device) if c.is_ours else None) for c in case.contenders)
        return [measured_row(c.label, case.problem_of(c), 1e-3, plan, case.name) for c, plan in plans], []

    monkeypatch.setattr(recorder, "run_case", run_case)
    monkeypatch.setattr(recorder, "PARTS", SOME)
    monkeypatch.setattr(recorder, "measure_limits", lambda device: Limits(4e12, {"bfloat16": 1e15}, 4e12))
    monkeypatch.setattr(recorder, "compile_lines", lambda specs: [
        {"what": "compile", "kernel": s.name, "seconds": 1.0, "of": "tiles"} for s in specs
    ])  # fmt: skip
    monkeypatch.setattr(recorder, "_compile_in_parallel", lambda cases, jobs: None)
    monkeypatch.setattr(recorder, "host_calls", list)
    monkeypatch.setattr(recorder, "first_result_seconds", lambda: {"cold": 2.0, "warm": 1.0})
    return ran


def record(path, day=ENVIRONMENT["recorded"], **how):
    file = CardFile(path, {**ENVIRONMENT, "recorded": day})
    options = {"jobs": 1, "seconds": 0.5, "limit": math.inf, "everything": False, "say": lambda what: None}
    recorder.record(file, H200, **{**options, **how})
    return cards.load(path)


def change(path, kernel):
    """Every row of a kernel is of other sources."""
    edit(path, lambda x: x.update({"digest": "0" * 64}) if x.get("kernel") == kernel else None)


def edit(path, change):
    file = CardFile(path, {})
    for line in file.lines:
        change(line)
    file.rewrite()


@pytest.fixture
def path(tmp_path, gpu):
    record(tmp_path / "card.jsonl")
    gpu.clear()
    return tmp_path / "card.jsonl"


class TestRenewing:
    def test_nothing_is_lacking_in_a_new_card(self, path, gpu):
        before = path.read_text()
        card = record(path, LATER)
        assert not gpu and path.read_text() == before and not card.past

    def test_only_cases_that_ran_a_changed_kernel_are_measured_again(self, path, gpu):
        change(path, "fa1_forward")
        cases = list(recorder.lacking(cards.load(path), H200))
        assert {(x.part.suite, x.why) for x in cases} == {("fa1-blocks", "fa1_forward changed")}
        card = record(path, LATER)
        assert [case.problem for case in gpu] == [x.case.problem for x in cases]
        assert not card.stale and {row.json["kernel"] for row in card.past} == {"fa1_forward"}
        assert {row.recorded for row in card.of_suite("memory")} == {ENVIRONMENT["recorded"]}
        assert "Measured on 2026-01-02: memory (in turns)" in report.markdown({"x": card})
        assert card.others["compile fa1_forward"]["recorded"] == LATER
        assert card.others["compile naive"]["recorded"] == ENVIRONMENT["recorded"]

    def test_a_card_of_one_day_says_nothing_of_days(self, path):
        page = report.markdown({"x": cards.load(path)})
        assert "Measured on" not in page and " on 2026" not in page

    def test_tiles_that_the_planner_would_not_take_now_are_measured(self, path, gpu):
        def other_tiles(line):
            if line.get("suite") == "memory" and line.get("label") == "fa2":
                line["config"]["block_q"] += 64

        edit(path, other_tiles)
        found = list(recorder.lacking(cards.load(path), H200))
        assert len(found) == 4 and {x.why for x in found} == {"planned otherwise now"}

    def test_a_field_that_older_rows_do_not_have_makes_nothing_stale(self, path):
        edit(path, lambda line: line.get("config", {}).pop("min_head_dim", None))
        assert not list(recorder.lacking(cards.load(path), H200))

    def test_a_machine_that_is_lost_costs_one_case(self, tmp_path, gpu, monkeypatch):
        """And a given time is kept: what is measured stays, and the next recording goes on."""
        path, total = tmp_path / "lent.jsonl", len(list(recorder.lacking(None, H200)))
        with pytest.raises(recorder.OutOfTime, match="s are left"):
            record(path, limit=1.0)
        assert not gpu and total
        one = recorder.run_case

        def lost(*of, **how):
            if len(gpu) == 3:
                raise ConnectionError
            return one(*of, **how)

        with monkeypatch.context() as patched:
            patched.setattr(recorder, "run_case", lost)
            with pytest.raises(ConnectionError):
                record(path)
        record(path, LATER)
        assert len(gpu) == total

    def test_peers_that_a_machine_lacks_are_not_waited_for(self):
        card = SHIPPED["nvidia-h200"]
        rows = tuple(row for row in card.rows if not row.is_peer)
        alone = dataclasses.replace(card, rows=rows)
        assert len(list(recorder.lacking(alone, H200))) == len(list(recorder.lacking(card, H200)))


def test_the_commands_end_to_end(tmp_path, gpu, monkeypatch):
    """On a card that is made up: traces, cases, tests, the planner's file, the page, and the work that is left."""
    monkeypatch.setattr(cards, "RECORDS_DIR", tmp_path)
    monkeypatch.setattr(tool, "find_device", lambda choice: H200)
    monkeypatch.setattr(tool, "environment", lambda device: {**ENVIRONMENT, "device": device.name})
    ran = {
        name: x
        for name, x in SHIPPED["nvidia-h200"].others["tests"].items()
        if name not in ("what", "recorded")
    }
    monkeypatch.setattr(tool.gpu_tests, "run_gpu_tests", lambda jobs, say, every_case: ran)
    monkeypatch.setattr(tuning, "RECORDED", tmp_path / "fastest")
    made = SimpleNamespace(
        load_all=lambda folder: {},
        record=lambda plan: plan,
        save=lambda plan, folder: folder / plan.spec.name,
    )
    folders = [(made, tmp_path / name, {}) for name in ("traces", "inside")]
    monkeypatch.setattr(traced, "TRACES", folders)
    monkeypatch.setattr(code, "TRACES", folders)

    def run(*arguments):
        return CliRunner().invoke(tool.main, arguments, catch_exceptions=False)

    found = run("record", "--inside", "--jobs", "1")
    assert all(f"{name} was not timed" in found.output for name in ("fa3_backward", "fa2_backward"))
    assert found.exit_code == 1 and len(gpu) == len(list(recorder.lacking(None, H200)))
    assert "## H200" in found.stdout and "inside/decode_split_tma" in found.stderr
    assert (tmp_path / "fastest" / "h200.json").exists()
    assert f"{ran['passed']:,} passed" in run("tests", "--record", "--jobs", "1").output
    card = cards.load(tmp_path / "h200.jsonl")
    assert card.others["tests"]["passed"] == ran["passed"] and not card.stale
    assert run("stale").output == ""
    edit(
        tmp_path / "h200.jsonl", lambda line: line.update({"digest": "0" * 64}) if "kernel" in line else None
    )
    assert "h200: memory, in turns: 4 cases" in run("stale").output
    assert run("fastest").output.strip() == str(tmp_path / "fastest" / "h200.json")


def test_the_least_time_of_a_case_is_that_of_its_regime():
    """Half a second in turns; alone, each contender three seconds and half a one to warm up."""
    in_turns, alone = Part("memory"), Part("energy", Regime.SUSTAINED)
    assert in_turns.least_seconds(in_turns.cases(H200)[0]) == 0.5
    assert alone.least_seconds(alone.cases(H200)[0]) == 3 * 3.5


class TestSecondCard:
    """Two made-up cards: the second is slower, was recorded later, and one kernel has changed since."""

    @pytest.fixture
    def two(self):
        found = {}
        for name, factor, day in (("A narrow GPU", 2, LATER), ("Wide GPU", 1, ENVIRONMENT["recorded"])):
            problem = make(4, 16, 4096, 128, "bfloat16")
            ours = measured_row("fa2", problem, 1e-3 * factor, make_plan(problem, H200, "fa2"))
            rows = rows_json([ours, measured_row("torch flash", problem, 1.5e-3 * factor)])
            rows[0] |= {"digest": "0" * 64} if factor == 2 else {}
            here = {**ENVIRONMENT, "device": name, "recorded": day}
            ceilings = {"copy_bytes": 4e12 / factor, "flops": {"float16": 6e14}, "exponentials": 4e12}
            found[name.lower().replace(" ", "-")] = made_up_card({"forward": rows}, here, ceilings)
        return found

    def test_both_have_a_table_the_wider_one_first(self, two):
        text = "\n".join(overview.overview(two))
        assert text.index("**Wide GPU**, 2026-01-02") < text.index("**A narrow GPU**, 2026-01-09")
        assert text.count("| FA2, 1k to 16k | PyTorch's FA2 | 1.50× |") == 2
        assert "measured on the Wide 2026-01-02, A 2026-01-09." in "\n".join(overview.speed(two))
        assert report.markdown(two).index("## Wide GPU") < report.markdown(two).index("## A narrow GPU")

    def test_stale_rows_are_said_of_their_card_alone(self, two):
        sentence = "Changed since measured: fa2_forward."
        for text in ("\n".join(overview.overview(two)), report.markdown(two)):
            assert text.count(sentence) == 1
            assert text.index("Changed since") > text.index("A narrow GPU")
        assert f"A: {sentence}" in "\n".join(overview.speed(two))
