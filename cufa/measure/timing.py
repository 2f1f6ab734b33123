"""Times of contenders and their ratios. :mod:`cufa.measure.measuring` takes the times."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .power import Power
from .regimes import Regime

Run = Callable[[], object]
Watch = Callable[[Mapping[str, Sequence[float]]], None]
"""A function that is called with the samples so far, in seconds, by contender."""

RESAMPLES = 1000
"""Resamples of a bootstrap."""
#: If more than this share of the batches came late, the host sets the time (:attr:`Load.host_bound`).
_STARVED = 0.05


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Quantiles of samples, in seconds."""

    count: int
    p10: float
    p50: float
    p90: float
    low: float
    """``low`` and ``high``: the 95% interval of the median."""
    high: float


@dataclasses.dataclass(frozen=True)
class Load:
    """The load while a contender was measured alone."""

    calls: int
    sets: int
    """Sets of inputs and outputs that the calls cycled through."""
    seconds: float
    starved: float
    """Share of late batches: the preceding batch had ended before the host enqueued them."""
    power: Power

    @property
    def host_bound(self) -> bool:
        """Whether the host's launches, not the kernel, set the time."""
        return self.starved > _STARVED


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one contender, in seconds, in the order of measuring; or their quantiles only (``kept``)."""

    samples: tuple[float, ...]
    """Empty where only the quantiles were kept."""
    regime: Regime = Regime.IN_TURNS
    kept: Quantiles | None = None
    load: Load | None = dataclasses.field(default=None, compare=False)
    """None where contenders took turns."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any], regime: Regime) -> Timing:
        """The timing of a measurement row."""
        if "samples_ns" in row:
            return cls(tuple(np.array(row["samples_ns"]) * 1e-9), regime)
        times = (1e-9 * row[name] for name in ("p10_ns", "p50_ns", "p90_ns", "low_ns", "high_ns"))
        return cls((), regime, Quantiles(int(row["n"]), *times))

    @property
    def count(self) -> int:
        """Samples taken."""
        return self.kept.count if self.kept else len(self.samples)

    @functools.cached_property
    def _percentiles(self) -> tuple[float, ...]:
        """10th, 50th and 90th percentile, by one NumPy call: pages read a thousand rows, and each call has overhead."""
        if self.kept:
            return self.kept.p10, self.kept.p50, self.kept.p90
        return tuple(float(value) for value in np.percentile(self.samples, (10, 50, 90)))

    @property
    def p10(self) -> float:
        return self._percentiles[0]

    @property
    def p50(self) -> float:
        return self._percentiles[1]

    @property
    def p90(self) -> float:
        return self._percentiles[2]

    @functools.cached_property
    def median_interval(self) -> tuple[float, float]:
        """95% confidence interval of the median, by a percentile bootstrap."""
        if self.kept:
            return self.kept.low, self.kept.high
        x, rng = np.array(self.samples), np.random.default_rng(0)
        medians = np.median(x[rng.integers(len(x), size=(RESAMPLES, len(x)))], axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster: median of one over median of another, with a 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f}–{self.high:.2f})"


@functools.lru_cache(4096)  # tables and pages ask for the same pairs again
def speedup(slow: Timing, fast: Timing) -> Ratio:
    """``slow.p50 / fast.p50`` with a percentile bootstrap.

    If the contenders took turns, both are resampled by the same rounds, because a round's drift is common to both. Else
    they are resampled independently.

    Raises ValueError for timings of different regimes: their ratio says nothing about the contenders.
    """
    if slow.regime is not fast.regime:
        raise ValueError(f"a time measured {slow.regime} is not compared with one measured {fast.regime}")
    if not (slow.samples and fast.samples):
        return _from_intervals(slow, fast)
    a, b = np.array(slow.samples), np.array(fast.samples)
    rng = np.random.default_rng(0)
    pick_a = rng.integers(len(a), size=(RESAMPLES, len(a)))
    together = len(a) == len(b) and slow.regime is Regime.IN_TURNS
    pick_b = pick_a if together else rng.integers(len(b), size=(RESAMPLES, len(b)))
    ratios = np.median(a[pick_a], axis=1) / np.median(b[pick_b], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high))


def _from_intervals(slow: Timing, fast: Timing) -> Ratio:
    """The ratio of two independent medians: relative half widths add as squares."""
    (slow_low, slow_high), (fast_low, fast_high) = slow.median_interval, fast.median_interval
    value = slow.p50 / fast.p50
    down = math.hypot(math.log(slow.p50 / slow_low), math.log(fast_high / fast.p50))
    up = math.hypot(math.log(slow_high / slow.p50), math.log(fast.p50 / fast_low))
    return Ratio(value, value * math.exp(-down), value * math.exp(up))


def as_nanoseconds(timing: Timing) -> list[int]:
    """Samples for a record: whole nanoseconds."""
    return [int(n) for n in np.rint(np.array(timing.samples) * 1e9)]
