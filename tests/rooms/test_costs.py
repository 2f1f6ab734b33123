"""What a plan costs, from recorded counters × units of work, against the counters of the executed source."""

from __future__ import annotations

import dataclasses
import math

import pytest
from evidence import counting
from sampling import of_today

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.measure import costs
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import Problem

H200 = Device.typical("sm_90")


def recorded_builds(kernel: Kernel) -> list[tuple[TileConfig, int, bool]]:
    """(config, head dim, soft cap) of each build whose costs are recorded."""
    known = counting.configs_of(kernel)
    return [
        (
            next(x for x in known if costs.key_of(x) == entry["config"] and x.fits(int(head_dim))),
            int(head_dim),
            softcap,
        )
        for entry in costs.load()["kernels"][kernel.name]["configs"]
        for head_dim in entry["head_dims"]
        if "softcap" not in head_dim
        for softcap in (False, True)
    ]


@pytest.mark.sampled(fixed=0, dated=5)
@pytest.mark.parametrize("name", counting.KERNELS)
def test_recorded_costs_are_what_the_source_counts(name: str) -> None:
    """One build of some kernels, others every day. Else: python -m tests.evidence costs (some minutes)."""
    kernel = counting.KERNELS[name]
    for config, head_dim, softcap in of_today(recorded_builds(kernel), f"costs {name}", fixed=0):
        table = costs.table_of(kernel, config, head_dim, softcap)
        assert counting.count(kernel, config, head_dim, softcap) == table, (str(config), head_dim, softcap)


def test_every_registered_config_is_recorded() -> None:
    """At the head dims that people use."""
    for kernel in counting.KERNELS.values():
        for config in kernel.configs:
            for head_dim in filter(config.fits, counting.HEAD_DIMS):
                assert costs.table_of(kernel, config, head_dim, False), (kernel.name, str(config), head_dim)


def problem_of(kernel: str, config: TileConfig, head_dim: int, mask: Band, **changes: object) -> Problem:
    """As many queries as keys, in whole tiles, so that every row and every key block sees something."""
    spec, seqlen = KERNELS[kernel], 3 * math.lcm(config.block_q, config.block_kv)
    problem = Problem(
        1, 2, 2, seqlen, seqlen, head_dim, spec.dtypes[0], mask, head_dim**-0.5, precision=spec.precisions[0],
        operation=spec.operation,
    )  # fmt: skip
    return dataclasses.replace(problem, **changes)


def counted_and_derived(
    kernel: str, config: TileConfig, problem: Problem
) -> tuple[dict[str, int], dict[str, int]]:
    plan = counting.plan_of(KERNELS[kernel], config, problem)
    return counting.counters_of(counting.execute(plan)), dataclasses.asdict(costs.cost_of(plan))


def first(kernel: str, head_dim: int) -> TileConfig:
    return next(config for config in KERNELS[kernel].configs if config.fits(head_dim))


KERNEL_AT = pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        ("fa3_forward", 64), ("fa3_forward", 128), ("fa2_forward", 64), ("fa2_noskip", 128), ("fa1_forward", 64),
        ("fa2_backward", 128), ("fa3_backward", 64), ("fa3_backward", 128), ("fa3_backward_wide", 256),
    ],
)  # fmt: skip


@pytest.mark.sampled(each="kernel", fixed=0)
@KERNEL_AT
@pytest.mark.parametrize("mask", [CAUSAL, Band(100, 0)], ids=str)
def test_masks_change_the_tiles_visited_and_nothing_else(kernel: str, head_dim: int, mask: Band) -> None:
    """Counted with full attention only: what a masked tile costs is what a clear one does."""
    config = first(kernel, head_dim)
    counted, derived = counted_and_derived(kernel, config, problem_of(kernel, config, head_dim, mask))
    for name, count in counted.items():
        # FA2 loads one more tile of keys for some query blocks; FA1 rescales less where rows see nothing.
        assert derived[name] == pytest.approx(count, rel=0.02), name


@pytest.mark.sampled(fixed=0, dated=4)
@KERNEL_AT
def test_ends_of_sequences_and_shared_heads(kernel: str, head_dim: int) -> None:
    config = first(kernel, head_dim)
    lengths = {"seqlen_q": 3 * config.block_q - 24, "seqlen_k": 4 * config.block_kv - 40, "kv_heads": 1}
    counted, derived = counted_and_derived(
        kernel, config, problem_of(kernel, config, head_dim, FULL, **lengths)
    )
    for name, count in counted.items():
        # FA2's backward adds to dQ in strips of 16 rows, and passes read whole tiles of dQ.
        assert derived[name] == pytest.approx(count, rel=0.1), name


def test_a_plan_without_recorded_counters_says_so() -> None:
    problem = Problem(1, 8, 8, 1024, 1024, 72, "bfloat16", scale=0.125)
    plan = make_plan(problem, H200, "fa3", num_splits=1)
    assert costs.why_not(plan) == (
        f"no counters are recorded for fa3_forward with tiles {plan.config} at head dim 72"
    )
    assert costs.cost_on(problem, plan.spec, plan.config) is None
    assert "split keys" in costs.why_not(make_plan(problem, H200, "fa3", num_splits=4))
    assert "launched" in costs.why_not(make_plan(problem, None))
