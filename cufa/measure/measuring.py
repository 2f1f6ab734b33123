"""Timing of contenders in turns or each alone (:class:`Regime`), on a GPU or on the CPU.

**In turns**, contenders alternate within each round, in alternating order: a GPU that lowers its clocks does so for all
of them. The L2 cache is overwritten before each call. A sample is one call.

**Alone**, each contender is warmed up and then runs back to back while its power is sampled. The host enqueues calls in
batches and stays two batches ahead of the GPU; :attr:`Load.starved` is the share of batches that came too late. Calls
cycle through enough sets of inputs and outputs (:func:`sets_wanted`) that the L2 cache holds none of them. A sample is
the average call of one batch.
"""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .power import Meter, Sampler, open_meter
from .regimes import Regime
from .timing import Load, Run, Timing, Watch

MIN_ROUNDS, MAX_ROUNDS = 10, 200
#: A flush writes at least this many bytes. It also keeps the GPU busy while the host enqueues the next call.
_FLUSH_BYTES = 256 << 20
#: Most flushes before one call, to give the host time to enqueue the call: 1.4 ms on an H200.
_MAX_FLUSHES = 16

WARM_SECONDS = 0.5
#: Time that a batch should take; most calls of a batch, as a GPU's queue of launches is finite.
_BATCH_SECONDS, _BATCH_CALLS = 10e-3, 256
#: Batches that the host is ahead.
_AHEAD = 2
#: All sets of inputs together take this many times the L2 cache; most sets.
_TIMES_L2, _MAX_SETS = 4, 64


class Lane(Protocol):
    """A queue in which calls run in order. A mark is a point in the queue."""

    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None: ...
    def is_past(self, mark: Any) -> bool: ...
    def seconds(self, first: Any, second: Any) -> float: ...
    def flush(self) -> None:
        """Overwrite the L2 cache."""


