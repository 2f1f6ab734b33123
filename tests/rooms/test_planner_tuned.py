"""Plans with tuned tiles: for which problems they are taken."""

from __future__ import annotations

import dataclasses

import pytest
from test_planner import H200, problem

from cufa.kernels import KERNELS, TileConfig
from cufa.measure.decode_cases import cuts, make_decode
from cufa.plan.candidates import tuning_key
from cufa.plan.operation import Tuned
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.mask import FULL, Band


def test_tuned_config_is_honoured():
    p = problem()
    spec = KERNELS["fa1_forward"]
    default, *others = fitting_configs(spec, p.head_dim, H200)
    assert make_plan(p, H200, "fa1").config is default
    tuned = {tuning_key(spec, p): Tuned(others[-1], default, "tuned on a card: 1.10× as fast")}
    plan = make_plan(p, H200, "fa1", tuned=tuned)
    assert plan.config is others[-1]
    assert f"because    tiles {others[-1]}: tuned on a card: 1.10× as fast" in str(plan)


def test_tuned_config_is_not_taken_where_the_planner_would_take_other_tiles_than_it_beat():
    """Within one class of shapes there may be too few thread blocks for the tiles that were measured."""
    p = problem()
    spec = KERNELS["fa1_forward"]
    default, *others = fitting_configs(spec, p.head_dim, H200)
    tuned = {tuning_key(spec, p): Tuned(others[-1], others[0], "")}
    assert make_plan(p, H200, "fa1", tuned=tuned).config is default


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"head_dim": 128},
        {"mask": FULL},
        {"mask": Band(100, 0)},
        {"seqlen_k": 512},
        {"precision": "tf32"},
        {"batch": 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tuned_config_is_for_its_own_shapes_only(change):
    spec = KERNELS["naive"]
    assert tuning_key(spec, problem()) != tuning_key(spec, dataclasses.replace(problem(), **change))


def test_lengths_of_one_class_share_a_tuned_config():
    spec = KERNELS["naive"]
    keys = {tuning_key(spec, problem(seqlen_k=n)) for n in (256, 300, 511)}
    assert len(keys) == 1
    assert len({tuning_key(spec, problem(seqlen_k=n)) for n in (0, 1, 2, 3)}) == 2


def test_tuned_config_that_is_no_longer_registered_is_ignored():
    p = problem()
    spec = KERNELS["fa1_forward"]
    plan = make_plan(p, H200, "fa1", tuned={tuning_key(spec, p): Tuned(TileConfig(17, 19, 1))})
    assert plan.config is make_plan(p, H200, "fa1").config


def test_a_tuned_cut_of_a_cache_is_taken_for_its_class():
    """Tiles, schedule and number of splits; the caller's own number, and invariance, come first."""
    p = make_decode(1, 32, 8, 128 << 10)
    plan = make_plan(p, H200)
    key = tuning_key(plan.spec, p)
    tuned = {key: Tuned(plan.config.merged_in_cluster(), plan.config, "tuned on a card", ("fixed", 8))}
    found = make_plan(p, H200, tuned=tuned)
    assert found.config.cluster_merge and found.num_splits == 8 and "tuned on a card" in str(found)
    for other in (
        make_decode(1, 32, 8, 64 << 10),
        make_decode(2, 32, 8, 128 << 10),
        make_decode(1, 32, 4, 128 << 10),
    ):
        assert make_plan(other, H200, tuned=tuned).config == make_plan(other, H200).config
    assert make_plan(p, H200, tuned=tuned, num_splits=3).num_splits == 3
    assert make_plan(dataclasses.replace(p, invariant=True), H200, tuned=tuned).num_splits > 8
    names = [contender.label for contender in cuts(p, H200)]
    assert len({*names}) == len(names) and any("in clusters" in name for name in names)
