"""The model of what crosses device memory, against the counters that the kernels keep when they are executed here."""

from __future__ import annotations

import numpy as np
import pytest
from backward_support import make_case as make_backward
from decode_kernel_support import operands_of, plan_of
from decode_support import make_case
from sampling import of_today
from support import make_inputs, make_problem

import cufa
from cufa.commands.dashboard import make_importable
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.problem import Problem
from cufa.run.emulate.calls import Emulation, emulate, run_plan
from cufa.run.emulate.launch import Execution
from cufa.schedule.schedule import Schedule

make_importable()
from cufa.dashboard.model import traffic_steps  # noqa: E402


def counted(algorithm, seqlen_q, seqlen_k, head_dim, mask) -> Emulation:
    q, k, v = make_inputs(1, 1, 1, seqlen_q, seqlen_k, head_dim, "float16")
    return emulate(q, k, v, mask=mask, algorithm=algorithm, num_splits=1, mode="counted", trace=False)


def moved(run: Emulation) -> tuple[int, int]:
    return run.totals["global_read_bytes"], run.totals["global_write_bytes"]


def modelled(run: Emulation) -> tuple[int, int]:
    return traffic_steps.total(
        traffic_steps.MODELS[run.plan.spec.algorithm](run.plan.problem, run.plan.schedule)
    )


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(70, 0)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(256, 256, 64), (200, 330, 128)])
@pytest.mark.parametrize("algorithm", ["naive", "fa2"])
def test_every_byte_is_foreseen(algorithm, seqlen_q, seqlen_k, head_dim, mask):
    run = counted(algorithm, seqlen_q, seqlen_k, head_dim, mask)
    assert modelled(run) == moved(run)


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim"),
    [
        *(("fa2_forward", "float16", head_dim) for head_dim in (64, 136, 256)),
        *(("fa2_forward_f32", "float32", head_dim) for head_dim in (64, 136)),
        *(("fa1_forward", "float16", head_dim) for head_dim in (64, 128, 40)),
        *(("fa1_forward_f32", "float32", head_dim) for head_dim in (64, 136)),
        *(("naive", "float16", head_dim) for head_dim in (64, 160)),
        ("naive", "float32", 64),
    ],
)
def test_bank_conflicts(kernel, dtype, head_dim):
    """None if rows are multiples of 128 bytes; else some copies cross a row's end in one pass."""
    spec, inputs = KERNELS[kernel], make_inputs(1, 2, 1, 140, 200, head_dim, dtype)
    for config in of_today(
        fitting_configs(spec, head_dim, Device.typical("sm_90")), f"conflicts {kernel} {head_dim}"
    ):
        totals = emulate(*inputs, algorithm=spec.algorithm, config=config, mode="counted").totals
        assert totals["bank_conflicts"] <= (0 if head_dim % 32 == 0 else 0.1 * totals["shared_wavefronts"])


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(256, 512, 64), (160, 600, 128)])
def test_fa1_but_for_what_its_threads_ask_twice(seqlen_q, seqlen_k, head_dim):
    """l and m of a row are asked for by the four lanes and all the warps that hold a part of it; and a query block is
    copied ahead of a step that does not come."""
    run = counted("fa1", seqlen_q, seqlen_k, head_dim, CAUSAL)
    read, written = modelled(run)
    lm = sum(
        move.read
        for step in traffic_steps.fa1(run.plan.problem, run.plan.schedule)
        for move in step.moves
        if move.array == "l, m"
    )
    config = run.plan.config
    ahead = min(config.block_q, seqlen_q) * head_dim * 2
    assert moved(run) == (read + (4 * config.key_warps - 1) * lm + ahead, written)


@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_decode_with_splits(num_splits):
    """Sixteen parts are what a merge reads at once: of fewer it reads the last again. All its threads ask for m and l,
    and every thread for the length."""
    length, rows, head_dim = 1024, 16, 64
    case = make_case([length], heads=rows, kv_heads=1, head_dim=head_dim, capacity=length)
    plan = plan_of(case, "decode_split", num_splits, None)
    run = run_plan(plan, operands_of(case), Execution("counted"), trace=False)
    schedule = Schedule(1, length, 1, plan.config.block_kv, FULL)
    read, written = traffic_steps.total(traffic_steps.decode(plan.problem, schedule, num_splits, length))
    threads = plan.config.num_warps * 32 * num_splits
    vectors = head_dim // 4
    again = 0
    if num_splits > 1:
        again = (16 - num_splits) * rows * (head_dim + 2 * vectors) * 4  # the last part
        again += num_splits * rows * 2 * (vectors - 1) * 4  # m and l
    assert run.totals["global_write_bytes"] == written
    assert run.totals["global_read_bytes"] - read - again == threads * 4


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(70, 0)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(256, 256, 64), (208, 330, 128)])
def test_every_byte_of_the_backward_is_foreseen(seqlen_q, seqlen_k, head_dim, mask):
    """Additions to dQ among what is written."""
    case = make_backward(1, 1, 1, seqlen_q, seqlen_k, head_dim, mask=mask)
    run = cufa.emulate_backward(*case.arrays, mask=mask, mode="counted", trace=False)
    steps = list(traffic_steps.fa2_backward(run.plan.problem, run.plan.schedule))
    added = [m for step in steps if not step.kernel for m in step.moves if m.array == "dQ so far"]
    assert run.totals["reductions"] * 4 == sum(move.written for move in added)
    assert moved(run) == traffic_steps.total(iter(steps))


def test_the_naive_backward_moves_what_its_launches_take():
    """Of 4 × 6 tiles of 32 × 32, five launches: each takes two tiles, and all of P, dP and dS crosses memory."""
    problem = Problem(1, 1, 1, 128, 192, 64, "float16", FULL, 0.125, operation="backward")
    schedule = Schedule(128, 192, 32, 32, FULL)
    steps = list(traffic_steps.naive_backward(problem, schedule))
    assert len(steps) == 5 * 24
    tile, scores = 32 * 64 * 2, 128 * 192
    moved_of = {
        name: sum(m.read + m.written for s in steps for m in s.moves if m.array == name)
        for name in ("P", "dP", "dS", "dO", "Q", "K", "V", "dQ", "dK", "dV")
    }
    assert moved_of == {
        "P": 3 * scores * 2, "dP": 3 * scores * 4, "dS": 3 * scores * 2, "dO": 2 * 24 * tile, "Q": 24 * tile,
        "K": 24 * tile, "V": 24 * tile, "dQ": 4 * tile, "dK": 6 * tile, "dV": 6 * tile,
    }  # fmt: skip


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(20, 3, -40)], ids=str)
@pytest.mark.parametrize("algorithm", traffic_steps.MODELS)
def test_every_tile_of_the_grid_has_its_step(algorithm, mask):
    """In each launch once; skipped tiles move nothing, unless a block that sees no key stores its zeros."""
    problem = make_problem(*make_inputs(1, 1, 1, 128, 192, 64), mask=mask)
    schedule = Schedule(128, 192, 32, 32, mask, skip_masked_tiles=algorithm == "fa2")
    steps = list(traffic_steps.MODELS[algorithm](problem, schedule))
    for kernel in {step.kernel for step in steps}:
        places = [(step.q_block, step.kv_block) for step in steps if step.kernel == kernel]
        assert sorted(places) == [(i, j) for i in range(4) for j in range(6)]
    assert sum(step.skipped for step in steps) == schedule.skipped
    for step in steps:
        if step.skipped:
            assert not step.read
    written = sum(m.written for step in steps for m in step.moves if m.array == "L")
    assert written == 128 * np.dtype(np.float32).itemsize
