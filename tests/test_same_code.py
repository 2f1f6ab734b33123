"""Evidence of a kernel whose sources changed: it stays where the machine code is the same, and nowhere else."""

from __future__ import annotations

import copy
import json

import pytest
from changed_sources import with_changed
from click.testing import CliRunner
from records_support import H200, as_json, made_up_record, measured_row

from cufa.build import compiler
from cufa.commands.evidence import evidence_command
from cufa.kernels import KERNELS
from cufa.measure import records, traces
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL

same_code = pytest.importorskip("cufa.measure.same_code", reason="pyelftools reads machine code's sections")
SameCode = same_code.SameCode

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def before(tmp_path, monkeypatch):
    """``before(change)``: a folder of sources, of which the checkout's now are a change."""

    def changed(file: str, change) -> object:
        then = compiler.SOURCE_DIR
        monkeypatch.setattr(compiler, "SOURCE_DIR", with_changed(tmp_path, file, change))
        return then

    return changed


@pytest.fixture
def record():
    """With a row of naive attention, and that kernel alone."""
    found = made_up_record()
    problem = make(1, 2, 512, 64, "bfloat16", CAUSAL)
    row = measured_row("naive", problem, 1e-3, make_plan(problem, H200, "naive"))
    found["suites"] = {"some": {"title": "some", "rows": [records.row_record(row)], "skipped": []}}
    found["kernels"] = {"naive": found["kernels"]["naive"]}
    return as_json(found)


@pytest.fixture
def few_variants(monkeypatch):
    monkeypatch.setattr(same_code, "variants", lambda archs, kernels: [])


def restamped(record, before):
    """The record, and what is stale in it, once it has been compared."""
    found = copy.deepcopy(record)
    return SameCode(before, lambda what: None).restamp_record(found), found, records.stale_kernels(found)


def test_code_that_nobody_runs_changes_no_evidence(record, before, few_variants):
    then = before("shared/params.cuh", lambda text: text + "\nDEVICE int nobody_asks() { return 1; }\n")
    assert records.stale_kernels(record) == ["naive"]
    changed, found, stale = restamped(record, then)
    assert changed and not stale
    assert found["suites"]["some"]["rows"][0]["digest"] == records.digest(KERNELS["naive"])


def test_another_instruction_is_another_kernel(record, before, few_variants):
    then = before("forward/naive/kernel.cu", lambda text: text.replace(": NEG_INF;", ": -1e30f;", 1))
    changed, found, stale = restamped(record, then)
    assert not changed and stale == ["naive"] and found == record


def test_a_kernel_is_what_its_variants_are(record, before, monkeypatch):
    """Tests ran more builds than rows are of: one that differs leaves the kernel stale, and its rows fresh."""
    problem = make(1, 2, 512, 72, "float16")
    plan = make_plan(problem, H200, "naive")

    class Variant:
        source, arch = plan.spec.source, H200.arch

    Variant.constants = {**plan.constants, "TRACE": False}
    monkeypatch.setattr(same_code, "variants", lambda archs, kernels: [Variant] * (kernels == ("naive",)))
    then = before(
        "forward/naive/kernel.cu",
        lambda text: text.replace(": NEG_INF;", ": HEAD_DIM == 72 ? -1e30f : NEG_INF;", 1),
    )
    changed, found, stale = restamped(record, then)
    assert changed and stale == ["naive"]
    assert found["suites"]["some"]["rows"][0]["digest"] == records.digest(KERNELS["naive"])


def test_tiles_that_the_sources_did_not_know_were_no_evidence(tmp_path):
    then = with_changed(
        tmp_path, "forward/naive/kernel.cu", lambda text: text + "\nstatic_assert(HEAD_DIM != 72);\n"
    )
    for head_dim, same in ((64, True), (72, False)):
        plan = make_plan(make(1, 2, 512, head_dim, "float16"), H200, "naive")
        build = same_code.Build.of(plan.spec, plan.problem, plan.config, H200.arch)
        assert build.is_same(then) == same


def test_evidence_of_other_sources_is_left_alone(record, before, few_variants):
    for row in record["suites"]["some"]["rows"]:
        row["digest"] = "older"
    for kernel in record["kernels"].values():
        kernel["digest"] = "older"
    then = before("shared/params.cuh", lambda text: text + "\nDEVICE int nobody_asks() { return 1; }\n")
    assert restamped(record, then)[:2] == (False, record)


def test_the_command_writes_what_stays(record, before, few_variants, tmp_path, monkeypatch):
    folder = tmp_path / "records"
    monkeypatch.setattr(records, "RECORDS_DIR", folder)
    monkeypatch.setattr(records, "load_all", lambda: {"card": record})
    monkeypatch.setattr(traces, "load_all", lambda folder: {})
    monkeypatch.setattr(same_code.inside, "load_all", lambda folder: {})
    then = before("shared/params.cuh", lambda text: text + "\nDEVICE int nobody_asks() { return 1; }\n")
    found = CliRunner().invoke(evidence_command, ["same-code", "--before", str(then)])
    assert found.exit_code == 0, found.output
    assert records.stale_kernels(json.loads((folder / "card.json").read_text())) == []
