"""ALiBi and sinks in the backward kernels that serve them, executed on a CPU in checked mode with sequences as long as
the arrays (with lengths: test_emulate_lengths.py): every tiling, persistent blocks, a fixed order of additions; and
bugs that must be noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_support import near
from lengths_support import OPTIONS, Ragged, dense
from test_emulate_lengths import BACKWARD, MAKE, assert_right, served
from test_emulate_mutants import plant

from cufa.core.architectures import Device
from cufa.executor.emulate import Emulation, EmulationError, Execution, emulate_backward, run_plan
from cufa.kernels import KERNELS, KernelSpec, TileConfig
from cufa.kernels.fa3_backward import Fa3BackwardConfig
from cufa.planner import fitting_configs

#: Of each kernel, one config a tiling of Hopper's; those of Hopper's own also by blocks that take several items.
TILINGS = {
    spec.name: [
        tiling
        for config in spec.configs
        for tiling in (
            [config, dataclasses.replace(config, persistent=True)]
            if isinstance(config, Fa3BackwardConfig)
            else [config]
            * (config in fitting_configs(spec, near(spec, config.max_head_dim), Device.typical("sm_90")))
        )
    ]
    for spec in BACKWARD
}
CHANGED = [x for x in served(BACKWARD) if {"alibi_slopes", "sink"} & set(OPTIONS[x.values[1]])]


def run(
    case: Ragged, spec: KernelSpec, config: TileConfig | None = None, deterministic: bool = False
) -> Emulation:
    options = {**case.lengths, **case.options, "deterministic": deterministic, "config": config}
    return emulate_backward(
        *case.inputs, dlse=case.dlse, **options, algorithm=spec.algorithm, mode="checked", trace=False
    )


@pytest.mark.sampled(fixed=10, dated=4, pairs=[("tiling", "options")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150), (65, 129), (1, 64)])
@pytest.mark.parametrize("tiling", range(max(map(len, TILINGS.values()))))
@pytest.mark.parametrize(("spec", "options"), CHANGED)
def test_results(spec, options, tiling, lengths, dtype, deterministic):
    """Of few tilings the last stands for those that are not there."""
    config = TILINGS[spec.name][min(tiling, len(TILINGS[spec.name]) - 1)]
    case = dense(*lengths, options, near(spec, config.max_head_dim), dtype)
    assert_right(case, run(case, spec, config, deterministic))


NARROW, BLOCK, GRADIENTS = (
    "kernels/fa3_backward.cu",
    "tiles/backward_block.cuh",
    "tiles/backward_gradients.cuh",
)
WORKSPACE, PASSES = "tiles/backward_workspace.cuh", "tiles/backward_passes.cuh"
ALIBI, SINK = "diagonal, negative slopes", "causal, sink"

#: (file, what is there, what is planted, options, kind of lengths), by what is wrong.
PLANTED = {
    "distances of the other keys": (
        NARROW, "return consumer * GROUP_KEYS + warp", "return warp", ALIBI, "dense"
    ),
    "distances with keys and rows exchanged": (GRADIENTS, "8 * t + e - 8 * r", "8 * t + e + 8 * r", ALIBI, "dense"),
    "distances from the tile's first row": (GRADIENTS, "S.lane_column(lane) + alibi", "alibi", ALIBI, "dense"),
    "distances without the diagonal": (
        GRADIENTS, "lane) + alibi.diagonal - (", "lane) - (", ALIBI, "dense"
    ),
    "the slope of another head": (GRADIENTS, "block.sequence(), tile.head)", "block.sequence(), 0)", ALIBI, "dense"),
    "the slope of the first sequence": (
        BLOCK, "DenseSequence<BackwardParams>{p, batch()}", "DenseSequence<BackwardParams>{p, 0}", ALIBI, "dense"
    ),
    "the slope of the first packed sequence": (
        BLOCK, "RaggedSequence{batch(), ", "RaggedSequence{0, ", "top-left, ALiBi", "packed"
    ),
    "ALiBi under the cap": (
        GRADIENTS, "P[e] * cap_slope(s) : P[e];", "P[e] * cap_slope(P[e]) : P[e];", "all", "dense"
    ),
    "sums of the sink over the last tiles of dQ": (
        WORKSPACE, "sinks = reinterpret_cast<float*>(items);", "sinks = reinterpret_cast<float*>(items) - 64;", SINK,
        "dense",
    ),
    "sums of the sink of the first tile alone": (
        PASSES, "st_global(workspace.sinks + item.head * workspace.strips + item.strip, of_sink)",
        "st_global(workspace.sinks + item.head * workspace.strips + item.strip % TILE_STRIPS, of_sink)", SINK, "dense",
    ),
    "sums of the sink of rows that do not exist": (
        PASSES, "if (here && unit == 0) {\n      const", "if (item.valid && unit == 0) {\n      const", SINK, "padded"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(tmp_path, monkeypatch, bug):
    file, old, new, options, kind = PLANTED[bug]
    spec = KERNELS["fa3_backward"]
    case = (
        MAKE[kind]("equal", options, 64, "float16")
        if kind in MAKE
        else dense(150, 300, options, 64, "float16")
    )
    config = dataclasses.replace(spec.configs[0], persistent=kind == "persistent")
    assert_right(case, run(case, spec, config))
    plant(tmp_path, monkeypatch, file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        assert_right(case, run(case, spec, config))


def test_a_workspace_without_room_for_the_sums_of_a_sink_is_noticed():
    spec = KERNELS["fa3_backward"]
    case = dense(150, 300, SINK, 64, "float16")
    config = spec.configs[0]
    plan = run(case, spec, config).plan
    strips = plan.problem.query_blocks(config.block_q) * config.block_q // 16 * plan.problem.heads
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    given = dict(zip(names, (*case.inputs, case.dlse), strict=True))
    results = {f"d{name}": np.full_like(given[name], np.nan) for name in "qkv"}
    given |= {**results, "sink": case.options["sink"], "dsink": np.full(4, np.nan, np.float32)}
    for missing in (0, 4, 4 * strips):
        short = dataclasses.replace(plan, workspace=plan.workspace - missing)
        try:
            found = run_plan(short, given, Execution("checked"), trace=False).findings
        except EmulationError:
            found = ("stopped",)
        assert bool(found) == bool(missing)


def test_a_slope_of_zero_changes_nothing():
    """The same bits as without ALiBi would be too much: what is added up is scaled elsewhere."""
    spec = KERNELS["fa3_backward"]
    case = dense(150, 300, "top-left, ALiBi", 64, "bfloat16")
    none = dataclasses.replace(case, options={**case.options, "alibi_slopes": np.zeros(4, np.float32)})
    without = {name: x for name, x in case.options.items() if name != "alibi_slopes"}
    expected = run(dataclasses.replace(case, options=without), spec).results
    for name, x in run(none, spec).results.items():
        np.testing.assert_allclose(
            x.astype(np.float64), expected[name].astype(np.float64), atol=2.0**-7, err_msg=name
        )
