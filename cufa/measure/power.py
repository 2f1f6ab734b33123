"""Power of the card while a contender runs: NVML's energy counter, power and SM clock, sampled by a thread.

NVML comes with the driver and is reached through nvidia-ml-py. Where either is missing, or the GPU does not report a
figure, the figure is None and :attr:`Power.missing` says why. Times are measured all the same.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Protocol

#: Seconds between samples. The energy counter moves in steps of about 0.1 s.
SAMPLE_SECONDS = 0.025

#: Least time between the first and last step of the counter, as a step's time is known only to within one sample.
ENERGY_SECONDS = 2.0

#: NVML's bits for reasons of a lowered clock. "Idle" and "clock set by hand" are left out.
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
    """Names in :data:`REASONS` that lower the clock at this moment."""


@dataclasses.dataclass(frozen=True)
class Power:
    """Power of the card while one contender ran alone."""

    watts: float | None = None
    """Median of the samples."""
    clock_mhz: float | None = None
    """Median SM clock."""
    joules: float | None = None
    """Per call, from the energy counter."""
    missing: str = ""
    """Why a figure is None."""
    throttled: dict[str, float] = dataclasses.field(default_factory=dict)
    """By name in :data:`REASONS`: share of the time that it lowered the clock; empty: never, or not reported."""


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
        """Empty where the card does not report reasons."""
        try:
            bits = int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._gpu))
        except self._nvml.NVMLError:
            return ()
        return tuple(name for name, bit in REASONS.items() if bits & bit)

    def _milliwatts(self) -> float:
        """Power at this moment. On recent GPUs nvmlDeviceGetPowerUsage averages over a second."""
        nvml = self._nvml
        (field,) = nvml.nvmlDeviceGetFieldValues(self._gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn == nvml.NVML_SUCCESS:
            return float(field.value.uiVal)
        return float(nvml.nvmlDeviceGetPowerUsage(self._gpu))


@dataclasses.dataclass(frozen=True)
class NoMeter:
    """Stands in for a meter where NVML cannot be used."""

    reason: str

    def read(self) -> Sample:
        raise RuntimeError(self.reason)


def open_meter(on_gpu: bool) -> Meter:
    """The meter of the current GPU. If NVML cannot be used, reading the meter raises the reason."""
    if not on_gpu:
        return NoMeter("a CPU's energy is not measured")
    try:
        return NvmlMeter()
    except RuntimeError as error:
        return NoMeter(str(error))


class Sampler:
    """Reads a meter from its own thread while the ``with`` block runs."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._stop = meter, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._samples: list[Sample] = []
        self._missing = "nothing was sampled"

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._samples.append(self._meter.read())
            except Exception as error:  # NVML may stop answering at any time; the measurement goes on
                self._samples, self._missing = [], str(error)
                return
            self._stop.wait(SAMPLE_SECONDS)

    def power(self, seconds_per_call: float) -> Power:
        """The power of a GPU that did nothing but run calls of this length."""
        return summarise(self._samples, seconds_per_call) if self._samples else Power(missing=self._missing)


def summarise(samples: Sequence[Sample], seconds_per_call: float) -> Power:
    """Medians, and joules per call: the rise of the energy counter per second, times the seconds of a call.

    The rise is measured from the first step of the counter to its last.
    """
    joules, missing = None, ""
    steps = [b for a, b in itertools.pairwise(samples) if b.joules != a.joules]
    if len(steps) >= 2 and steps[-1].seconds - steps[0].seconds >= ENERGY_SECONDS:
        first, last = steps[0], steps[-1]
        joules = (last.joules - first.joules) / (last.seconds - first.seconds) * seconds_per_call
    else:
        missing = "joules take 3 s of measuring: the energy counter moves in steps"
    counts = collections.Counter(name for sample in samples for name in sample.throttled_by)
    return Power(
        statistics.median(sample.watts for sample in samples),
        statistics.median(sample.clock_mhz for sample in samples),
        joules,
        missing,
        {name: counts[name] / len(samples) for name in REASONS if counts[name]},
    )
