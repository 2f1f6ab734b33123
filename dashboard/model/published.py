"""Published figures, for comparison with measurements of cufa."""

from __future__ import annotations

import dataclasses

from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.measure.cases import Case, Contender, contenders
from cufa.measure.suites import BLOCK_LOSERS, BLOCK_WINNER, SUITES, make
from cufa.problem.mask import CAUSAL

#: Machine and code of the published tables.
TRITON_A10G = "Triton tutorial kernels on an A10G, float32"
A10 = "a FlashAttention-1 kernel on an A10 (600 GB/s)"


@dataclasses.dataclass(frozen=True)
class VersionPoint:
    """FA1 to FA2 under :data:`VERSIONS_MASK`, head dim 64, batch 2, 4 heads."""

    seqlen: int
    fa1_ms: float
    fa2_ms: float
    speedup: float
    """The published figure; the ratio of the rounded times is nearly equal."""


VERSIONS_MASK = CAUSAL
VERSIONS_DTYPE = "float32"

VERSIONS = (
    VersionPoint(512, 0.097, 0.092, 1.06),
    VersionPoint(1024, 0.231, 0.182, 1.27),
    VersionPoint(2048, 0.660, 0.394, 1.68),
    VersionPoint(4096, 2.347, 1.378, 1.70),
)


@dataclasses.dataclass(frozen=True)
class TrafficPoint:
    """Effective traffic of FA1: q, k, v and o once, over time."""

    batch: int
    heads: int
    seqlen: int
    gbytes: float


TRAFFIC = (
    TrafficPoint(1, 1, 256, 19.5),
    TrafficPoint(1, 1, 1024, 29.2),
    TrafficPoint(2, 4, 256, 132.3),
    TrafficPoint(2, 4, 1024, 109.3),
)
TRAFFIC_PEAK = 600.0
"""GB/s of that card's memory."""


def version_cases(device: Device | None) -> tuple[Case, ...]:
    """The first table, to be measured on a device (None: the CPU): the suite's shapes, in the published type."""
    wanted = {x.seqlen: x for x in VERSIONS}
    result = []
    for case in SUITES["versions"].cases(device):
        both = tuple(c for c in case.contenders if c.label in ("fa1", "fa2"))
        same = case.problem.heads == 4 and case.problem.dtype == VERSIONS_DTYPE
        if same and len(both) == 2 and case.problem.seqlen_k in wanted:
            result.append(dataclasses.replace(case, contenders=both))
    return tuple(result)


def block_cases(device: Device | None) -> tuple[Case, ...]:
    """The block sweep: the tilings of FA1 that fit the GPU, in the published type, or those tiles in the CPU path."""
    if device is not None:
        cases = SUITES["fa1-blocks"].cases(device)
        return tuple(x for x in cases if x.problem.dtype == "float32" and x.problem.seqlen_k == 1024)
    sizes = dict.fromkeys((q, kv) for q, kv, _ in (BLOCK_WINNER, *BLOCK_LOSERS))
    configs = (TileConfig(q, kv, num_warps=0) for q, kv in sizes)
    return (Case(make(2, 8, 1024, 64, "float32"), tuple(Contender("fa1", c) for c in configs)),)


def traffic_cases(device: Device | None) -> tuple[Case, ...]:
    """The third table."""
    both = contenders("fa1", "fa2")
    return tuple(Case(make(x.batch, x.heads, x.seqlen, 64, "float32"), both) for x in TRAFFIC)
