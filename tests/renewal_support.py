"""A GPU whose measuring is replaced, for tests of evidence that is recorded in parts."""

from __future__ import annotations

import math

import pytest
from records_support import H200, SHIPPED, as_json, measured_row

from cufa.measure import evidence, evidence_parts, part_run, records, renewal
from cufa.measure.limits import Limits
from cufa.measure.regimes import Regime
from cufa.measure.runner import Skipped
from cufa.measure.sustained import Load

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
