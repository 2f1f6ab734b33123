"""Limits and times derived from tiles, and the ladder of FA3's techniques. No GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from records_support import SHIPPED
from sampling import of_today

from cufa.build.static_compile import check_report, static_compile
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.measure import bounds, predictions, suites
from cufa.measure.cases import of_forward, one_item_a_block
from cufa.measure.costs import cost_of
from cufa.measure.ladder import ladder
from cufa.measure.limits import Limits
from cufa.plan.planner import make_plan
from cufa.schedule.order import ITEM_COST

H200 = Device.typical("sm_90")
#: Round numbers near an H200's.
LIMITS = Limits(4e12, {"bfloat16": 1e15}, 4e12, {"bfloat16": 8e14}, mma_flops={"bfloat16": 6e14})
SPEC = KERNELS["fa3_forward"]


def plan_of(problem, config=None, **changes):
    plan = make_plan(problem, H200, "fa3", config, num_splits=1)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, **changes))


#: Each tiling, and lengths that its tiles divide.
CONFIGS = pytest.mark.parametrize(
    ("config", "seqlen"),
    [pytest.param(c, 4 * math.lcm(c.block_q, c.block_kv), id=str(c)) for c in SPEC.configs],
)


class TestCost:
    @CONFIGS
    def test_full_attention_counts_every_score(self, config, seqlen):
        problem = suites.make(2, 16, seqlen, config.max_head_dim, "bfloat16", False)
        cost = cost_of(plan_of(problem, config))
        assert cost.flops == problem.flops
        # Beside the scores: a rescaling factor a thread and tile, at most; and a reciprocal.
        items = 2 * 16 * seqlen * (4 + 4 * seqlen / config.block_kv)
        assert 0 <= cost.exponentials - 2 * 16 * seqlen**2 <= items

    @CONFIGS
    def test_causal_counts_the_tiles_on_the_diagonal_whole(self, config, seqlen):
        problem = suites.make(1, 8, seqlen, config.max_head_dim, "bfloat16", True)
        cost = cost_of(plan_of(problem, config))
        # A group of 64 rows sees half a triangle less than the tiles it computes, at most a tile and that.
        spare = (cost.products / (2 * problem.head_dim) - 8 * problem.visible_scores) / (8 * seqlen)
        assert 31 <= spare <= 32 + config.block_kv


class TestBounds:
    def test_each_resource_at_its_ceiling(self):
        plan = plan_of(suites.make(1, 132, 4096, 128, "bfloat16", False))
        cost, found = cost_of(plan), bounds.bounds_of(plan, LIMITS)
        assert found.products == pytest.approx(cost.flops / 1e15)
        assert found.power == pytest.approx(cost.flops / 8e14)
        assert found.exponentials == pytest.approx(cost.exponentials / 4e12)
        assert found.shared_memory == pytest.approx(cost.shared / 32e12)
        assert found.memory == pytest.approx(plan.problem.io_bytes / 4e12)
        assert found.imbalance == 1.0
        assert found.serial == found.products + found.exponentials + found.own_shared
        assert max(found.products, found.exponentials) <= found.overlapped < found.serial

    def test_what_was_not_measured_is_left_out(self):
        plan = plan_of(suites.make(1, 8, 1024, 64, "bfloat16", False))
        limits = dataclasses.replace(LIMITS, sustained_flops={})
        assert "power" not in bounds.bounds_of(plan, limits).named()
        assert "power" in bounds.bounds_of(plan, LIMITS).named()

    @pytest.mark.parametrize(("heads", "imbalance"), [(132, 1.0), (133, 264 / 133), (66, 2.0)])
    def test_imbalance_counts_idle_multiprocessors(self, heads, imbalance):
        """One query block a head: whole rounds of 132, or not."""
        plan = plan_of(suites.make(1, heads, 64, 64, "bfloat16", False, seqlen_k=4096))
        assert bounds.bounds_of(plan, LIMITS).imbalance == pytest.approx(imbalance)

    def test_nothing_to_visit(self):
        plan = plan_of(suites.make(1, 8, 64, 64, "bfloat16", True, seqlen_k=1))
        assert bounds.bounds_of(plan, LIMITS).imbalance >= 1.0

    def test_what_is_covered_and_why_the_rest_is_not(self):
        problem = suites.make(1, 8, 1024, 64, "bfloat16", False)
        assert bounds.why_not(make_plan(problem, H200, "fa3", num_splits=1), LIMITS) == ""
        by_mma = make_plan(problem, H200, "fa2", num_splits=1)
        assert bounds.why_not(by_mma, LIMITS) == ""
        older = dataclasses.replace(LIMITS, mma_flops={})
        assert bounds.why_not(by_mma, older)
        assert "mma.sync" in bounds.why_not(by_mma, older)
        for underived in (
            make_plan(problem, None, "fa2"),
            make_plan(problem, H200, "fa1"),
            make_plan(suites.make(1, 8, 1024, 64, "float32", False), H200, "fa2", num_splits=1),
        ):
            assert bounds.why_not(underived, LIMITS)


class TestLadder:
    @pytest.mark.parametrize("config", SPEC.configs, ids=str)
    def test_steps_add_up_to_the_shipped_config(self, config):
        rungs = ladder("fa3", config)
        assert rungs[-1].config == config
        assert not rungs[-1].one_item_a_block
        assert rungs[0].one_item_a_block
        assert len({r.label for r in rungs}) == len(rungs) >= 3
        for before, after in itertools.pairwise(rungs):
            changed = set(after.config.own.items()) - set(before.config.own.items())
            assert len(changed) + (before.one_item_a_block != after.one_item_a_block) == 1, "one at a time"
            assert all(value for _, value in changed)

    @pytest.mark.parametrize("config", of_today(SPEC.configs, "no step spills", fixed=0), ids=str)
    @pytest.mark.slow
    @pytest.mark.usefixtures("nvrtc")
    def test_no_step_spills(self, config):
        """A step that spilled would make a slow start look like a technique's gain."""
        problem = suites.make(1, 8, 4096, config.max_head_dim, "bfloat16", True)
        compiled = {rung.config: rung.label for rung in ladder("fa3", config)[:-1]}
        for rung, label in of_today([*compiled.items()], f"no step spills {config}", fixed=0):
            constants = {**SPEC.constants(problem, rung), "TRACE": False}
            report = static_compile(SPEC.source, constants, H200.arch)
            assert check_report(report) == (), label

    def test_no_step_is_predicted_to_cost_time(self):
        for case in suites.SUITES["ladder"].cases(H200):
            times = []
            for rung in case.contenders:
                plan = rung.plan(case.problem, H200)
                times.append(bounds.predict(plan, LIMITS))
            assert times[0] >= times[1] >= bounds.bounds_of(plan, LIMITS).overlapped
            # In order, blocks of one item fill the SMs a little more evenly than rounds do.
            assert all(b <= 1.06 * a for a, b in itertools.pairwise(times))

    def test_no_overlap_means_that_times_add_up(self):
        """A soft cap takes the overlap inside a warpgroup; ping-pong alone hides exponentials as well."""
        problem = suites.make(1, 132, 4096, 128, "bfloat16", False)
        capped = dataclasses.replace(problem, softcap=30.0)
        consumers = plan_of(problem).config.num_warps // 4 - 1
        for some, sharing in (
            (plan_of(capped, ping_pong=False, store_by_tma=False), 1),
            (plan_of(capped), consumers),
            (plan_of(problem, ping_pong=False, store_by_tma=False), consumers),
        ):
            found = bounds.bounds_of(some, LIMITS)
            busy = found.overlapped + (found.serial - found.overlapped) / sharing
            assert found.imbalance == 1.0
            tiles = some.schedule.visited / some.schedule.num_q_blocks
            assert bounds.predict(some, LIMITS) == pytest.approx(busy * (1 + ITEM_COST / tiles))

    def test_one_item_a_block_makes_a_grid_of_items(self):
        plan = plan_of(suites.make(4, 16, 4096, 128, "bfloat16", True))
        assert plan.launches[0].grid == (132, 1, 1)
        items = plan.schedule.num_q_blocks * 64
        assert one_item_a_block(plan).launches[0].grid == (items, 1, 1)
        assert bounds.predict(one_item_a_block(plan), LIMITS) > 0


