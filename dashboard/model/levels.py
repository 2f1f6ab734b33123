"""Bytes that a kernel moves at each level of memory, and the resulting minimum times."""

from __future__ import annotations

import dataclasses

from cufa.dashboard.model.subject import Subject
from cufa.measure import memory_rates
from cufa.measure.costs import cost_on
from cufa.measure.limits import Limits
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Level:
    """The traffic of one memory level."""

    name: str
    bytes: int
    ceiling: float | None
    """Bytes per second; None: not measured on this model of card."""
    source: str
    """How the bytes are counted."""

    @property
    def seconds(self) -> float | None:
        """Minimum time at the ceiling of this level alone."""
        return None if self.ceiling is None else self.bytes / self.ceiling

    def intensity(self, problem: Problem) -> float:
        """Useful FLOP per byte."""
        return problem.flops / self.bytes


def levels_of(subject: Subject, limits: Limits, device: str) -> list[Level]:
    """Device memory, and the caches if the kernel's counters are recorded.

    Raises ValueError for damaged records.
    """
    p, spec, config = subject.problem, subject.spec, subject.config
    levels = [Level("device memory", p.io_bytes, limits.read_bytes, "every operand once: the minimum")]
    if spec is None or config is None or not config.num_warps:
        return levels
    rates = memory_rates.load(device)
    cost = cost_on(p, spec, config)
    if cost is None:
        return levels
    l2_rate, shared_rate = (None, None) if rates is None else (rates.l2_bytes, rates.shared_bytes)
    levels.append(Level("L2 cache", cost.l2, l2_rate, "requested by the tiles"))
    if cost.shared:
        levels.append(Level("shared memory", cost.shared, shared_rate, "tiles written, operands read"))
    return levels
