"""Bytes that tiles move, derived from loops, against what the kernels' source asks for when it is executed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.kernels.forward.fa2 import Fa2Config
from cufa.measure.traffic import l2_traffic, shared_bytes
from cufa.problem.columns import Columns
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.problem.problem import Problem
from cufa.run.emulate import counters as records
from cufa.run.emulate.calls import emulate

DERIVED = [
    name for name, spec in KERNELS.items() if spec.operation == "forward" and spec.algorithm != "naive"
]
SECTOR = 32


def recorded(name: str) -> list[dict[str, Any]]:
    """Of bands, whose keys are not split: runs of rows are looked up in memory, and parts are merged."""
    runs = [run for run in records.load()["kernels"][name]["runs"] if "keys split" not in run["config"]]
    runs = [run for run in runs if run["problem"]["mask"]["family"] == "band"]
    assert runs
    return runs


def config_of(spec: Kernel, run: dict[str, Any], problem: Problem) -> TileConfig:
    configs = spec.configs + spec.split_configs
    return next(c for c in configs if str(c) == run["config"] and c.fits(problem.head_dim))


@pytest.mark.parametrize("name", DERIVED)
def test_recorded_counters_are_met_to_the_byte(name: str) -> None:
    spec = KERNELS[name]
    of_columns: dict[Mask, set[tuple[int, int]]] = {}
    for run in recorded(name):
        problem, counted = Problem.from_json(run["problem"]), run["totals"]
        config = config_of(spec, run, problem)
        derived = l2_traffic(problem, spec, config)
        assert (derived is None) == (config in spec.split_configs), run["config"]
        if derived is None:
            continue
        # What the copy engine brings is counted in bytes, as it is asked for once; the rest in sectors, as lanes of a
        # warp may ask for the same.
        read = counted["global_read_sectors"] * SECTOR or counted["global_read_bytes"]
        beyond = read - derived.read, counted["global_write_bytes"] - derived.written
        if not isinstance(problem.mask, Columns):
            assert beyond == (0, 0), run["config"]
        else:  # a launch before reads the columns and writes what becomes of blocks of keys, whatever their head dim
            of_columns.setdefault(problem.mask, set()).add(beyond)
    for mask, (beyond, *others) in of_columns.items():
        assert not others and min(beyond) > 0, mask


@pytest.mark.parametrize(
    ("algorithm", "head_dim", "mask"),
    [
        ("fa2", 72, Band(60, 5, -20)),
        ("fa2", 40, FULL),
        ("fa3", 72, Band(60, 5, -20)),
        ("fa1", 64, CAUSAL),
        ("fa1", 64, FULL),
    ],
)
def test_ends_shared_heads_and_rows_without_keys(algorithm: str, head_dim: int, mask: Mask) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 150, head_dim)).astype(np.float16)
    k = rng.standard_normal((1, 1, 601, head_dim)).astype(np.float16)
    run = emulate(q, k, k, mask=mask, algorithm=algorithm, num_splits=1, mode="counted", arch="sm_90")
    derived = l2_traffic(run.plan.problem, run.plan.spec, run.plan.config)
    assert derived is not None
    counted = run.totals
    read = counted["global_read_sectors"] * SECTOR if algorithm == "fa1" else counted["global_read_bytes"]
    assert (derived.read, derived.written) == (read, counted["global_write_bytes"])


def besides(problem: Problem, config: TileConfig) -> int:
    """Bytes that a block of FA2's moves besides: the copies of the tile behind the last one, which write zeros; and the
    record that it parks, of 16 bytes a lane, which every warp reads twice."""
    if not isinstance(config, Fa2Config):
        return 0
    zeros = 2 * config.block_kv * problem.head_dim * problem.itemsize
    return (
        (zeros + 128 * (1 + 2 * 4 * config.num_warps)) * problem.query_blocks(config.block_q) * problem.heads
    )


def closeness(config: TileConfig) -> float:
    return 1 / 60 if isinstance(config, Fa2Config) else 1 / 15


@pytest.mark.parametrize("name", ["fa2_forward", "fa2_noskip", "fa3_forward", "fa2_backward"])
def test_shared_memory_is_met_within_a_fifteenth(name: str) -> None:
    spec = KERNELS[name]
    for run in recorded(name):
        problem, counted = Problem.from_json(run["problem"]), run["totals"]
        config = config_of(spec, run, problem)
        derived = shared_bytes(problem, spec, config)
        if config in spec.split_configs:
            assert derived is None, run["config"]
        else:
            found = 128 * counted["shared_wavefronts"]
            assert derived == pytest.approx(found - besides(problem, config), rel=closeness(config)), run[
                "config"
            ]
    f32 = KERNELS["fa2_forward_f32"]
    problem = Problem(1, 1, 1, 64, 64, 64, "float32", scale=0.125, precision="float32")
    assert shared_bytes(problem, f32, f32.configs[0]) is None


def test_what_is_not_derived_is_not_told() -> None:
    spec = KERNELS["naive"]
    problem = Problem(1, 1, 1, 64, 64, 64, "float16", scale=0.125)
    assert l2_traffic(problem, spec, spec.configs[0]) is None
