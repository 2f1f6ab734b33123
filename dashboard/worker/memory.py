"""Whether a problem fits in this machine's memory: checked before the start of a run, and again by its worker."""

from __future__ import annotations

import math
from pathlib import Path

from cufa.problem.problem import Problem

#: Share of the free memory for inputs, output and intermediates of a CPU run.
_SHARE = 0.7
#: Peak number of copies of the tensors in a CPU run: float32 originals, conversions, float64 samples.
_COPIES = 2.5


def shortfall(problem: Problem) -> str:
    """Missing memory for a CPU run of the problem, in words; "" if the problem fits. (A GPU reports this itself.)"""
    available = _available()
    if available is None:
        return ""
    elements = sum(math.prod(shape) for shape in problem.shapes)
    wanted = int(_COPIES * max(problem.itemsize, 4) * elements)
    if wanted <= _SHARE * available:
        return ""
    return f"needs about {wanted / 2**30:,.0f} GiB, {available / 2**30:,.1f} GiB are free"


def _available() -> int | None:
    """Free bytes; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)
