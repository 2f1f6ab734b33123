"""FA3's pipeline on a CPU: it runs on from item to item, through rings that its warpgroups share.

Few persistent blocks, many items, any order of warps and copies: no deadlock, right answers. A deadlock is
found in every mode of execution, races in checked mode.
"""

from __future__ import annotations

import random

import pytest
from sampling import of_today
from support import (
    assert_attention,
    forward_operands,
    make_inputs,
    make_problem,
    plan_with_blocks,
    stalling_lengths,
)

from cufa.kernels import KERNELS
from cufa.measure.ladder import ladder
from cufa.run.emulate.calls import Execution, run_plan

SPEC = KERNELS["fa3_forward"]
CONFIGS = pytest.mark.parametrize(
    ("config", "head_dim"),
    [pytest.param(c, c.max_head_dim, id=f"{i}-d{c.max_head_dim}") for i, c in enumerate(SPEC.configs)],
)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def check(inputs, config, causal, runs):
    """Each of ``runs``, (blocks, execution), gives the same bits, and the right ones."""
    problem, outputs = make_problem(*inputs, causal), []
    for blocks, execution in runs:
        plan = plan_with_blocks(problem, config, blocks)
        run = run_plan(plan, forward_operands(*inputs), execution, trace=False)
        assert not run.findings, "\n".join(map(str, run.findings))
        outputs.append(run.out.tobytes() + run.lse.tobytes())
    assert_attention(run.out, run.lse, *inputs, causal=causal)
    assert len(set(outputs)) == 1


@pytest.mark.sampled(fixed=1, dated=1)
@MASKS
@CONFIGS
def test_what_used_to_stall(config, head_dim, causal):
    """On one block and two, whichever consumer's turn comes late."""
    lengths = stalling_lengths(config)
    for seqlen_q, seqlen_k in of_today(lengths, f"{config} {causal}", fixed=3, dated=2):
        n = lengths.index((seqlen_q, seqlen_k))
        inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, head_dim, seed=n)
        orders = [(1, "ascending"), (1, "descending"), (2, n)]
        check(inputs, config, causal, [(blocks, Execution("plain", order)) for blocks, order in orders])


@pytest.mark.sampled(fixed=1, dated=1)
@MASKS
@CONFIGS
def test_random_persistent_grids(config, head_dim, causal):
    for seed in of_today(range(6), f"{config} {causal}"):
        rng = random.Random(f"{config} {causal} {seed}")
        heads, seqlen_q, seqlen_k = rng.randint(1, 4), rng.randint(1, 520), rng.randint(1, 700)
        inputs = make_inputs(1, heads, rng.choice([1, heads]), seqlen_q, seqlen_k, head_dim, seed=seed)
        copies = rng.choice(["early", "late"])
        runs = [
            (rng.randint(1, 3), Execution("plain", order, copies))
            for order in ("ascending", "descending", seed)
        ]
        check(inputs, config, causal, runs)


@pytest.mark.sampled(fixed=1, dated=1)
@MASKS
@CONFIGS
def test_random_persistent_grids_without_races(config, head_dim, causal):
    """Fewer, in checked mode: what one item leaves behind is not what the next one reads."""
    rng = random.Random(f"checked {config} {causal}")
    for seed in range(2):
        seqlen_q, seqlen_k = rng.randint(1, 2 * config.block_q), rng.randint(1, 4 * config.block_kv)
        inputs = make_inputs(2, 2, 1, seqlen_q, seqlen_k, head_dim, seed=seed)
        check(inputs, config, causal, [(1, Execution("checked", seed))])


@CONFIGS
def test_rows_that_see_nothing_between_rows_that_do(config, head_dim):
    """Far more queries than keys: several items in a row have no tile to visit, and the next has again."""
    inputs = make_inputs(1, 3, 3, 5 * config.block_q, config.block_kv + 3, head_dim)
    runs = [(blocks, Execution("checked", order)) for blocks, order in ((1, "ascending"), (2, 3))]
    check(inputs, config, True, runs)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_step_of_the_ladder(head_dim):
    """Techniques switched off one by one: slower kernels, as right, and none that waits for ever. (Of each
    head dim's first tiling; a GPU tests all of them.)"""
    config = next(c for c in SPEC.configs if c.fits(head_dim))
    steps = list(dict.fromkeys(rung.config for rung in ladder("fa3", config)[:-1]))
    lengths = [*stalling_lengths(config)[::3], (2 * config.block_q + 5, 3 * config.block_kv + 5)]
    for step in of_today(steps, f"ladder {head_dim}"):
        for n, (seqlen_q, seqlen_k) in enumerate(lengths):
            inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, head_dim, seed=n)
            orders = [(1, "descending"), (2, n), (99, "ascending")]
            check(inputs, step, True, [(blocks, Execution("plain", order)) for blocks, order in orders])
