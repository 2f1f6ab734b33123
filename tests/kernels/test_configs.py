"""Tile configs: a class for each family of kernels, on disk as a plain dictionary."""

from __future__ import annotations

import dataclasses
import json

import pytest
from records_support import SHIPPED

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, TileConfig, read_config
from cufa.measure.suites import make
from cufa.plan.planner import make_plan

SPECS = pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)


@SPECS
def test_configs_are_read_as_they_were_written(spec):
    for config in spec.configs:
        assert type(config) is spec.config_class
        content = json.loads(json.dumps(dataclasses.asdict(config)))
        assert spec.read_config(content) == config
        assert read_config(spec.operation, spec.algorithm, content) == config


def test_kernels_of_one_algorithm_share_a_class():
    classes = {}
    for spec in KERNELS.values():
        assert classes.setdefault((spec.operation, spec.algorithm), spec.config_class) is spec.config_class


@SPECS
def test_a_cpu_takes_plain_tiles(spec):
    tiles = TileConfig(256, 512, num_warps=0)
    assert spec.read_config(dataclasses.asdict(tiles)) == tiles


@pytest.mark.parametrize("name", SHIPPED)
def test_recorded_configs_are_those_of_their_kernels(name):
    rows = [row.json for row in SHIPPED[name].rows if row.is_ours]
    assert len({row["kernel"] for row in rows}) > 8
    for row in rows:
        spec = KERNELS[row["kernel"]]
        assert isinstance(spec.read_config(row["config"]), spec.config_class)


def test_fields_that_are_not_known_or_missing_and_auto_are_refused():
    spec = KERNELS["fa3_forward"]
    fields = dataclasses.asdict(spec.configs[0])
    for name in ("no_such_field", "column_warps"):
        with pytest.raises(TypeError, match=name):
            spec.read_config({**fields, name: 2})
    with pytest.raises(TypeError, match="ping_pong"):
        spec.read_config({k: v for k, v in fields.items() if k != "ping_pong"})
    with pytest.raises(ValueError, match="algorithm='auto'"):
        read_config("forward", "auto", fields)


def test_a_config_of_another_family_is_refused():
    config = KERNELS["fa2_forward"].configs[0]
    with pytest.raises(
        TypeError, match=r"is a Fa2Config; fa3_forward takes a Fa3Config: .*KERNELS\['fa3_forward'\]"
    ):
        make_plan(make(1, 8, 1024, 64, "bfloat16", False), Device.typical("sm_90"), "fa3", config)


@SPECS
def test_fields_of_the_family_tell_configs_of_one_text_apart(spec):
    told = {(str(c), *c.own.items(), c.blocks_per_sm, c.min_head_dim, c.max_head_dim) for c in spec.configs}
    assert len(told) == len(spec.configs)