class TestPredictions:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_recorded_times_are_predicted(self, name):
        """Nothing in the prediction was fitted to them. Models derived by hand, which counters replaced, had a median
        error of 8.9% and a maximum of 41% on the H200 (282 rows), 9.5% and 45% on the H100 (266 rows)."""
        card = SHIPPED[name]
        limits = card.limits
        found = predictions.errors(card.rows, card.device, limits)
        assert found.keys() >= {"fa3_forward"}
        assert found.keys() >= {"fa2_forward", "fa2_noskip", "fa2_backward"} or not limits.mma_flops
        for kernel, error in found.items():
            assert error.count and error.median < 0.25 and error.worst < 1, kernel
        assert found[predictions.ALL].median < 0.095
        said = predictions.in_words(found)
        assert all(kernel in said for kernel in found)

    def test_additions_of_an_unknown_rate_are_said_to_be_left_out(self):
        problem = of_forward(suites.make(4, 8, 4096, 256, "bfloat16", False))
        unknown = dataclasses.replace(H200, name="NVIDIA H20")
        assert "NVIDIA H20 adds in its L2 cache" in predictions.left_out(make_plan(problem, unknown))
        assert predictions.left_out(make_plan(problem, H200)) == ""
        assert predictions.left_out(make_plan(suites.make(4, 8, 4096, 256, "bfloat16", False), unknown)) == ""

    def test_a_row_is_predicted_for_the_grid_that_it_was_launched_with(self):
        card = SHIPPED["nvidia-h200"]
        plans = [(row, predictions.plan_of(row, card.device)) for row in card.of_suite("ladder")]
        grids = [(row.json["grid"], [list(x.grid) for x in plan.launches]) for row, plan in plans if plan]
        assert all(recorded == found for recorded, found in grids) and len({str(x) for x, _ in grids}) > 2

    def test_a_row_without_a_derivation_is_not_predicted(self):
        rows = next(iter(SHIPPED.values())).rows
        peers = [row for row in rows if row.is_peer]
        assert peers and all(predictions.with_needs(row, H200, LIMITS) is row for row in peers)
        assert predictions.in_words({}) == ""
