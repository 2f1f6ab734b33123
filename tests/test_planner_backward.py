"""Which tiles plans take for gradients on Hopper: those whose dQ is computed transposed."""

from __future__ import annotations

import dataclasses

import pytest

from cufa.core.architectures import Device
from cufa.core.lengths import Padded
from cufa.core.mask import CAUSAL, FULL, Band
from cufa.core.operation import Tuned
from cufa.core.problem import Problem
from cufa.kernels import KERNELS
from cufa.kernels.fa3_backward import TRANSPOSED
from cufa.planner import make_plan
from cufa.problem_classes import tuning_key

H200 = Device.typical(90)


def backward_of(mask=CAUSAL, softcap=None) -> Problem:
    return Problem(1, 4, 2, 1024, 1024, 96, "bfloat16", mask, 0.1, softcap, operation="backward")


def test_tiles_that_do_not_serve_all_that_their_kernel_serves():
    """A softcap or a mask beyond a band: asked for, they are refused; measured for others of the class, not taken."""
    config, capped, listed = TRANSPOSED, backward_of(softcap=20.0), backward_of(Band(prefix=300))
    cases = [(backward_of(), None), (capped, "takes no softcap"), (listed, "takes masks that are bands")]
    for problem, refused in cases:
        planned = make_plan(problem, H200).config
        assert not planned.dq_transposed
        tuned = {tuning_key(KERNELS["fa3_backward"], problem): Tuned(config, planned, "")}
        assert make_plan(problem, H200, tuned=tuned).config == (planned if refused else config)
        if refused is None:
            assert make_plan(problem, H200, "fa3", config).config is config
        else:
            with pytest.raises(ValueError, match=refused):
                make_plan(problem, H200, "fa3", config)


def test_blocks_do_not_run_on_where_dq_is_transposed():
    problem = backward_of()
    each = make_plan(problem, H200, "fa3", TRANSPOSED)
    asked = make_plan(problem, H200, "fa3", dataclasses.replace(TRANSPOSED, persistent=True))
    assert (asked.launches, asked.workspace) == (each.launches, each.workspace)


@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "mask", "changed", "rows"),
    [
        (16, 4096, 128, FULL, {}, 80),
        (16, 4096, 128, CAUSAL, {}, 64),
        (16, 16384, 128, CAUSAL, {}, 80),
        (16, 1024, 128, FULL, {}, 64),
        (16, 4096, 96, FULL, {}, 80),
        (16, 4096, 72, FULL, {}, 80),
        (16, 16384, 64, FULL, {}, 128),
        (16, 4096, 128, CAUSAL, {"deterministic": True}, 80),
        (64, 4096, 128, CAUSAL, {}, 80),
        (16, 16384, 128, FULL, {"softcap": 30.0}, 64),
        (16, 16384, 128, Band(None, 0, prefix=300), {}, 64),
        (16, 4096, 128, FULL, {"lengths": Padded()}, 64),
    ],
)
def test_long_key_blocks_take_tiles_of_80_rows(heads, seqlen, head_dim, mask, changed, rows):
    asked = Problem(
        4, heads, 16, seqlen, seqlen, head_dim, "bfloat16", mask, 0.1, operation="backward", **changed
    )
    assert make_plan(asked, H200, "fa3").config.block_q == rows
