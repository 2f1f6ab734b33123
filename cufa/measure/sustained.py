"""Each contender alone: warmed up, then measured back to back, with the power that it draws.

Calls are enqueued in batches with a mark (an event on a GPU) behind each, and the host stays two batches
ahead, so that the GPU never waits for it. Where the host cannot keep ahead all the same (short kernels of
libraries with slow calls), :attr:`Load.starved` says for which share of the batches.

L2 cannot be emptied between calls that run back to back. Instead the calls go round among several sets of
inputs and outputs, as many as take several times the L2 cache: :func:`sets_wanted`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .power import Meter, Power, Sampler
from .regimes import Regime
from .timing import Run, Timing, Watch

WARM_SECONDS = 0.5
#: Time that a batch should take, and most calls of one: a GPU's queue of launches is finite.
_BATCH_SECONDS, _BATCH_CALLS = 10e-3, 256
#: Batches that the host is ahead.
_AHEAD = 2
#: More batches than this share came late: the GPU waited for the host.
_STARVED = 0.05
#: Inputs of a round take this many times the L2 cache; there are never more sets than this.
_TIMES_L2, _MAX_SETS = 4, 64


@dataclasses.dataclass(frozen=True)
class Load:
    """How one contender was measured alone."""

    calls: int
    sets: int
    """Sets of inputs and outputs that the calls went round."""
    seconds: float
    starved: float
    """Share of the batches that the host had enqueued only after the one before had ended."""
    power: Power

    @property
    def host_bound(self) -> bool:
        """The time is that of the host's calls, not of the kernel."""
        return self.starved > _STARVED


class Lane(Protocol):
    """Where calls run in order: the current stream of a GPU, or the CPU. A mark is a point in that order."""

    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None: ...
    def is_past(self, mark: Any) -> bool: ...
    def seconds(self, first: Any, second: Any) -> float: ...


class GpuLane:
    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def mark(self) -> Any:
        event = self._cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def is_past(self, mark: Any) -> bool:
        return bool(mark.done)

    def seconds(self, first: Any, second: Any) -> float:
        return float(self._cuda.get_elapsed_time(first, second)) * 1e-3


class CpuLane:
    """Calls have ended when they return: nobody is ever ahead, and nothing starves."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def wait(self, mark: float) -> None: ...

    def is_past(self, mark: float) -> bool:
        return False

    def seconds(self, first: float, second: float) -> float:
        return second - first


def sets_wanted(set_bytes: int, l2_bytes: int) -> int:
    """Sets of ``set_bytes`` that calls should go round so that none is found in L2 when its turn comes."""
    return max(1, min(math.ceil(_TIMES_L2 * l2_bytes / max(set_bytes, 1)), _MAX_SETS))


def measure_alone(
    contenders: Mapping[str, Sequence[Run]],
    lane: Lane,
    meter: Meter,
    seconds: float = Regime.SUSTAINED.seconds,
    warm_seconds: float = WARM_SECONDS,
    watch: Watch | None = None,
) -> dict[str, tuple[Timing, Load]]:
    """Time each contender by itself for ``seconds``, one after the other; ``contenders`` gives the calls of
    each, one for every set of inputs. A sample is the average call of one batch.

    ``watch`` sees the samples between batches, as :func:`cufa.measure.timing.measure` shows them.
    """
    found: dict[str, tuple[Timing, Load]] = {}
    taken: dict[str, list[float]] = {}
    for name, runs in contenders.items():
        taken[name] = []
        show = None if watch is None else lambda: watch(taken)
        found[name] = _alone(runs, lane, meter, seconds, warm_seconds, taken[name], show)
    return found


@dataclasses.dataclass
class _Batch:
    calls: int
    start: Any
    end: Any
    starved: bool


def _alone(
    runs: Sequence[Run],
    lane: Lane,
    meter: Meter,
    seconds: float,
    warm_seconds: float,
    samples: list[float],
    show: Callable[[], None] | None,
) -> tuple[Timing, Load]:
    for run in runs:  # compiles and allocates
        run()
    batches = _batches(itertools.cycle(runs), lane)
    warm = 0.0
    while warm < warm_seconds:
        batch = next(batches)
        warm += lane.seconds(batch.start, batch.end)
    calls, starved, measured = 0, 0, 0.0
    with Sampler(meter) as sampler:
        while measured < seconds:
            batch = next(batches)
            took = lane.seconds(batch.start, batch.end)
            samples.append(took / batch.calls)
            calls, starved, measured = calls + batch.calls, starved + batch.starved, measured + took
            if show is not None:
                show()
    batches.close()
    power = sampler.power(measured / calls)
    load = Load(calls, len(runs), measured, starved / len(samples), power)
    return Timing(tuple(samples), Regime.SUSTAINED), load


def _batches(calls: Iterator[Run], lane: Lane) -> Generator[_Batch, None, None]:
    """Batches that have ended, while the next ones are under way: a generator without an end. The size grows
    until a batch takes long enough. What is still enqueued is waited for when the generator is closed."""
    size, pending = 1, list[_Batch]()
    last = lane.mark()
    lane.wait(last)
    try:
        while True:
            for run in itertools.islice(calls, size):
                run()
            mark = lane.mark()
            # The GPU had nothing to do after the batch before until this one came.
            pending.append(_Batch(size, last, mark, lane.is_past(last)))
            last = mark
            if len(pending) > _AHEAD:
                ended = pending.pop(0)
                lane.wait(ended.end)
                if ended.calls == size and lane.seconds(ended.start, ended.end) < _BATCH_SECONDS:
                    size = min(2 * size, _BATCH_CALLS)
                yield ended
    finally:
        lane.wait(last)
