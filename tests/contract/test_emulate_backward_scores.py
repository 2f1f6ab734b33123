"""ALiBi and sinks in the backward kernels that serve them, executed on a CPU in checked mode with sequences as long as
the arrays (with lengths: test_emulate_lengths.py): every tiling, persistent blocks, a fixed order of additions; and
bugs that must be noticed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from backward_support import near
from lengths_support import OPTIONS, Ragged, dense
from test_emulate_lengths import MAKE, assert_right, served

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.plan.planner import fitting_configs
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate_backward, run_plan

SPECS = [x for x in KERNELS.values() if x.operation == "backward" and "alibi" in x.options]
CHANGED = [x for x in served(SPECS) if {"alibi_slopes", "sink"} & set(OPTIONS[x.values[1]])]


def tilings(spec: Kernel, options: str) -> list[TileConfig]:
    """Those of a Hopper GPU; of its own kernels also blocks that take several items."""
    if spec.uses_copy_engine:
        return [
            dataclasses.replace(x, persistent=persistent)
            for x in spec.configs
            for persistent in {False, x.persistent}
        ]
    device = Device.typical("sm_90")
    return [x for x in spec.configs if x in fitting_configs(spec, head_dim_of(spec, x), device)]


def head_dim_of(spec: Kernel, config: TileConfig, dtype: str = "bfloat16") -> int:
    """The least and the greatest but one."""
    return near(spec, max(config.min_head_dim, 40) if dtype == "float16" else config.max_head_dim - 8)


def run(
    case: Ragged, spec: Kernel, config: TileConfig | None = None, deterministic: bool = False
) -> Emulation:
    options = {**case.lengths, **case.options, "deterministic": deterministic, "config": config}
    return emulate_backward(
        *case.inputs, dlse=case.dlse, **options, algorithm=spec.algorithm, mode="checked", trace=False
    )


@pytest.mark.sampled(fixed=4, dated=1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150), (65, 129), (1, 64)])
@pytest.mark.parametrize("tiling", range(7))
@pytest.mark.parametrize(("spec", "options"), CHANGED)
def test_results(spec, options, tiling, lengths, dtype, deterministic):
    """Of few tilings each stands for several."""
    config = (tilings(spec, options) * 7)[tiling]
    case = dense(*lengths, options, head_dim_of(spec, config, dtype), dtype)
    assert_right(case, run(case, spec, config, deterministic))


NARROW, WIDE = "backward/fa3_common/narrow_consumer.cuh", "backward/fa3_pair/kernel.cu"
BLOCK, GRADIENTS = "backward/fa3_common/block.cuh", "backward/fa3_common/gradients.cuh"
WORKSPACE, PASSES = "backward/common/workspace.cuh", "backward/common/passes.cuh"
SHARED = BLOCK, GRADIENTS, WORKSPACE, PASSES
ALIBI, SINK = "diagonal, negative slopes", "causal, sink"

#: (file, what is there, what is planted, options, kind of lengths), by what is wrong.
PLANTED = {
    "distances of the other keys": (
        NARROW, "return consumer * GROUP_KEYS + warp", "return warp", ALIBI, "dense"
    ),
    "distances of the wide kernel from the warp's first key": (
        WIDE, "return warp * 16 + lane / 4;", "return warp * 16;", ALIBI, "dense"
    ),
    "distances with keys and rows exchanged": (GRADIENTS, "8 * t + e - 8 * r", "8 * t + e + 8 * r", ALIBI, "dense"),
    "distances from the tile's first row": (GRADIENTS, "S.lane_column(lane) + alibi", "alibi", ALIBI, "dense"),
    "distances without the diagonal": (
        GRADIENTS, "lane) + alibi.diagonal - (", "lane) - (", ALIBI, "dense"
    ),
    "distances from the first key of all": (
        GRADIENTS, "- (block.first_key() + key));", "- key);", ALIBI, "dense"
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
    "the sink's sum of one row": (PASSES, "    of_sink = warp_sum(of_sink);\n", "", SINK, "padded"),
}  # fmt: skip


#: What both kernels share is planted in both.
OWN = {"fa3_backward": NARROW, "fa3_backward_wide": WIDE}
IN_KERNELS = [
    pytest.param(spec, name, id=f"{spec.name}-{name}")
    for spec in SPECS
    if spec.uses_copy_engine
    for name, (file, *_, kind) in PLANTED.items()
    if file in (OWN[spec.name], *SHARED) and (kind == "dense" or kind in spec.options)
]


@functools.cache
def planted_case(spec: Kernel, options: str, kind: str) -> Ragged:
    """What is right without a bug: three tiles of rows or of keys, ragged."""
    rows, keys = (80, 150) if spec.name.endswith("wide") else (150, 300)
    make = {**MAKE, "dense": lambda _, *how: dense(rows, keys, *how)}[kind]
    case = make("equal", options, near(spec, 64), "float16")
    assert_right(case, run(case, spec))
    return case


@pytest.mark.parametrize(("spec", "bug"), IN_KERNELS)
def test_planted(plant, spec, bug):
    file, old, new, options, kind = PLANTED[bug]
    case = planted_case(spec, options, kind)
    plant(file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        assert_right(case, run(case, spec))


def test_a_workspace_without_room_for_the_sums_of_a_sink_is_noticed():
    spec = KERNELS["fa3_backward"]
    case = dense(70, 130, SINK, 64, "float16")
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
