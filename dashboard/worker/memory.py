"""Whether a problem fits this machine's memory: asked before a run is started, and again by its worker."""

from __future__ import annotations

import math
from pathlib import Path

from cufa.problem.problem import Problem

#: Of the memory that is free, what inputs, output and intermediates of a CPU run may take.
_SHARE = 0.7
#: Copies of the tensors that a CPU run holds at its peak: float32 originals, conversions, float64 samples.
_COPIES = 2.5


def shortfall(problem: Problem) -> str:
    """What a run of the problem on the CPU lacks, in words; "" when it fits. (A GPU says so itself.)"""
    available = _available()
    if available is None:
        return ""
    elements = sum(math.prod(shape) for shape in problem.shapes)
    wanted = int(_COPIES * max(problem.itemsize, 4) * elements)
    if wanted <= _SHARE * available:
        return ""
    return f"needs about {wanted / 2**30:,.0f} GiB, {available / 2**30:,.1f} GiB are free"


def _available() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)
