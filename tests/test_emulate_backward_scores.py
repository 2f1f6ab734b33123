"""ALiBi in the backward kernels that serve it, executed on a CPU in checked mode with sequences as long as the
arrays (with lengths: test_emulate_lengths.py): every tiling, persistent blocks, a fixed order of additions; and bugs
that must be noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backward_support import near
from lengths_support import OPTIONS, Ragged, dense
from test_emulate_lengths import BACKWARD, MAKE, assert_right, served
from test_emulate_mutants import plant

from cufa.core.architectures import Device
from cufa.executor.emulate import Emulation, EmulationError, emulate_backward
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
ALIBI = "diagonal, negative slopes"

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
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(tmp_path, monkeypatch, bug):
    file, old, new, options, kind = PLANTED[bug]
    spec = KERNELS["fa3_backward"]
    case = (
        dense(150, 300, options, 64, "float16")
        if kind == "dense"
        else MAKE[kind]("equal", options, 64, "float16")
    )
    assert_right(case, run(case, spec))
    plant(tmp_path, monkeypatch, file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        assert_right(case, run(case, spec))


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
