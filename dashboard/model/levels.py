"""Bytes that a kernel moves at each level of memory, and what each level's ceiling makes of them."""

from __future__ import annotations

import dataclasses

from cufa.dashboard.model.subject import Subject
from cufa.measure import memory_rates, traffic
from cufa.measure.limits import Limits
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Level:
    """One level."""

    name: str
    bytes: int
    ceiling: float | None
    """Bytes per second; None: not measured on such a card."""
    source: str
    """Where the bytes come from."""

    @property
    def seconds(self) -> float | None:
        """At the ceiling, were it the only limit."""
        return None if self.ceiling is None else self.bytes / self.ceiling

    def intensity(self, problem: Problem) -> float:
        """Useful FLOP per byte."""
        return problem.flops / self.bytes


def levels_of(subject: Subject, limits: Limits, device: str) -> list[Level]:
    """Device memory always; the caches where the kernel's traffic is derived. Raises ValueError for damaged records."""
    p, spec, config = subject.problem, subject.spec, subject.config
    memory = max(limits.copy_bytes, limits.read_bytes)
    found = [Level("device memory", p.io_bytes, memory, "every operand once: the least")]
    if spec is None or config is None or not config.num_warps:
        return found
    rates = memory_rates.load(device)
    l2 = traffic.l2_traffic(p, spec, config)
    if l2 is not None:
        ceiling = None if rates is None else rates.l2_bytes
        found.append(Level("L2 cache", l2.total, ceiling, "asked for by the tiles"))
    shared = traffic.shared_bytes(p, spec, config)
    if shared is not None:
        ceiling = None if rates is None else rates.shared_bytes
        found.append(Level("shared memory", shared, ceiling, "tiles written, fragments read"))
    return found
