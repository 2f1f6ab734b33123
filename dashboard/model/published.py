"""Figures that others published and many people know, to stand beside what is measured here."""

from __future__ import annotations

import dataclasses

from cufa.bench.runner import Contender
from cufa.bench.suites import Case, contenders, make
from cufa.kernels import KERNELS, TileConfig

#: The machine and code of the first two tables.
TRITON_A10G = "Triton tutorial kernels on an A10G, float32"
A10 = "a FlashAttention-1 kernel on an A10 (600 GB/s)"


@dataclasses.dataclass(frozen=True)
class VersionPoint:
    """FA1 to FA2, causal, head dim 64, batch 2, 4 heads."""

    seqlen: int
    fa1_ms: float
    fa2_ms: float
    speedup: float
    """As published; rounded times divide to nearly the same."""


VERSIONS = (
    VersionPoint(512, 0.097, 0.092, 1.06),
    VersionPoint(1024, 0.231, 0.182, 1.27),
    VersionPoint(2048, 0.660, 0.394, 1.68),
    VersionPoint(4096, 2.347, 1.378, 1.70),
)

#: The winner first; only the order was published.
BLOCK_WINNER = (64, 64, 4)
BLOCK_LOSERS = ((128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8))


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


def version_cases(on_gpu: bool) -> tuple[Case, ...]:
    """The first table, to be measured here: in float16 on a GPU, as FA1 is made for it."""
    dtype = "float16" if on_gpu else "float32"
    return tuple((make(2, 4, x.seqlen, 64, dtype, True), contenders("fa1", "fa2")) for x in VERSIONS)


def block_cases(on_gpu: bool) -> tuple[Case, ...]:
    """The block sweep: the tilings of FA1 that are built, or the published tiles in the CPU path."""
    problem = make(2, 8, 1024, 64, "float16" if on_gpu else "float32", False)
    if on_gpu:
        spec = next(s for s in KERNELS.values() if s.algorithm == "fa1")
        configs = tuple(c for c in spec.configs if c.fits(64))
    else:
        sizes = dict.fromkeys((q, kv) for q, kv, _ in (BLOCK_WINNER, *BLOCK_LOSERS))
        configs = tuple(TileConfig(q, kv, num_warps=0) for q, kv in sizes)
    return ((problem, tuple(Contender("fa1", c) for c in configs)),)


def traffic_cases(on_gpu: bool) -> tuple[Case, ...]:
    """The third table."""
    dtype = "float16" if on_gpu else "float32"
    return tuple(
        (make(x.batch, x.heads, x.seqlen, 64, dtype, False), contenders("fa1", "fa2")) for x in TRAFFIC
    )
