"""What a parallel call is expected to cost, for any number of GPUs and any link: arithmetic over its schedule."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ..problem.checks import check_choice
from ..problem.element import ELEMENTS
from ..problem.mask import Mask
from ..problem.options import resolve_mask
from .placement import placed
from .schedule import AHEAD, Schedule
from .schemes import make_schedule
from .slices import Whole

FORWARD_FLOPS, BACKWARD_FLOPS = 620e12, 520e12
"""FLOP/s of an H100 or H200 with 16-bit elements and head dim 128, sustained; pass your own GPU's as ``rate``."""

LINKS = {"nvlink4": (397e9, 6e-6), "pcie5": (50e9, 10e-6), "infiniband400": (48e9, 15e-6)}
"""Bytes per second one way, and seconds of an empty transfer. nvlink4 was measured between two H100s of one host
(memcpyPeerAsync); the others are nominal."""

_SLOWER = {False: 1.08, True: 1.06}
"""By whether it is a backward: time of a rank's kernels, if keys or queries travel to the rank, over the time of one
call. So all cases in NOTES.md but one on two H100s and one on two H200s are predicted within 10%."""

_LAUNCH_S = 8e-6
"""Added for each kernel call: its launch, first loads and last blocks."""

_RECEIVED = {("q", False): 1, ("q", True): 3, ("kv", False): 2, ("kv", True): 2}
"""Number of arrays that travel to a step, by (operand, is it a backward): q (and dout, out); k and v."""
_RETURNED = {("q", False): 1, ("q", True): 1, ("kv", False): 0, ("kv", True): 2}
"""Number of arrays that travel back: out or dq; dk and dv. Shares of sums are float32."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of a rank, in seconds from the beginning of the call."""

    rank: int
    step: int
    begin: float
    """When its kernels begin."""
    compute: float
    transfer: float
    """Time of the transfers from other ranks that the step needs."""
    arrived: float
    """When these transfers have ended."""
    exposed: float
    """Time that the rank waited for these transfers, or for results that travel back."""
    bytes: int
    """Bytes received."""

    @property
    def overlapped(self) -> float:
        return max(self.transfer - self.exposed, 0.0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The result of :func:`plan`. Prints as a table."""

    schedule: Schedule
    steps: tuple[StepCost, ...]
    seconds: float
    alone: float
    """Seconds of one GPU for a P-th of the work."""
    rate: float
    link: tuple[float, float]
    backward: bool

    @property
    def efficiency(self) -> float:
        """Share of one GPU's own rate on the same work per GPU."""
        return self.alone / self.seconds if self.seconds else 1.0

    @property
    def received(self) -> int:
        """The most bytes that a rank receives."""
        return max(sum(x.bytes for x in self.steps if x.rank == rank) for rank in range(self.schedule.ranks))

    def split(self, rank: int) -> dict[str, float]:
        """A rank's time: compute, exposed communication, overlapped communication (within compute), idle."""
        mine = [x for x in self.steps if x.rank == rank]
        compute, exposed = sum(x.compute for x in mine), sum(x.exposed for x in mine)
        overlapped = sum(x.overlapped for x in mine)
        return {
            "compute": compute, "exposed": exposed, "overlapped": overlapped,
            "idle": max(self.seconds - compute - exposed, 0.0),
        }  # fmt: skip

    def __str__(self) -> str:
        s, (bandwidth, latency) = self.schedule, self.link
        lines = [
            f"predicted  {'backward' if self.backward else 'forward'}, {s.scheme} on {s.ranks} ranks: "
            f"{self.seconds * 1e3:.3f} ms, {self.efficiency:.1%} of one GPU's rate; no measurement",
            f"model      {self.rate / 1e12:g} TFLOP/s a GPU, link {bandwidth / 1e9:g} GB/s + {latency * 1e6:g} µs",
            f"received   {self.received / 2**20:,.1f} MiB a rank at most",
        ]
        for rank in range(min(s.ranks, 8)):
            parts = "   ".join(f"{name} {x * 1e3:.3f}" for name, x in self.split(rank).items())
            lines.append(f"rank {rank}     {parts} ms")
        if s.ranks > 8:
            lines.append(f"…          {s.ranks - 8} more ranks")
        return "\n".join(lines)


def plan(
    q: tuple[int, int, int, int], k: tuple[int, int, int, int] | None = None, *, ranks: int,
    placement: Any = "contiguous", scheme: str = "auto", causal: bool = False,
    window: tuple[int | None, int | None] | None = None, mask: Mask | None = None, dtype: str = "bfloat16",
    backward: bool = False, link: Any = "nvlink4", rate: float | None = None,
) -> Prediction:  # fmt: skip
    """Predicts volume, overlap and time of :func:`flash_attention` or its backward. Needs no GPU and runs nothing.

    Parameters
    ----------
    q, k : shapes (batch, heads, seqlen, head_dim) and (batch, kv_heads, seqlen, head_dim)
        Of the whole arrays. k defaults to q.
    ranks : int
        GPUs.
    link : "nvlink4", "pcie5", "infiniband400", or (bytes per second, seconds)
        Between any two ranks, one way, while all ranks send.
    rate : float, optional
        FLOP/s of one GPU for this kind of problem (forward 4·head_dim per visible score, backward 10·head_dim), from
        `cufa bench`. Default: an H100's.
    placement, scheme, causal, window, mask
        As for :func:`flash_attention`.

    Raises ValueError as :func:`flash_attention`.
    """
    k = q if k is None else k
    batch, heads, seqlen_q, head_dim = q
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be 1 or more")
    queries, keys = placed(placement, seqlen_q, ranks), placed(placement, k[2], ranks)
    if isinstance(link, str):
        check_choice("link", link, {name: repr(name) for name in LINKS})
        link = LINKS[link]
    counts = [(heads, k[1])] * ranks
    if queries.kind == "heads":
        group, ends = heads // max(k[1], 1), [r * k[1] // ranks for r in range(ranks + 1)]
        counts = [((end - begin) * group, end - begin) for begin, end in itertools.pairwise(ends)]
    whole = Whole.of(resolve_mask(causal, window, mask), seqlen_q, k[2])
    schedule = make_schedule(scheme, whole, queries, keys, tuple(counts), backward)
    rate = rate or (BACKWARD_FLOPS if backward else FORWARD_FLOPS)
    size, flops = ELEMENTS[dtype].itemsize * head_dim * batch, (10 if backward else 4) * head_dim * batch
    float32 = schedule.summed if backward and dtype in ("float16", "bfloat16") else ()
    returned_sizes = {"q": size * (1 + ("dq" in float32)), "kv": size * (1 + ("dk" in float32))}
    steps, end = [], 0.0
    for rank in range(ranks):
        mine, until = _timeline(schedule, rank, size, returned_sizes, flops / rate, link, backward)
        steps += mine
        end = max(end, until)
    scores = whole.visible((0, seqlen_q), (0, k[2])) * heads
    return Prediction(
        schedule, tuple(steps), end, scores * flops / rate / ranks + _LAUNCH_S, rate, link, backward
    )


def _timeline(
    schedule: Schedule, rank: int, size: int, returned_sizes: dict[str, int], seconds_per_score: float,
    link: tuple[float, float], backward: bool,
) -> tuple[list[StepCost], float]:  # fmt: skip
    """A rank's steps. ``size``: bytes of a row; ``returned_sizes``: of rows that travel back. A step's arrays begin to
    travel when the step :data:`AHEAD` steps earlier begins, or at the begin of the call. Results travel back under
    the next step."""
    bandwidth, latency = link
    arrivals, costs = list(schedule.arrivals(rank)), []
    now = linked = back_end = 0.0
    begins = [0.0] * AHEAD
    for at, work, step in schedule.steps(rank):
        here = [x for x in arrivals if x.step == at]
        received = sum(_RECEIVED[x.what, backward] * x.rows * size for x in here)
        transfer = received / bandwidth + latency if received else 0.0
        linked = max(linked, begins[at]) + transfer
        begin = max(now, linked)
        exposed = begin - now
        scores = step.scores * (work.heads[1] - work.heads[0])
        slower = _SLOWER[backward] if arrivals else 1.0
        compute = scores * seconds_per_score * slower + _LAUNCH_S * len(step.calls)
        returned = sum(_RETURNED[x.what, backward] * x.rows * returned_sizes[x.what] for x in here)
        begins.append(begin)
        now = begin + compute
        if returned:  # as much comes in as goes out
            back_end = max(back_end, now) + returned / bandwidth + latency
        costs.append(StepCost(rank, at, begin, compute, transfer, linked, exposed, received + returned))
    if back_end > now and costs:
        costs[-1] = dataclasses.replace(costs[-1], exposed=costs[-1].exposed + back_end - now)
        now = back_end
    return costs, now
