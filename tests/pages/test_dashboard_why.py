"""The rules behind "Why, and what to try": each on a constructed case, and on recorded runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from dashboard_page_support import has, open_page, words
from dashboard_support import DEVICE, write_evidence

from cufa.dashboard.model import evidence, why
from cufa.dashboard.model.compiled import Entry
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.tilings import Tiling
from cufa.dashboard.model.why import Facts
from cufa.kernels import KERNELS
from cufa.measure.regimes import Regime
from cufa.measure.suites import make
from cufa.plan.planner import make_plan


@pytest.fixture
def all_cards(shipped: Path) -> list[Evidence]:
    return evidence.load()


@pytest.fixture
def h200(all_cards: list[Evidence]) -> Evidence:
    return next(e for e in all_cards if e.device == "NVIDIA H200")


def row(h200: Evidence, seconds: float, needs: dict[str, float], **changes: Any) -> Measurement:
    """A row of FlashAttention-2 that takes this long."""
    found = next(m for m in h200.rows if m.kernel == "fa2_forward" and m.regime is Regime.IN_TURNS)
    content = {
        **found.row.json,
        "p50_ns": seconds * 1e9,
        "needs_ns": {n: x * 1e9 for n, x in needs.items()},
        **changes,
    }
    return dataclasses.replace(found, row=dataclasses.replace(found.row, json=content))


def gains(facts: Facts) -> dict[str, float | None]:
    return {x.cause: None if x.gain is None else round(x.gain, 3) for x in why.advice(facts)}


def test_the_binding_resource_and_the_next_one(h200: Evidence) -> None:
    facts = Facts(row(h200, 100e-6, {"products": 70e-6, "memory": 40e-6, "busiest block": 70e-6}))
    assert gains(facts) == {"Waits that no resource explains": 0.3, "Limit: products": 0.3}
    first = next(x for x in why.advice(facts) if x.cause.startswith("Limit"))
    assert "70 µs" in first.figure and "memory: 40 µs" in first.figure
    with_l2 = dataclasses.replace(facts, l2_seconds=90e-6)
    assert gains(with_l2)["Limit: L2 cache"] == 0.2
    idle = Facts(row(h200, 1000e-6, {"products": 70e-6, "memory": 40e-6}))
    assert "Limit: products" not in gains(idle), "far from every limit"


def test_power_binds_under_lasting_load_only(h200: Evidence) -> None:
    needs = {"products": 70e-6, "power": 80e-6, "memory": 10e-6}
    assert "Limit: products" in gains(Facts(row(h200, 100e-6, needs)))
    load = {"clock_mhz": 1485.0, "watts": 700.0}
    alone = row(h200, 100e-6, needs, regime="sustained", load=load)
    assert alone.clock_limit == "1980 MHz"
    found = gains(Facts(alone))
    assert found["Power limit"] == 0.25 and found["Limit: power"] == 0.7


def test_the_last_wave_and_idle_sms(h200: Evidence) -> None:
    slow = row(h200, 100e-6, {"products": 50e-6, "memory": 1e-6, "busiest block": 75e-6})
    assert gains(Facts(slow))["Last wave"] == 0.25
    plan = make_plan(make(1, 2, 1024, 64, "bfloat16"), DEVICE, "fa2", num_splits=1)
    blocks = plan.launches[0].grid[0]
    assert blocks < DEVICE.num_sms
    found = gains(Facts(slow, plan))
    assert found["Idle SMs"] == round(1 - blocks / DEVICE.num_sms, 3) and "Last wave" not in found


def test_tiles_that_were_measured_or_are_predicted_faster(h200: Evidence) -> None:
    slow = row(h200, 100e-6, {})
    faster = dataclasses.replace(row(h200, 80e-6, {}), label="fa2 other")
    assert gains(Facts(slow, others=[faster]))["Tiles"] == 0.2
    own = KERNELS["fa2_forward"].read_config(slow.row.json["config"])
    other = dataclasses.replace(own, block_kv=2 * own.block_kv)
    predicted = [Tiling(other, 90e-6, "products", None), Tiling(own, 100e-6, "products", None)]
    assert gains(Facts(slow, tilings=predicted, error=0.05))["Tiles"] == 0.1
    assert "Tiles" not in gains(Facts(slow, tilings=predicted, error=0.2)), (
        "within the error of the prediction"
    )


def test_occupancy_and_spills(h200: Evidence) -> None:
    slow = row(h200, 100e-6, {"products": 60e-6, "memory": 1e-6, "busiest block": 60e-6}, predicted_ns=90e3)
    entry = Entry("fa2_forward", 255, 128, 40_000, 1, 64)
    found = why.advice(Facts(slow, entry=entry, arch=DEVICE.arch))
    by_cause = {x.cause: x for x in found}
    assert entry.occupancy(DEVICE.arch).blocks == 2
    assert by_cause["Occupancy: limited by registers"].gain == pytest.approx(30 / 3 / 100)
    assert "registers 255 → 168" in by_cause["Occupancy: limited by registers"].attempt
    assert by_cause["Spills"].gain is None and "64 B" in by_cause["Spills"].figure
    assert found[-1].cause == "Spills", "causes without a known gain come last"
    assert "Spills" not in gains(
        Facts(slow, entry=dataclasses.replace(entry, spill_bytes=0), arch=DEVICE.arch)
    )


def test_launches(h200: Evidence) -> None:
    plan = make_plan(make(2, 16, 1024, 64, "bfloat16"), DEVICE, "fa2")
    assert gains(Facts(row(h200, 10e-6, {}), plan, 3e-6))["Launch overhead"] == 0.3
    held_up = row(h200, 10e-6, {}, load={"host_bound": True})
    assert gains(Facts(held_up, plan, 3e-6))["Launch overhead"] is None


def test_a_trace_of_the_same_source_separates_the_waits(all_cards: list[Evidence]) -> None:
    """Of a recorded trace: softmax and loads that no product hides, instead of unexplained waits."""
    likely = ((m, card) for card in all_cards for m in card.rows if m.kernel and m.kernel.startswith("fa3"))
    facts, card = next((f, card) for m, card in likely if (f := why.facts_of(m, card)).inside is not None)
    assert facts.inside is not None
    slow, (trace, of_sm, waiting) = facts.row, facts.inside
    assert trace.digest == slow.row.json["digest"] and trace.environment["device"] == card.device
    found = gains(facts)
    expected = {"Exposed softmax": of_sm.exposed / of_sm.span, "Exposed loads": waiting}
    assert {n: found.get(n) for n in expected} == {
        n: round(x, 3) if x >= why.LEAST else None for n, x in expected.items()
    }
    assert "Waits that no resource explains" not in found
    changed = dataclasses.replace(slow.row, json={**slow.row.json, "digest": "another"})
    assert why.facts_of(dataclasses.replace(slow, row=changed, id="another"), card).inside is None


@pytest.mark.in_turn
def test_recorded_runs_get_advice_that_their_times_allow(all_cards: list[Evidence]) -> None:
    """No gain exceeds the time itself, and the figures of every card are its own."""
    advised = 0
    for found in all_cards:
        firsts = {(m.suite, m.kernel, m.regime): m for m in found.rows if m.kernel}
        for m in firsts.values():
            for x in why.advice(why.facts_of(m, found)):
                advised += 1
                assert x.gain is None or why.LEAST <= x.gain < 1, (m.id, x)
                assert x.figure and x.attempt
    assert advised > 100


@pytest.mark.in_turn
def test_the_page_compiles_on_demand(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("roofline", show="fa2")
    has(words(app), "Why, and what to try", "the shares do not add up", "| cause | at most | from | try |")
    pytest.importorskip("cuda.bindings", reason="NVRTC compiles without a GPU: pip install 'cufa[cuda13]'")
    app.button(key="roofline.why").click().run()
    assert not app.exception
    assert not [x for x in app.button if x.key == "roofline.why"], "compiled: nothing is left to offer"
