"""Figures of pages over the shipped records: one value of each quantity, no time below its bound, no card unnamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboard_page_support import figures, has, open_page, words

from cufa.dashboard.link import several
from cufa.dashboard.model import counters, evidence
from cufa.dashboard.model.asked import Asked, together
from cufa.dashboard.model.levels import levels_of
from cufa.dashboard.model.needs import with_needs
from cufa.dashboard.worker.jobs import Job
from cufa.measure.regimes import Regime


def test_no_measurement_beats_its_bound_and_memory_has_one_ceiling(shipped: Path) -> None:
    """Over all cards, suites and regimes, with the ceilings of the page Roofline."""
    sustained = 0
    for card in evidence.load():
        assert card.limits is not None
        for m in card.rows:
            least, binds = m.bound
            assert 0 < least <= m.seconds, (m.label, str(m.problem), m.regime, binds)
            memory = m.row.json["io_bytes"] / card.read_bytes
            told = with_needs(m, card).needs.get("memory") if m.suite == "forward" else None
            assert told is None or told == pytest.approx(memory, abs=1e-9)
            sustained += binds.endswith(" MHz")
        m = next(m for m in card.rows if m.kernel and m.lengths is None)
        level = levels_of(m.subject, card.limits, card.device)[0]
        assert level.ceiling == card.read_bytes
        m = next(with_needs(m, card) for m in card.rows if m.kernel == "fa3_forward" and m.suite == "forward")
        shared = levels_of(m.subject, card.limits, card.device)[2].seconds
        assert shared is None or m.needs["shared memory"] == pytest.approx(shared, abs=1e-9)
    assert sustained > 20


def test_a_trace_of_another_card_or_problem_says_so(shipped: Path) -> None:
    trace = next(iter(counters.inside_traces()[0].values()))
    p = trace.problem
    assert counters.differences(trace, p, str(trace.environment["device"])) == ""
    said = counters.differences(trace, p, "NVIDIA A100")
    assert str(trace.environment["device"]) in said and str(p) in said
    app = open_page("masked_work", alg="fa3", sq="512", sk="512", d="128")
    said = words(app)
    bars = [
        trace
        for figure in figures(app)
        for trace in figure["data"]
        if trace.get("name", "").startswith("waits")
    ]
    assert bars and {trace["marker"]["pattern"]["shape"] for trace in bars} == {"/"}, "hatched"
    has(said, "µs on one SM", "Unlike the controls above, measured on ", "with stamps: its run takes ")
    has(said, "warps that multiply wait ", "; the producer waits ")


def test_names_with_commas_come_back_from_a_link(shipped: Path) -> None:
    """Kernels of the ladder are named by sentences with commas."""
    card = next(e for e in evidence.load() if e.device == "NVIDIA H200")
    label = next(m.label for m in card.rows if m.suite == "ladder" and "," in m.label)
    app = open_page("roofline", machine=card.name, suite="ladder", show=several([label]))
    assert not [x for x in app.warning if "the link asks" in x.value]
    assert app.multiselect(key="roofline.show").value == [label]


def test_a_run_is_named_after_a_preset_only_while_the_fields_are_its_own(
    elsewhere: Path, asked: list[Job]
) -> None:
    for changed in ({}, {"sq": "4096"}):
        open_page("run", preset="small", **changed).button(key="run.start").click().run()
    whole, changed_one = (job.title for job in asked)
    assert whole == "small" and "4096×2048" in changed_one


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
def test_two_kernels_have_the_times_of_the_chosen_card(shipped: Path, device: str) -> None:
    found = evidence.measurements()
    first = next(m for m in found if m.suite == "forward" and m.kernel and m.regime is Regime.IN_TURNS)
    sides = [
        Asked(m.problem, m.kernel, m.subject.config, m.regime, device)
        for m in found
        if m.group == first.group and m.kernel
    ]
    kept = together(found, sides)
    assert len(kept) == len(sides) > 1
    assert {m.machine for m in kept} == {device} or "A100" in device