class CpuLane:
    """The CPU: a call has ended when it returns. :meth:`flush` does nothing."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None: ...

    def is_past(self, mark: float) -> bool:
        return False

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def flush(self) -> None: ...


class GpuLane:
    """CuPy's current stream; marks are events."""

    def __init__(self, cupy: Any = None) -> None:
        self._cupy = cupy or importlib.import_module("cupy")
        self._buffer: Any = None

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def is_past(self, mark: Any) -> bool:
        return bool(mark.done)

    def seconds(self, first: Any, second: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(first, second)) * 1e-3

    def flush(self) -> None:
        if self._buffer is None:
            self._buffer = self._cupy.empty(max(_FLUSH_BYTES, 4 * self.l2_bytes), self._cupy.uint8)
        self._buffer.data.memset_async(0, self._buffer.nbytes)

    @property
    def l2_bytes(self) -> int:
        runtime = self._cupy.cuda.runtime
        return int(runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"])


def sets_wanted(set_bytes: int, l2_bytes: int) -> int:
    """Sets of inputs, of ``set_bytes`` each, to cycle through so that the L2 cache holds none of them."""
    return max(1, min(math.ceil(_TIMES_L2 * l2_bytes / max(set_bytes, 1)), _MAX_SETS))


def measure(
    contenders: Mapping[str, Sequence[Run]], regime: Regime = Regime.IN_TURNS, *, on_gpu: bool,
    seconds: float | None = None, watch: Watch | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time each contender, given as one call per set of inputs. ``Regime.IN_TURNS`` uses the first set only.

    On a GPU the calls must launch on CuPy's current stream. ``seconds``: measuring time, in turns of all contenders
    together, else of each; None: the regime's default. ``watch`` is called between samples, with all samples so far.
    """
    lane: Lane = GpuLane() if on_gpu else CpuLane()
    seconds = regime.seconds if seconds is None else seconds
    if regime is Regime.IN_TURNS:
        return in_turns({name: runs[0] for name, runs in contenders.items()}, lane, seconds, watch)
    return alone(contenders, lane, open_meter(on_gpu), seconds, watch)


def time_of(run: Run, *, on_gpu: bool, seconds: float) -> Timing:
    """The time of one call, on a GPU with a cold L2 cache."""
    return in_turns({"": run}, GpuLane() if on_gpu else CpuLane(), seconds)[""]


def in_turns(
    contenders: Mapping[str, Run], lane: Lane, seconds: float, watch: Watch | None = None
) -> dict[str, Timing]:
    for run in contenders.values():  # compiles, allocates, raises clocks
        run()
        run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    flushes = dict.fromkeys(contenders, 1)
    started, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < seconds):
        lane.flush()  # meanwhile the host enqueues ahead of the GPU
        marks = {}
        for name in list(contenders)[:: -1 if rounds % 2 else 1]:
            marks[name] = _one_call(contenders[name], lane, flushes, name)
        for name, (start, stop) in marks.items():
            lane.wait(stop)
            samples[name].append(lane.seconds(start, stop))
        rounds += 1
        if watch is not None:
            watch(samples)
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def _one_call(run: Run, lane: Lane, flushes: dict[str, int], name: str) -> tuple[Any, Any]:
    """The marks around a call.

    If the GPU reaches the first mark before the host has enqueued the whole call, the marks measure the host. Then the
    call is repeated after one more flush; later rounds keep this number of flushes.
    """
    while True:
        for _ in range(flushes[name]):
            lane.flush()
        start = lane.mark()
        run()
        stop = lane.mark()
        if not lane.is_past(start) or flushes[name] == _MAX_FLUSHES:
            return start, stop
        flushes[name] += 1


def alone(
    contenders: Mapping[str, Sequence[Run]], lane: Lane, meter: Meter, seconds: float,
    watch: Watch | None = None,
) -> dict[str, Timing]:  # fmt: skip
    found: dict[str, Timing] = {}
    samples: dict[str, list[float]] = {}
    for name, runs in contenders.items():
        samples[name] = []
        show = None if watch is None else lambda: watch(samples)
        found[name] = _alone(runs, lane, meter, seconds, samples[name], show)
    return found


def _alone(
    runs: Sequence[Run], lane: Lane, meter: Meter, seconds: float, samples: list[float],
    show: Callable[[], None] | None,
) -> Timing:  # fmt: skip
    for run in runs:  # compiles and allocates
        run()
    batches = _batches(itertools.cycle(runs), lane)
    warm = 0.0
    while warm < WARM_SECONDS:
        warm += next(batches)[1]
    calls, starved, measured = 0, 0, 0.0
    with Sampler(meter) as sampler:
        while measured < seconds:
            size, took, late = next(batches)
            samples.append(took / size)
            calls, starved, measured = calls + size, starved + late, measured + took
            if show is not None:
                show()
    batches.close()
    power = sampler.power(measured / calls)
    load = Load(calls, len(runs), measured, starved / len(samples), power)
    return Timing(tuple(samples), Regime.SUSTAINED, load=load)


def _batches(calls: Iterator[Run], lane: Lane) -> Generator[tuple[int, float, bool], None, None]:
    """Calls, seconds and lateness of each batch that has ended, while the next batches are in flight. Endless.

    The size grows until a batch takes long enough. Closing the generator waits for what is still enqueued.
    """
    size, pending = 1, list[tuple[int, Any, Any, bool]]()
    last = lane.mark()
    lane.wait(last)
    try:
        while True:
            for run in itertools.islice(calls, size):
                run()
            mark = lane.mark()
            # Late: the preceding batch has ended, so the GPU was idle until this batch was enqueued.
            pending.append((size, last, mark, lane.is_past(last)))
            last = mark
            if len(pending) > _AHEAD:
                ended, start, stop, late = pending.pop(0)
                lane.wait(stop)
                took = lane.seconds(start, stop)
                if ended == size and took < _BATCH_SECONDS:
                    size = min(2 * size, _BATCH_CALLS)
                yield ended, took, late
    finally:
        lane.wait(last)
