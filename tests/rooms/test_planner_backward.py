"""Which tiles plans take for gradients on Hopper, and which operands these keep in registers."""

from __future__ import annotations

import dataclasses

import pytest

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.plan.candidates import serving_configs, tuning_key
from cufa.plan.operation import Tuned
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Padded
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import Problem

H200 = Device.typical(90)


def backward_of() -> Problem:
    return Problem(1, 4, 2, 1024, 1024, 104, "bfloat16", CAUSAL, 0.1, operation="backward")


def test_tiles_that_do_not_serve_all_that_their_kernel_serves():
    """Persistent blocks take band masks over whole arrays, without soft cap and in any order. For other problems they
    are refused if asked for, not offered for tuning, and not taken if they were measured for others of the class."""
    config = next(x for x in KERNELS["fa3_backward"].configs if x.persistent and x.fits(104))
    refusal = "takes band masks over whole arrays alone, without softcap, sink or a fixed order of additions"
    for changed, served in (
        ({}, True), ({"softcap": 20.0}, False), ({"deterministic": True}, False), ({"lengths": Padded()}, False),
        ({"mask": Band(prefix=300)}, False), ({"mask": Band(None, 0, prefix=300)}, False),
    ):  # fmt: skip
        problem = dataclasses.replace(backward_of(), **changed)
        offered = serving_configs(KERNELS["fa3_backward"], problem, H200)
        assert [x.persistent for x in offered] == [False, *[True] * served]
        planned = make_plan(problem, H200).config
        assert not planned.persistent
        tuned = {tuning_key(KERNELS["fa3_backward"], problem): Tuned(config, planned, "")}
        assert make_plan(problem, H200, tuned=tuned).config == (config if served else planned)
        if served:
            assert make_plan(problem, H200, "fa3", config).config is config
        else:
            with pytest.raises(ValueError, match=refusal):
                make_plan(problem, H200, "fa3", config)


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


def test_tiles_of_80_rows_that_old_records_name_are_refused():
    config = dataclasses.replace(KERNELS["fa3_backward"].configs[1], block_q=80)
    with pytest.raises(ValueError, match="80 rows a tile, where 64 or 128 are served"):
        make_plan(backward_of(), H200, "fa3", config)


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "causal", "runs_on"),
    [
        (96, 1024, False, True),
        (96, 2048, True, True),
        (96, 2048, False, False),
        (80, 4096, True, False),
        (128, 1024, False, True),
        (128, 2048, False, False),
        (128, 2048, True, False),
        (128, 4096, True, False),
    ],
)
def test_blocks_of_wider_heads_run_on_where_a_key_block_takes_no_long_time(head_dim, seqlen, causal, runs_on):
    mask = CAUSAL if causal else FULL
    asked = Problem(
        16384 // seqlen, 16, 16, seqlen, seqlen, head_dim, "bfloat16", mask, 0.1, operation="backward"
    )
    plan = make_plan(asked, H200, "fa3")
    assert plan.config.persistent == plan.launches[1].persistent == runs_on
    assert plan.config.k_stages == (2 if runs_on and head_dim <= 96 else 1)
