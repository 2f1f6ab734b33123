"""`cufa repro`: a program that repeats measurements, and its run on the CPU."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cufa.cli import main
from cufa.commands import repro
from cufa.commands.common import seconds_text
from cufa.measure import cards
from cufa.measure.cases import Case
from cufa.measure.measured import Measured
from cufa.measure.regimes import Regime
from cufa.problem.problem import Problem


@pytest.fixture(scope="module")
def h200():
    return cards.load(cards.path_of("NVIDIA H200"))


def _cases(text):
    """CASES and RECORDED of a program."""
    found = {}
    exec(text.partition("if __name__")[0], found)
    return [Case.from_json(x) for x in found["CASES"]], found["RECORDED"]


def invoke(*arguments):
    return CliRunner().invoke(main, ("repro", *arguments), catch_exceptions=False)


@pytest.mark.parametrize("suite", ["versions", "decode", "splits", "ladder", "masks"])
def test_a_program_has_the_plans_that_were_recorded(h200, suite):
    """Tiles, splits and grid of each row: also of rows whose tiles are not the planner's choice."""
    rows = [row for row in h200.of_suite(suite) if row.problem.operation != "backward"][:40]
    for row in rows:
        (case,), (figures,) = _cases(repro.program([row], h200.sessions[row.recorded]))
        (contender,) = case.contenders
        assert (contender.label, case.lengths and list(case.lengths)) == (row.label, row.json.get("lengths"))
        assert case.problem_of(contender) == row.problem and figures["p50_ns"] == row.p50_ns
        if row.is_ours:
            plan = contender.plan(case.problem, h200.device)
            assert (plan.spec.name, plan.config) == (
                row.json["kernel"],
                plan.spec.read_config(row.json["config"]),
            )
            assert [list(x.grid) for x in plan.launches] == row.json["grid"]


def test_persistent_blocks_that_were_switched_off_stay_off(h200):
    rows = h200.of_suite("ladder")[:4]
    (case,), _ = _cases(repro.program(rows, h200.sessions[rows[0].recorded]))
    assert [x.one_item_a_block for x in case.contenders] == [True, True, True, False]


def test_contenders_of_a_case_stay_together(h200):
    rows = [row for row in h200.of_suite("decode") if row.regime is Regime.IN_TURNS][:8]
    cases, figures = _cases(repro.program(rows, h200.sessions[rows[0].recorded]))
    assert [(x["case"], x["label"]) for x in figures] == [
        (n, contender.label) for n, case in enumerate(cases) for contender in case.contenders
    ]
    assert len(cases) < len(rows)


@pytest.mark.in_turn
def test_the_program_runs_on_the_cpu(h200, tmp_path):
    file = tmp_path / "again.py"
    smallest = next(n for n, x in enumerate(h200.of_suite("versions")) if x.label == "fa2")
    assert invoke(f"nvidia-h200.versions.{smallest}", "-o", str(file)).exit_code == 0
    done = subprocess.run(
        [sys.executable, str(file), "--cpu", "--seconds", "0.01"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    recorded = seconds_text(h200.of_suite("versions")[smallest].p50_ns * 1e-9)
    assert recorded in done.stdout and "512×512" in done.stdout
    assert "NumPy, not the kernel" in done.stderr
    once = [sys.executable, str(file), "--cpu", "--once"]
    assert subprocess.run([*once, "fa2"], timeout=300).returncode == 0
    unknown = subprocess.run([*once, "fa9"], capture_output=True, text=True, timeout=300)
    assert unknown.returncode == 2 and "there are: fa2" in unknown.stderr


@pytest.mark.in_turn
def test_a_file_of_bench(tmp_path):
    ran = CliRunner().invoke(
        main, ["bench", "--suite", "quick", "--device", "cpu", "--seconds", "0.01", "--json"]
    )
    (tmp_path / "run.json").write_text(ran.stdout, encoding="utf-8")
    done = invoke(str(tmp_path / "run.json"), "--row", "1")
    (case,), (figures,) = _cases(done.stdout)
    row = json.loads(ran.stdout)["rows"][1]
    assert (case.problem, figures["label"]) == (Problem.from_json(row["problem"]), row["label"])


def test_unknown_sources_say_what_there_is():
    assert "cards: nvidia-h100" in invoke("nvidia-h300").stderr
    assert "suites: forward" in invoke("nvidia-h200.sideways").stderr
    assert "there are rows 0 to" in invoke("nvidia-h200.forward", "--row", "100000").stderr


def test_a_row_whose_tiles_are_gone_names_its_commit(h200):
    row = next(row for row in h200.rows if row.is_ours and row.problem.operation == "forward")
    gone = Measured({**row.json, "config": {**row.json["config"], "num_stages": 40}}, row.problem)
    with pytest.raises(ValueError, match=f"Repeat this row in commit {row.json['commit']}"):
        repro.program([gone], h200.sessions[row.recorded])


def test_rows_of_both_regimes_are_refused(h200):
    both = {row.regime: row for row in h200.of_suite("decode")}
    with pytest.raises(ValueError, match="filter the rows by regime"):
        repro.program(list(both.values()), h200.environment)
