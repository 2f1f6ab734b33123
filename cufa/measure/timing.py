"""Timing functions side by side: device events on a GPU, the clock on a CPU.

Contenders take turns within each round, in alternating order, so that a GPU that lowers its clocks under load
does so for all of them. Every sample is kept. (The other regime is :mod:`cufa.measure.sustained`.)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .regimes import Regime

Run = Callable[[], object]
Watch = Callable[[Mapping[str, Sequence[float]]], None]
"""Takes the samples so far, seconds by contender."""

MIN_ROUNDS, MAX_ROUNDS = 10, 200

#: Written between repeats so that inputs come from device memory: several times the L2 cache of any GPU. It
#: also keeps the GPU busy while the host enqueues the next call.
_FLUSH_BYTES = 256 << 20

#: As often at most, for calls that the host takes long to enqueue: 1.4 ms on an H200.
_MAX_FLUSHES = 16


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """What is kept of samples, in seconds."""

    count: int
    p10: float
    p50: float
    p90: float
    low: float
    """With ``high`` the 95% interval of the median."""
    high: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one contender, in seconds, in the order they were taken; or their quantiles only."""

    samples: tuple[float, ...]
    """Empty where only the quantiles were kept."""
    regime: Regime = Regime.IN_TURNS
    kept: Quantiles | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any], regime: Regime) -> Timing:
        """Of a measurement row as JSON."""
        if "samples_ns" in row:
            return cls(tuple(np.array(row["samples_ns"]) * 1e-9), regime)
        times = (1e-9 * row[name] for name in ("p10_ns", "p50_ns", "p90_ns", "low_ns", "high_ns"))
        return cls((), regime, Quantiles(int(row["n"]), *times))

    @property
    def count(self) -> int:
        """Samples taken."""
        return self.kept.count if self.kept else len(self.samples)

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.samples, q))

    @functools.cached_property
    def _known(self) -> tuple[float, ...]:
        """All three at once: pages ask for those of a thousand rows, and a call of NumPy takes longer than its work."""
        if self.kept:
            return self.kept.p10, self.kept.p50, self.kept.p90
        return tuple(float(value) for value in np.percentile(self.samples, (10, 50, 90)))

    @property
    def p10(self) -> float:
        return self._known[0]

    @property
    def p50(self) -> float:
        return self._known[1]

    @property
    def p90(self) -> float:
        return self._known[2]

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


RESAMPLES = 1000
"""Of a bootstrap."""


@functools.lru_cache(4096)  # tables and pages name the same rows again and again
def speedup(slow: Timing, fast: Timing, resamples: int = RESAMPLES, seed: int = 0) -> Ratio:
    """``slow.p50 / fast.p50`` with a percentile bootstrap.

    Rounds are resampled, the same ones for both where they took turns: drift is common to them. Timings that
    were not taken together are resampled apart.

    Raises ValueError for timings of different regimes: their ratio says nothing about the contenders.
    """
    if slow.regime is not fast.regime:
        raise ValueError(f"a time measured {slow.regime} is not compared with one measured {fast.regime}")
    if not (slow.samples and fast.samples):
        return _from_intervals(slow, fast)
    a, b = np.array(slow.samples), np.array(fast.samples)
    rng = np.random.default_rng(seed)
    pick_a = rng.integers(len(a), size=(resamples, len(a)))
    together = len(a) == len(b) and slow.regime is Regime.IN_TURNS
    pick_b = pick_a if together else rng.integers(len(b), size=(resamples, len(b)))
    ratios = np.median(a[pick_a], axis=1) / np.median(b[pick_b], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high))


def _from_intervals(slow: Timing, fast: Timing) -> Ratio:
    """Of two independent medians: relative half widths add as squares."""
    (slow_low, slow_high), (fast_low, fast_high) = slow.median_interval, fast.median_interval
    value = slow.p50 / fast.p50
    down = math.hypot(math.log(slow.p50 / slow_low), math.log(fast_high / fast.p50))
    up = math.hypot(math.log(slow_high / slow.p50), math.log(fast.p50 / fast_low))
    return Ratio(value, value * math.exp(-down), value * math.exp(up))


def measure(
    contenders: Mapping[str, Run], *, on_gpu: bool, seconds: float = 0.5, watch: Watch | None = None
) -> dict[str, Timing]:
    """Time every contender, together for about ``seconds``, after a warm-up of each.

    On a GPU the functions must launch on CuPy's current stream; L2 is cold at each start. ``watch`` is called
    between rounds, with all samples so far.
    """
    for run in contenders.values():  # compiles, allocates, raises clocks
        run()
        run()
    timer = _GpuTimer() if on_gpu else _CpuTimer()
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    started, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < seconds):
        order = names if rounds % 2 == 0 else names[::-1]
        for name, sample in zip(order, timer.round([contenders[name] for name in order]), strict=True):
            samples[name].append(sample)
        rounds += 1
        if watch is not None:
            watch(samples)
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


class _CpuTimer:
    def round(self, runs: Sequence[Run]) -> list[float]:
        taken = []
        for run in runs:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        return taken


class _GpuTimer:
    """A sample counts if the GPU had not come to the call before the host had enqueued all of it: else it would be the
    host's time. Where it had, the call is timed again behind more flushes, as many as are enough from then on."""

    def __init__(self, cupy: Any = None) -> None:
        self._cupy = cupy or importlib.import_module("cupy")
        runtime = self._cupy.cuda.runtime
        l2 = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
        self._flush = self._cupy.empty(max(_FLUSH_BYTES, 4 * l2), self._cupy.uint8)
        self._flushes: dict[Run, int] = {}

    def round(self, runs: Sequence[Run]) -> list[float]:
        events = []
        self._flush_once()  # the host gains a lead, and keeps it
        for run in runs:
            start, stop, late = self._enqueue(run)
            while late and self._flushes[run] < _MAX_FLUSHES:
                self._flushes[run] += 1
                start, stop, late = self._enqueue(run)
            events.append((start, stop))
        self._cupy.cuda.get_current_stream().synchronize()
        return [self._cupy.cuda.get_elapsed_time(start, stop) * 1e-3 for start, stop in events]

    def _flush_once(self) -> None:
        self._flush.data.memset_async(0, self._flush.nbytes)

    def _enqueue(self, run: Run) -> tuple[Any, Any, bool]:
        """The events around a call, and whether the GPU came to it too early."""
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for _ in range(self._flushes.setdefault(run, 1)):
            self._flush_once()
        start.record()
        run()
        late = bool(start.done)
        stop.record()
        return start, stop, late


def host_time(call: Run, synchronize: Run, calls: int = 2000, batch: int = 50) -> Timing:
    """Host seconds of one asynchronous call: batches of calls are timed, and the queue drained between them,
    so that a full launch queue never blocks the host. One sample per batch."""
    for _ in range(batch):
        call()
    samples: list[float] = []
    for _ in range(max(1, calls // batch)):
        synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - start) / batch)
    synchronize()
    return Timing(tuple(samples))


def as_nanoseconds(timing: Timing) -> list[int]:
    """Samples for a record: whole nanoseconds."""
    ns: npt.NDArray[np.int64] = np.rint(np.array(timing.samples) * 1e9).astype(np.int64)
    return [int(n) for n in ns]
