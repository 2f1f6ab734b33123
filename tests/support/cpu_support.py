"""What tests of the CPU path share: small tiles, one run of them, and the bound on its error."""

from __future__ import annotations

import warnings

import numpy as np
from support import assert_attention, poisoned_like

from cufa.kernels import TileConfig
from cufa.plan.candidates import algorithms
from cufa.plan.planner import Plan, make_plan
from cufa.problem.options import resolve_mask
from cufa.problem.problem import Problem, default_scale
from cufa.run.cpu import forward as cpu

ALGORITHMS = sorted(algorithms()[1:])
TILED = [a for a in ALGORITHMS if a != "naive"]

#: Small tiles, so that small shapes have edges on every side. Rows and columns differ to tell them apart.
SMALL = TileConfig(block_q=16, block_kv=24, num_warps=0)


def plan_for(q, k, algorithm="fa2", causal=False, mask=None, softcap=None, scale=None, config=SMALL) -> Plan:
    batch, heads, seqlen_q, head_dim = q.shape
    scale = default_scale(head_dim) if scale is None else scale
    shape, mask = (batch, heads, k.shape[1], seqlen_q, k.shape[2], head_dim), resolve_mask(causal, None, mask)
    problem = Problem(*shape, str(q.dtype), mask, scale, softcap)
    return make_plan(problem, None, algorithm, config=config)


def attend(q, k, v, *, observer=None, num_threads=None, **options):
    """(out, lse) of one run. What is not written shows as NaN; a warning fails the test."""
    out, lse = poisoned_like(q), np.full(q.shape[:3], np.nan, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.run(plan_for(q, k, **options), q, k, v, out, lse, observer=observer, num_threads=num_threads)
    return out, lse


def check(q, k, v, algorithm, causal=False, *, mask=None, softcap=None, **options) -> None:
    scores = {"causal": causal, "mask": mask, "softcap": softcap}
    out, lse = attend(q, k, v, algorithm=algorithm, **scores, **options)
    assert_attention(out, lse, q, k, v, **scores)
