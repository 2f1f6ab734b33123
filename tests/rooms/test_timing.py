"""Timing on a GPU, with a GPU that only counts: times are of the device, however long the host takes for a call."""

from __future__ import annotations

import types

import pytest

from cufa.measure import timing

FLUSH_US = 85.0


class Gpu:
    """A stream: the host's clock, and when the device will have done all that is enqueued. In microseconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.flushes = 0
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0, getDeviceProperties=lambda _: {"l2CacheSize": 1 << 20}
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            Event=lambda: Event(self),
            get_current_stream=lambda: types.SimpleNamespace(synchronize=self.synchronize),
            get_elapsed_time=lambda start, stop: (stop.at - start.at) * 1e-3,
        )
        self.uint8 = "uint8"

    def empty(self, nbytes: int, dtype: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(nbytes=nbytes, data=types.SimpleNamespace(memset_async=self.flush))

    def flush(self, value: int, nbytes: int) -> None:
        self.flushes += 1
        self.enqueue(FLUSH_US, 2.0)

    def enqueue(self, device: float, host: float) -> None:
        self.host += host
        self.busy_until = max(self.busy_until, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.host += 1.0
        self.at = max(self.gpu.busy_until, self.gpu.host)

    @property
    def done(self) -> bool:
        return self.at <= self.gpu.host


def a_call(gpu: Gpu, host: float, device: float, kernels: int = 3) -> timing.Run:
    def run() -> None:
        for _ in range(kernels):
            gpu.enqueue(device / kernels, host / kernels)

    return run


@pytest.mark.parametrize("host", [5.0, 60.0, 200.0, 900.0])
def test_the_time_is_the_devices(host):
    gpu = Gpu()
    timer = timing._GpuTimer(gpu)
    runs = [a_call(gpu, host, 30.0), a_call(gpu, 10.0, 40.0)]
    for _ in range(3):
        assert timer.round(runs) == pytest.approx([30e-6, 40e-6])


def test_a_quick_host_flushes_once_for_each_call():
    gpu = Gpu()
    timer = timing._GpuTimer(gpu)
    timer.round([a_call(gpu, 5.0, 30.0)] * 4)
    assert gpu.flushes == 1 + 4


def test_calls_that_take_the_host_too_long_are_timed_all_the_same():
    gpu = Gpu()
    timer = timing._GpuTimer(gpu)
    run = a_call(gpu, 5000.0, 30.0)
    (sample,) = timer.round([run])
    assert 30e-6 < sample < 5.1e-3
    before = gpu.flushes
    timer.round([run])
    assert gpu.flushes - before == 1 + timing._MAX_FLUSHES
