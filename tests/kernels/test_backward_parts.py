"""What Hopper's backward asks of each resource, derived from its tiles: by hand, and against its executed source."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from backward_support import make_case
from evidence import tables
from records_support import as_json, measured_row

from cufa.commands.rows import print_needs
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.kernels.backward.fa3_config import ITEM_BYTES
from cufa.measure import additions, bounds, measured, predictions, suites
from cufa.measure.backward_cases import of_forward
from cufa.measure.backward_parts import parts, tiles_of
from cufa.measure.limits import Limits
from cufa.measure.measured import Measured
from cufa.measure.runner import with_bounds
from cufa.measure.tile_work import work_of
from cufa.measure.traffic import l2_traffic
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, Band
from cufa.run.emulate.calls import emulate_backward

H200 = Device.typical("sm_90")
#: Round numbers near an H200's.
LIMITS = Limits(4e12, {"bfloat16": 1e15}, 4e12, {"bfloat16": 8e14})
KIB = 1024


def plan_of(head_dim, seqlen=4096, causal=False, heads=1, device=H200, **changes):
    problem = of_forward(suites.make(1, heads, seqlen, head_dim, "bfloat16", causal))
    plan = make_plan(problem, device, "fa3")
    return make_plan(problem, device, "fa3", dataclasses.replace(plan.config, **changes)) if changes else plan


def variants():
    for head_dim in (40, 64, 72, 128, 192, 256):
        spec = KERNELS["fa3_backward_wide" if head_dim > 128 else "fa3_backward"]
        for config in spec.configs:
            if not config.fits(head_dim):
                continue
            yield pytest.param(head_dim, config, id=f"{head_dim}{'-running-on' if config.persistent else ''}")
            if config.bulk_add and not config.persistent:
                other = dataclasses.replace(config, block_q=64, bulk_add=False)
                yield pytest.param(head_dim, other, id=f"{head_dim}-64-rows-from-registers")


@pytest.mark.sampled(fixed=3, dated=1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "config"), list(variants()))
def test_the_work_is_what_the_source_does(head_dim, config, causal):
    lengths = 2 * config.block_q, 3 * config.block_kv
    case = make_case(1, 2, 1, *lengths, head_dim, "bfloat16", causal=causal)
    run = emulate_backward(
        *case.arrays, algorithm="fa3", causal=causal, config=config, mode="counted", trace=False, threads=1
    )
    work, counted = work_of(run.plan), run.totals
    idle_products, idle_bytes = of_idle_blocks(run.plan)
    assert 2 * (counted["products"] + idle_products) == work.flops
    assert counted["exponentials"] == work.exponentials
    assert 4 * counted["reductions"] == work.added_bytes
    # What the copy engine adds it reads from shared memory, beside what is counted in wavefronts. Which tile it is
    # stands in shared memory, too: a few words per thread.
    moved = 128 * counted["shared_wavefronts"] + config.bulk_add * work.added_bytes + idle_bytes
    assert 1 <= moved / work.shared_bytes < 1.06
    assert asked_of_l2(run) == counted_in_l2(run)


def of_idle_blocks(plan):
    """Products, and bytes of shared memory. One block takes all items here. Where it goes from the last tile of one to
    the first of the next, it computes one dQ more than there are tiles; and so do all blocks of a GPU."""
    if plan.config.k_stages == 1:
        return 0, 0
    idle, blocks = plan.launches[1].grid[0] - 1, plan.launches[1].grid[0]
    begun = [part for part in parts(plan) if part.name in ("dQ", "dS, stored")]
    sums = (sum(getattr(part, name) for part in begun) for name in ("multiply_adds", "shared_bytes"))
    return tuple(x * idle // (tiles_of(plan) + blocks) for x in sums)


def asked_of_l2(run):
    derived = l2_traffic(run.plan.problem, run.plan.spec, run.plan.config)
    return {"read": derived.read, "written": derived.written}


def counted_in_l2(run):
    """But for what thread blocks tell one another: the next item; where they run on, a record of each item, four
    counters of each key/value head, and where those begin, which each warp of consumers reads to tell of an item."""
    problem, launch = run.plan.problem, run.plan.launches[1]
    heads = problem.batch * problem.kv_heads
    items = launch.persistent * heads * problem.key_blocks(run.plan.config.block_kv) // problem.batch
    counters = 4 + launch.persistent * (4 + 16 * heads)
    read, written = (run.totals[f"global_{name}_bytes"] - items * ITEM_BYTES for name in ("read", "write"))
    return {"read": read - items * 8 * 4, "written": written - counters}


@pytest.mark.parametrize(
    ("head_dim", "mask"), [(64, Band(60, 5, -20)), (128, CAUSAL), (200, Band(60, 5, -20))]
)
def test_ends_shared_heads_and_rows_without_keys(head_dim, mask):
    case = make_case(2, 4, 2, 150, 301, head_dim, "bfloat16", mask=mask)
    run = emulate_backward(*case.arrays, algorithm="fa3", mask=mask, mode="counted", trace=False)
    assert asked_of_l2(run) == counted_in_l2(run)
    assert 4 * run.totals["reductions"] == work_of(run.plan).added_bytes


@pytest.mark.parametrize(
    ("head_dim", "kib"),
    [
        # (64 + 128 rows) · 64 columns for both warpgroups; dO and Q once for each; dS as 64 rows and K; P never.
        (64, {"S": 48, "dP": 48, "dV": 32, "dK": 32, "dQ": 64, "dS, stored": 32, "dQ, staged": 32}),
        (128, {"S": 64, "dP": 64, "dV": 32, "dK": 32, "dQ": 64, "dS, stored": 16, "dQ, staged": 32}),
        # Two blocks of 64 keys: every product once in each. Four runs of dQ's columns read dS of 128 keys; each block
        # reads 8 KiB of its own and writes them to the other.
        (
            256,
            {
                "S": 128,
                "dP": 128,
                "dV": 64,
                "dK": 64,
                "dQ": 128,
                "dS, stored": 16,
                "dS, sent to the other block": 32,
                "P, stored and read": 32,
            },
        ),
    ],
)
def test_a_tile_counted_by_hand(head_dim, kib):
    """Between two lengths, so that what an item takes besides its tiles drops out: a key block, and more queries."""
    keys = plan_of(head_dim).config.block_kv
    of = []
    for queries in (1024, 2048):
        problem = of_forward(suites.make(1, 1, queries, head_dim, "bfloat16", False, seqlen_k=keys))
        plan = make_plan(problem, H200, "fa3")
        of.append(({part.name: part.shared_bytes for part in parts(plan)}, plan.schedule.visited))
    (fewer, few), (more, many) = of
    per_tile = {name: (more[name] - fewer[name]) / (many - few) for name in more}
    assert {name: per_tile[name] for name in kib} == {name: n * KIB for name, n in kib.items()}


def test_wide_heads_move_least_per_product():
    """What 64 keys that are not shared out save (the header of fa3_backward_wide.cu)."""
    each = {d: 2 * work_of(plan_of(d)).shared_bytes / work_of(plan_of(d)).flops for d in (64, 128, 256)}
    assert each[256] < each[128] < each[64]
    assert each == pytest.approx({64: 0.0817, 128: 0.0784, 256: 0.0738}, abs=1e-4)


def test_dq_from_registers_is_not_staged():
    bulk, red = (plan_of(128, bulk_add=x) for x in (True, False))
    assert work_of(bulk).shared_bytes - work_of(red).shared_bytes == 2 * work_of(bulk).added_bytes


def test_bounds_at_their_ceilings():
    plan = plan_of(128, heads=132)
    work, found = work_of(plan), bounds.bounds_of(plan, LIMITS)
    rate = additions.of_card("NVIDIA H200").bytes_per_second
    assert found.additions == pytest.approx(work.added_bytes / rate)
    assert found.passes == pytest.approx(work.further_bytes / 4e12)
    assert found.shared_memory == pytest.approx(work.shared_bytes / 32e12)
    assert found.overlapped == found.shared_memory > found.products
    # What threads move themselves: of a tile 16 KiB of dS, 32 of dQ, and L and D, two numbers per lane, twice 16.
    own = (16 + 32 + 32) * KIB * plan.schedule.visited * 132
    assert work.own_bytes == pytest.approx(own, rel=0.01)
    assert found.serial == found.products + found.exponentials + found.own_shared
    assert {"L2 additions", "passes", "power"} <= found.named().keys()
    assert bounds.predict(plan, LIMITS) >= found.overlapped + found.passes


def test_a_pair_adds_once_for_both_blocks():
    """So that additions do not bind wide heads, of which a block has 64 keys."""
    plan = plan_of(256, heads=132)
    found = bounds.bounds_of(plan, LIMITS)
    assert work_of(plan).added_bytes == 132 * 4096 * 256 * 4 * 4096 // 128
    assert found.overlapped == found.shared_memory > found.products > found.additions


def test_what_nobody_measured_is_no_bound():
    assert additions.of_card("NVIDIA H20") is None
    plan = plan_of(256, device=dataclasses.replace(H200, name="Another GPU"))
    found = bounds.bounds_of(plan, LIMITS)
    assert found.additions is None and "L2 additions" not in found.named()


def test_tables_of_what_each_resource_needs_say_where_the_ceiling_of_additions_is_from(capsys):
    plan = plan_of(128, heads=16)
    row = with_bounds(measured_row("fa3", plan.problem, 2e-3, plan), LIMITS)
    print_needs([row])
    device = additions.of_card(H200.name)
    assert device.origin.split(",")[0] in " ".join(capsys.readouterr().out.split())
    recorded = Measured(as_json(measured.row_json(row)))
    lines = list(tables.needs([recorded], H200.name))
    assert f"L2 additions: at {device}.\n" in lines
    assert "L2 additions" in next(line for line in lines if line.startswith("| kernel"))


def test_needs_are_derived_for_rows_that_were_recorded_without():
    plan = plan_of(128, heads=16)
    json = as_json(measured.row_json(measured_row("fa3", plan.problem, 2e-3, plan)))
    found = predictions.with_needs(Measured(json), H200, LIMITS)
    named = bounds.bounds_of(plan, LIMITS).named()
    assert found.json["needs_ns"] == pytest.approx({name: 1e9 * s for name, s in named.items()})
    assert found.json["predicted_ns"] == pytest.approx(1e9 * bounds.predict(plan, LIMITS))
    assert predictions.with_needs(found, H200, dataclasses.replace(LIMITS, exponentials=1e12)) is found
    assert predictions.with_needs(Measured(json), H200, Limits(4e12, {}, 4e12)).json == json


def test_waits_for_turns_are_not_predicted():
    plan = plan_of(128)
    ordered = make_plan(dataclasses.replace(plan.problem, deterministic=True), H200, "fa3")
    assert bounds.covers(plan, LIMITS)
    assert "wait for one another" in bounds.why_not(ordered, LIMITS)


def test_grouped_heads_keep_their_keys():
    """Eight query heads of one key head: tiles as many, key blocks an eighth."""
    alone = of_forward(suites.make(1, 8, 4096, 128, "bfloat16", True))
    grouped = dataclasses.replace(alone, kv_heads=1)
    config = KERNELS["fa3_backward"].configs[1]
    a, b = (work_of(make_plan(p, H200, "fa3", config)) for p in (alone, grouped))
    assert a.exponentials == b.exponentials and a.added_bytes == b.added_bytes
    assert a.flops > b.flops and a.shared_bytes > b.shared_bytes


@pytest.mark.parametrize("module", ["runner", "bounds", "measured", "cards", "memory_rates"])
def test_modules_can_be_imported_first(module):
    """They need one another in a line, not in a circle."""
    subprocess.run([sys.executable, "-c", f"import cufa.measure.{module}"], check=True)
