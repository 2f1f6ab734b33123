"""The techniques of Hopper's backward one after the other: configs that add up, none that spills, tables that compare
each with the right one. No GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from backends import EMULATE
from backward_support import make_case
from evidence import report
from evidence.recorder import PARTS, Part
from records_support import made_up_card, measured_row, rows_json
from sampling import of_today
from test_backward import check

from cufa.build.static_compile import check_report, static_compile
from cufa.gpu.architectures import Device
from cufa.measure import suites
from cufa.measure.cases import of_forward
from cufa.measure.ladder import is_step, ladder, variations
from cufa.plan.planner import make_plan

H200 = Device.typical("sm_90")
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])


def plan_of(head_dim, causal=True):
    problem = of_forward(suites.make(4, 2048 // head_dim, 4096, head_dim, "bfloat16", causal))
    return make_plan(problem, H200, "fa3")


def fields_that_differ(first, second):
    return {x.name for x in dataclasses.fields(first) if getattr(first, x.name) != getattr(second, x.name)}


def hoppers(plan):
    """Every step and variation but FlashAttention-2."""
    return [*ladder("fa3", plan.config)[1:], *variations(plan)]


@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
def test_steps_add_up_to_the_shipped_config_one_at_a_time(head_dim, causal):
    config = plan_of(head_dim, causal).config
    older, *rungs = ladder("fa3", config)
    assert (older.algorithm, older.config) == ("fa2", None)
    assert rungs[-1].config == config
    for before, after in itertools.pairwise(rungs):
        assert len(fields_that_differ(before.config, after.config)) == 1
    numbers = [int(x.label.partition(".")[0]) for x in (older, *rungs)]
    assert numbers == sorted(set(numbers))


def test_what_a_config_takes_is_a_step_and_what_it_does_without_a_variation():
    plan = plan_of(64)
    for persistent, steps, others in ((True, 1, 0), (False, 0, 1)):
        config = dataclasses.replace(plan.config, persistent=persistent)
        found = ladder("fa3", config), variations(dataclasses.replace(plan, config=config))
        assert [sum("persistent blocks" in x.label for x in part) for part in found] == [steps, others]


@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
def test_variations_differ_from_what_ships_in_one_thing(head_dim, causal):
    plan = plan_of(head_dim, causal)
    *others, ordered = variations(plan)
    assert ordered.config == make_plan(ordered.problem, H200, "fa3").config and ordered.problem.deterministic
    assert dataclasses.replace(ordered.problem, deterministic=False) == plan.problem
    changed = [fields_that_differ(plan.config, x.config) for x in others]
    assert all(len(x) == 1 for x in changed)
    assert not {x.label for x in others} & {x.label for x in ladder("fa3", plan.config)}


@pytest.mark.sampled(fixed=0, dated=1)
@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
def test_none_spills(head_dim, causal):
    """A step that spilled would make a slow start look like a technique's gain."""
    plan = plan_of(head_dim, causal)
    for contender in of_today(hoppers(plan), f"no step spills {head_dim} {causal}", fixed=0):
        step = contender.plan(plan.problem, H200)
        report = static_compile(
            step.spec.source_of(step.config), {**step.constants, "TRACE": False}, H200.arch
        )
        assert check_report(report) == (), contender.label


@pytest.mark.sampled(fixed=0, dated=1)
@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.slow
def test_each_is_right(head_dim, causal):
    """Executed in checked mode: slower kernels, as right, and none that waits for ever."""
    plan = plan_of(head_dim, causal)
    for n, contender in enumerate(of_today(hoppers(plan), f"right {head_dim} {causal}", fixed=0)):
        config = contender.config
        case = make_case(
            1, 2, 1, 2 * config.block_q + 5, 2 * config.block_kv + 3, head_dim, "bfloat16", causal=causal,
            seed=n,
        )  # fmt: skip
        ordered = contender.problem is not None
        check(EMULATE, plan.spec, None, case, config=config, deterministic=ordered, trace=False)


def test_the_suite_is_hoppers():
    suite = suites.SUITES["backward-ladder"]
    assert list(suite.cases(Device.typical("sm_80"))) == []
    cases = list(suite.cases(H200))
    assert {case.problem.head_dim for case in cases} == {64, 128, 256}
    assert {case.problem.mask_kind for case in cases} == {"full", "causal"}
    assert Part("backward-ladder") in PARTS


@pytest.fixture
def lines():
    """The table of a card: each step takes half of the time of the one before, each variation a tenth more than the
    last step, at d64 and d128."""
    rows = []
    for head_dim in (64, 128):
        plan = plan_of(head_dim)
        seconds = 1e-3
        for contender in (*ladder("fa3", plan.config), *variations(plan)):
            step = is_step(contender.label)
            seconds /= 2 if step else 1
            took = seconds if step else 1.1 * seconds
            ran = contender.plan(plan.problem, H200)
            rows.append(measured_row(contender.label, ran.problem, took, ran))
    return report.markdown({"x": made_up_card({"backward-ladder": rows_json(rows)})}).splitlines()


def test_the_table_compares_each_step_with_the_one_before_and_variations_with_the_last(lines):
    header = next(n for n, line in enumerate(lines) if line.startswith("| head dim"))
    names = lines[header].strip("| ").split(" | ")
    for line in lines[header + 2 : header + 4]:
        cells = dict(zip(names, line.strip("| ").split(" | "), strict=True))
        del cells["head dim"], cells["seq"], cells["mask"]
        first, *others = cells
        assert "×" not in cells[first], "there is nothing to compare it with"
        assert "×" in cells["with a fixed order of sums"], "it is of the same case"
        for label in (x for x in others if cells[x] != "–"):
            gain = cells[label].split(" · ")[1].split()[0]
            assert gain == ("2.00×" if is_step(label) else "0.91×"), label
    assert "–" in lines[header + 3], "128 queries a tile do not fit at d128"
    steps = [is_step(name) for name in names[3:]]
    assert steps == sorted(steps, reverse=True), "steps, then variations"
