"""What the card draws while a contender runs: NVML's energy counter, power and SM clock, sampled by a thread.

NVML comes with the driver and is reached through nvidia-ml-py. Where one of them is missing, or the GPU does
not tell, figures are None and :attr:`Power.missing` says why; times are measured all the same.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

#: Between samples. The energy counter moves in steps of about 0.1 s.
SAMPLE_SECONDS = 0.025

#: Steps of the counter must span this much: the moment of a step is known to one sample only.
ENERGY_SECONDS = 2.0


#: Why a card lowers its clock, by NVML's bits; that nothing runs and that somebody set a clock are none.
REASONS = {
    "power limit": 0x04,
    "hardware slowdown": 0x08,
    "sync boost": 0x10,
    "thermal limit": 0x20,
    "hardware thermal limit": 0x40,
    "power brake": 0x80,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """The card at one moment of the host's clock."""

    seconds: float
    joules: float
    """Since the driver was loaded."""
    watts: float
    clock_mhz: float
    throttled_by: tuple[str, ...] = ()
    """What keeps the clock down, of :data:`REASONS`."""


@dataclasses.dataclass(frozen=True)
class Power:
    """Of one contender, while it ran alone."""

    watts: float | None = None
    """Median of the samples."""
    clock_mhz: float | None = None
    """Median SM clock."""
    joules: float | None = None
    """Per call, from the energy counter."""
    missing: str = ""
    """Why a figure is None."""
    throttled: dict[str, float] = dataclasses.field(default_factory=dict)
    """Share of the time that each of :data:`REASONS` kept the clock down; empty: none did, or none was told."""


class Meter(Protocol):
    def read(self) -> Sample: ...


class NvmlMeter:
    """The GPU that CuPy is on, found by its PCI bus id: NVML numbers devices in an order of its own.

    Raises RuntimeError, with the reason, where NVML cannot be read.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise RuntimeError("nvidia-ml-py is not installed") from None
        import cupy

        self._nvml, runtime = pynvml, cupy.cuda.runtime
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(runtime.getDevice()))
            self.read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from None

    def read(self) -> Sample:
        nvml = self._nvml
        return Sample(
            time.perf_counter(),
            nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) * 1e-3,
            self._milliwatts() * 1e-3,
            float(nvml.nvmlDeviceGetClockInfo(self._gpu, nvml.NVML_CLOCK_SM)),
            self._throttled_by(),
        )

    def _throttled_by(self) -> tuple[str, ...]:
        """Nothing where the card does not tell."""
        nvml = self._nvml
        # The same by its former name: nvidia-ml-py 13 has both.
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        try:
            bits = 0 if ask is None else int(ask(self._gpu))
        except nvml.NVMLError:
            return ()
        return tuple(name for name, bit in REASONS.items() if bits & bit)

    def _milliwatts(self) -> float:
        """Of this moment: nvmlDeviceGetPowerUsage is an average over a second on recent GPUs."""
        nvml = self._nvml
        (field,) = nvml.nvmlDeviceGetFieldValues(self._gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn == nvml.NVML_SUCCESS:
            return float(field.value.uiVal)
        return float(nvml.nvmlDeviceGetPowerUsage(self._gpu))


class NoMeter:
    """Stands where nothing can be read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def read(self) -> Sample:
        raise RuntimeError(self.reason)


def open_meter(on_gpu: bool) -> Meter:
    """For the current GPU; one that says why it cannot be read where that is so."""
    if not on_gpu:
        return NoMeter("a CPU's energy is not measured")
    try:
        return NvmlMeter()
    except RuntimeError as error:
        return NoMeter(str(error))


class Sampler:
    """Reads a meter from a thread of its own for as long as the ``with`` lasts."""

    def __init__(self, meter: Meter, seconds: float = SAMPLE_SECONDS) -> None:
        self._meter, self._seconds = meter, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._samples: list[Sample] = []
        self._missing = ""

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._samples.append(self._meter.read())
            except Exception as error:  # NVML may stop answering at any time; the measurement goes on
                self._missing = str(error)
                return
            self._stop.wait(self._seconds)

    def power(self, seconds_per_call: float) -> Power:
        """Of everything sampled. For a GPU that was busy with calls of this length all the time."""
        if self._missing or not self._samples:
            return Power(missing=self._missing or "nothing was sampled")
        return summarise(self._samples, seconds_per_call)


def summarise(samples: Sequence[Sample], seconds_per_call: float) -> Power:
    """Medians, and joules per call: what the counter gained per second, times the seconds of a call.

    The gain is taken from one step of the counter to another, so that no part of a step is counted at either
    end.
    """

    def median(of: Callable[[Sample], Any]) -> float:
        return float(statistics.median(map(of, samples)))

    joules, missing = None, ""
    steps = [b for a, b in itertools.pairwise(samples) if b.joules != a.joules]
    if len(steps) >= 2 and steps[-1].seconds - steps[0].seconds >= ENERGY_SECONDS:
        first, last = steps[0], steps[-1]
        joules = (last.joules - first.joules) / (last.seconds - first.seconds) * seconds_per_call
    else:
        missing = "joules take 3 s of measuring: the energy counter moves in steps"
    counts = collections.Counter(name for sample in samples for name in sample.throttled_by)
    throttled = {name: counts[name] / len(samples) for name in REASONS if counts[name]}
    return Power(median(lambda s: s.watts), median(lambda s: s.clock_mhz), joules, missing, throttled)
