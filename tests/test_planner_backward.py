"""Which tiles plans take for gradients on Hopper, and which operands these keep in registers."""

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


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen", "changed", "by_red"),
    [
        (16, 32, 32, 1024, {}, True),
        (4, 32, 32, 4096, {}, True),
        (1, 32, 32, 16384, {}, True),
        (4, 32, 8, 4096, {}, False),
        (1, 8, 8, 2048, {}, False),
        (4, 32, 32, 4096, {"deterministic": True}, False),
        (4, 32, 32, 4096, {"softcap": 30.0}, False),
        (4, 32, 32, 4096, {"lengths": Padded()}, False),
    ],
)
def test_blocks_of_64_columns_that_run_on_add_from_registers(batch, heads, kv_heads, seqlen, changed, by_red):
    asked = Problem(
        batch, heads, kv_heads, seqlen, seqlen, 64, "bfloat16", CAUSAL, 0.1, operation="backward", **changed
    )
    plan = make_plan(asked, H200, "fa3")
    assert (not plan.config.bulk_add) == plan.launches[1].persistent == by_red


@pytest.mark.parametrize("config", KERNELS["fa3_backward"].configs, ids=str)
def test_operands_are_held_where_registers_are_left(config):
    """V before K, never more than there is, and none beside 128 rows."""
    head_dims = range(config.min_head_dim, config.max_head_dim + 1, 8)
    for head_dim in head_dims:
        of_values, of_keys = config.held_steps(head_dim)
        depth = -(-head_dim // 16)
        assert 0 <= of_keys <= of_values <= depth
        assert of_keys == 0 or of_values == depth
    assert any(sum(config.held_steps(head_dim)) for head_dim in head_dims) == (config.block_q < 128)


@pytest.mark.parametrize(
    ("head_dim", "running_on", "each", "of_80_rows"),
    [
        (72, (5, 5), (5, 5), (5, 5)),
        (80, (5, 5), (5, 5), (5, 5)),  # all there is
        (88, (6, 5), (6, 6), (6, 4)),
        (96, (6, 3), (6, 5), (6, 2)),
        (104, (7, 0), (7, 2), (6, 0)),
        (112, (5, 0), (7, 0), (4, 0)),
        (120, (3, 0), (5, 0), (2, 0)),
        (128, (1, 0), (3, 0), (0, 0)),
    ],
)
def test_how_many_steps_of_values_and_keys_are_held(head_dim, running_on, each, of_80_rows):
    """Fewer where blocks run on, whose consumers have 232 registers a thread and not 240, and beside 80 rows."""
    rows_and_steps = [(64, True, running_on), (64, False, each), (80, False, of_80_rows)]
    configs = [x for x in KERNELS["fa3_backward"].configs if x.fits(head_dim)]
    found = [(x.block_q, x.persistent, x.held_steps(head_dim)) for x in configs]
    assert found == rows_and_steps
