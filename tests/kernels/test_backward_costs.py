"""What Hopper's backward asks of each resource: a tile counted by hand, and bounds on time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from evidence import tables
from records_support import as_json, measured_row

from cufa.commands.rows import print_needs
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure import additions, bounds, predictions, suites
from cufa.measure.cases import of_forward
from cufa.measure.costs import cost_of, table_of
from cufa.measure.limits import Limits
from cufa.measure.measured import Measured
from cufa.plan.planner import make_plan

H200 = Device.typical("sm_90")
#: Round numbers near an H200's.
LIMITS = Limits(4e12, {"bfloat16": 1e15}, 4e12, {"bfloat16": 8e14})
KIB = 1024


def plan_of(head_dim, seqlen=4096, causal=False, heads=1, device=H200, **changes):
    problem = of_forward(suites.make(1, heads, seqlen, head_dim, "bfloat16", causal))
    plan = make_plan(problem, device, "fa3")
    return make_plan(problem, device, "fa3", dataclasses.replace(plan.config, **changes)) if changes else plan


def test_a_tile_counted_by_hand():
    """64 × 128 scores of head dim 128: five products; two operands of 64 rows each for S and dP of both warpgroups; dO
    and Q once for each; dS written by threads, and read with K for dQ, which is staged, and read to be added."""
    of_tile = table_of(KERNELS["fa3_backward"], plan_of(128).config, 128, False)
    assert of_tile["products"]["tile"] == 5 * 64 * 128 * 128
    assert of_tile["exponentials"]["tile"] == 64 * 128
    assert of_tile["added"]["tile"] == 64 * 128 * 4
    loaded = 2 * (64 * 256 + 64 * 4)
    by_engines = (64 + 64 + 32 + 32 + 64) * KIB + loaded + 32 * KIB
    assert of_tile["shared"]["tile"] - of_tile["own_shared"]["tile"] == pytest.approx(by_engines, rel=0.01)


def test_wide_heads_move_least_per_product():
    """What 64 keys that are not shared out save (the header of backward/fa3_pair/kernel.cu)."""
    each = {d: 2 * cost_of(plan_of(d)).shared / cost_of(plan_of(d)).flops for d in (64, 128, 256)}
    assert each[256] < each[128] < each[64]


def test_bounds_at_their_ceilings():
    plan = plan_of(128, heads=132)
    cost, found = cost_of(plan), bounds.bounds_of(plan, LIMITS)
    rate = additions.of_card("NVIDIA H200").bytes_per_second
    assert found.additions == pytest.approx(cost.added / rate)
    assert found.passes == pytest.approx(cost.passes / 4e12)
    assert found.shared_memory == pytest.approx(cost.shared / 32e12)
    assert found.overlapped == found.shared_memory > found.products
    # What threads move themselves: of a tile 16 KiB of dS, 32 of dQ, and L and D, two numbers per lane, twice 16.
    own = (16 + 32 + 32) * KIB * plan.schedule.visited * 132
    assert cost.own_shared == pytest.approx(own, rel=0.1)
    assert found.serial == found.products + found.exponentials + found.own_shared
    assert {"L2 additions", "passes", "power"} <= found.named().keys()
    assert bounds.predict(plan, LIMITS) >= found.overlapped + found.passes


def test_a_pair_adds_once_for_both_blocks():
    """So that additions do not bind wide heads, of which a block has 64 keys."""
    plan = plan_of(256, heads=132)
    found = bounds.bounds_of(plan, LIMITS)
    assert cost_of(plan).added == 132 * 4096 * 256 * 4 * 4096 // 128
    assert found.overlapped == found.shared_memory > found.products > found.additions


def test_a_cost_without_a_measurement_is_no_bound():
    assert additions.of_card("NVIDIA H20") is None
    plan = plan_of(256, device=dataclasses.replace(H200, name="Another GPU"))
    found = bounds.bounds_of(plan, LIMITS)
    assert found.additions is None and "L2 additions" not in found.named()


def test_tables_of_what_each_resource_needs_say_where_the_ceiling_of_additions_is_from(capsys):
    plan = plan_of(128, heads=16)
    row = predictions.with_needs(measured_row("fa3", plan.problem, 2e-3, plan), H200, LIMITS)
    print_needs([row])
    device = additions.of_card(H200.name)
    assert device.origin.split(",")[0] in " ".join(capsys.readouterr().out.split())
    recorded = Measured(as_json(row.json))
    lines = list(tables.needs([recorded], H200.name))
    assert f"L2 additions: at {device}.\n" in lines
    assert "L2 additions" in next(line for line in lines if line.startswith("| kernel"))


def test_needs_are_derived_for_rows_that_were_recorded_without():
    plan = plan_of(128, heads=16)
    json = as_json(measured_row("fa3", plan.problem, 2e-3, plan).json)
    found = predictions.with_needs(Measured(json), H200, LIMITS)
    named = bounds.bounds_of(plan, LIMITS).named()
    assert found.json["needs_ns"] == pytest.approx({name: 1e9 * s for name, s in named.items()}, abs=1)
    assert found.json["predicted_ns"] == pytest.approx(1e9 * bounds.predict(plan, LIMITS), abs=1)
    slower = predictions.with_needs(found, H200, dataclasses.replace(LIMITS, exponentials=1e12))
    assert slower.needs["exponentials"] == pytest.approx(
        named["exponentials"] * LIMITS.exponentials / 1e12, rel=1e-4
    )
    assert predictions.with_needs(Measured(json), H200, Limits(4e12, {}, 4e12)).json == json


def test_waits_for_turns_are_not_predicted():
    plan = plan_of(128)
    ordered = make_plan(dataclasses.replace(plan.problem, deterministic=True), H200, "fa3")
    assert bounds.why_not(plan, LIMITS) == ""
    assert "wait for one another" in bounds.why_not(ordered, LIMITS)


def test_grouped_heads_keep_their_keys():
    """Eight query heads of one key head: tiles as many, key blocks an eighth."""
    alone = of_forward(suites.make(1, 8, 4096, 128, "bfloat16", True))
    grouped = dataclasses.replace(alone, kv_heads=1)
    config = KERNELS["fa3_backward"].configs[1]
    a, b = (cost_of(make_plan(p, H200, "fa3", config)) for p in (alone, grouped))
    assert a.exponentials == b.exponentials and a.added == b.added
    assert a.flops > b.flops and a.shared > b.shared


def test_modules_can_be_imported_first():
    """They need one another in a line, not in a circle."""
    code = """
import importlib, sys
for module in ("runner", "bounds", "measured", "cards", "costs", "memory_rates"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cufa"]:
        del sys.modules[name]
    importlib.import_module(f"cufa.measure.{module}")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
