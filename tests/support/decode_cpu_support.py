"""What tests of decoding in NumPy share: small tiles, one run of them."""

from __future__ import annotations

import warnings

from decode_support import Case, prepare

from cufa.kernels import TileConfig
from cufa.plan.planner import make_plan
from cufa.run.cpu import decode as cpu_decode

#: Small tiles, so that small caches have edges.
SMALL = TileConfig(block_q=4, block_kv=8, num_warps=0)
PAGE_SIZES = (0, 1, 3, 16, 64, 128, 256)


def planned(case: Case, *, schedule="fixed", num_splits=None, config=SMALL, layout="bhsd"):
    """(plan, operands) with poisoned results; the caches are copies."""
    problem, operands = prepare(case, layout)
    return make_plan(problem, None, schedule, config, num_splits=num_splits), operands


def decode(case: Case, *, num_threads=1, **how):
    """(out, lse) in "bhsd". A warning fails the test."""
    plan, operands = planned(case, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_decode.run(plan, operands, num_threads=num_threads)
    return operands["out"], operands["lse"]


def check(case: Case, **how) -> None:
    case.check(*decode(case, **how))
