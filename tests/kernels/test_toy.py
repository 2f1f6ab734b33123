"""How much a new mask and a new operation ask of the house: what stands between the two rulers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import assert_attention, assert_tiles, changed, forward_operands, make_inputs

import cufa
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.kernels.params import softmax_scalars
from cufa.plan.candidates import algorithms
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import make_plan
from cufa.problem.mask import Band
from cufa.problem.problem import Problem
from cufa.problem.work import WORK
from cufa.run.cpu import run as cpu
from cufa.run.emulate.calls import Execution, run_plan

FORWARD, FA2 = OPERATIONS["forward"], KERNELS["fa2_forward"]
H200 = Device.typical("sm_90")

# --- A mask and an operation ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stretched(Band):
    """As many keys before the diagonal as there are queries for each key, and ``more``."""

    more: int = 0

    def edges(self, seqlen_q, seqlen_k):
        return seqlen_k - seqlen_q - seqlen_q // seqlen_k - self.more, seqlen_k - seqlen_q


def mean_of_the_seen(problem, v):
    """The mean of the values that a query sees, in float32; 0 where it sees none."""
    seen = problem.mask.dense(problem.seqlen_q, problem.seqlen_k).astype(np.float32)
    weights = seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)
    return weights @ np.repeat(v.astype(np.float32), problem.group_size, axis=1)


def run_on_cpu(plan, given):
    given["out"][...] = mean_of_the_seen(plan.problem, given["v"])


MEAN = changed(
    FORWARD,
    name="mean",
    title="Mean of what is seen",
    # Scores of a scale of 0 are equal, and so are the weights.
    scalars=lambda plan, given: {**FORWARD.scalars(plan, given), **softmax_scalars(0.0, None)},
)
MEAN_KERNEL = changed(FA2, name="mean", operation="mean", algorithm="mean")

# ----------------------------------------------------------------------------------------------------------

MASK = Stretched(more=30)


def test_the_mask_through_plan_cpu_path_executor_and_reference():
    q, k, v = make_inputs(1, 4, 2, 190, 170, 64, "bfloat16")
    out, lse = cufa.flash_attention(q, k, v, mask=MASK, return_lse=True, device="cpu")
    assert_attention(out, lse, q, k, v, mask=MASK)
    done = cufa.emulate(q, k, v, mask=MASK)
    assert_attention(done.out, done.lse, q, k, v, mask=MASK)
    assert_tiles(done.plan, done.records)
    plan = cufa.plan((1, 4, 2000, 64), mask=MASK, device="sm_90")
    assert plan.problem.mask_kind == "band" and plan.schedule.skipped > 0
    assert "float16, stretched more 30" in str(plan)
    assert Problem.from_json(plan.problem.as_json()) == plan.problem


@pytest.mark.parametrize("mask", [Band(), Band(right=0), MASK], ids=["full", "causal", "toy"])
def test_the_operation_through_plan_cpu_path_and_executor(monkeypatch, mask):
    monkeypatch.setitem(OPERATIONS, MEAN.name, MEAN)
    monkeypatch.setitem(WORK, MEAN.name, WORK["forward"])
    monkeypatch.setitem(cpu.RUNS, MEAN.name, run_on_cpu)
    monkeypatch.setitem(KERNELS, MEAN_KERNEL.name, MEAN_KERNEL)
    inputs = make_inputs(1, 4, 2, 190, 170, 64, "bfloat16")
    problem = Problem(1, 4, 2, 190, 170, 64, "bfloat16", mask, operation="mean")
    assert algorithms("mean") == ("auto", "mean")
    results = []
    for device in (None, H200):
        plan, given = make_plan(problem, device), forward_operands(*inputs)
        assert (plan.operation, plan.spec) == (MEAN, MEAN_KERNEL) and "mean" in str(plan)
        if device is None:
            cpu.run_on_cpu(plan, given)
        else:
            assert not run_plan(plan, given, Execution("checked")).findings
        results.append(given["out"].astype(np.float32))
    np.testing.assert_allclose(results[1], results[0], rtol=2.0**-7, atol=2.0**-8)
