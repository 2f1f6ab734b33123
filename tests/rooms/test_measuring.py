"""Timing in both regimes, on made-up clocks, GPUs and energy counters, and the statistics of samples."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from evidence.host_times import host_time

from cufa.measure import measuring, power
from cufa.measure.cases import Case, contenders
from cufa.measure.limits import Limits
from cufa.measure.power import NoMeter, NvmlMeter, Power, Sample, summarise
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import make
from cufa.measure.timing import Run, Timing, speedup

LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)


FLUSH_US = 85.0


class Gpu:
    """CuPy with one stream: the host's clock, and when the device will have done all that is enqueued. Microseconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = self.furthest_ahead = 0.0
        self.flushes, self.order = 0, list[str]()
        runtime = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda _: {"l2CacheSize": 1 << 20})
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Event=lambda: Event(self),
            get_elapsed_time=lambda start, stop: (stop.at - start.at) * 1e-3,
        )
        self.uint8 = "uint8"

    def empty(self, nbytes: int, dtype: str) -> SimpleNamespace:
        return SimpleNamespace(nbytes=nbytes, data=SimpleNamespace(memset_async=self.flush))

    def flush(self, value: int, nbytes: int) -> None:
        self.flushes += 1
        self.enqueue(FLUSH_US, 2.0)

    def enqueue(self, device: float, host: float) -> None:
        self.host += host
        self.busy_until = max(self.busy_until, self.host) + device
        self.furthest_ahead = max(self.furthest_ahead, self.busy_until - self.host)

    def call(self, name: str, device: float, host: float = 1.0, kernels: int = 1) -> Run:
        def run() -> None:
            self.order.append(name)
            for _ in range(kernels):
                self.enqueue(device / kernels, host / kernels)

        return run


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.host += 1.0
        self.at = max(self.gpu.busy_until, self.gpu.host)

    @property
    def done(self) -> bool:
        return self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)


def in_turns(gpu: Gpu, **runs: Run) -> dict[str, Timing]:
    return measuring.in_turns(runs, measuring.GpuLane(gpu), seconds=0)


@pytest.mark.parametrize("host", [5.0, 60.0, 200.0, 900.0])
def test_the_time_is_the_devices(host):
    gpu = Gpu()
    found = in_turns(gpu, slow_host=gpu.call("", 30, host, kernels=3), quick=gpu.call("", 40, 10, kernels=3))
    assert found["slow_host"].samples == pytest.approx((30e-6,) * measuring.MIN_ROUNDS)
    assert found["quick"].samples == pytest.approx((40e-6,) * measuring.MIN_ROUNDS)


def test_a_quick_host_flushes_once_for_each_call():
    gpu = Gpu()
    in_turns(gpu, **{name: gpu.call(name, 30, 5, kernels=3) for name in "abcd"})
    assert gpu.flushes == measuring.MIN_ROUNDS * (1 + 4)


def test_calls_that_take_the_host_too_long_are_timed_all_the_same():
    gpu, most = Gpu(), measuring._MAX_FLUSHES
    found = in_turns(gpu, a=gpu.call("a", 30, 5000, kernels=3))["a"]
    assert all(30e-6 < sample < 5.1e-3 for sample in found.samples)
    assert gpu.flushes == sum(range(1, most)) + measuring.MIN_ROUNDS * (1 + most)


class TestTiming:
    def test_percentiles(self):
        t = Timing(tuple(np.linspace(1, 2, 101)))
        assert (t.p10, t.p50, t.p90) == pytest.approx((1.1, 1.5, 1.9))

    def test_contenders_take_turns_in_alternating_order(self):
        calls = []
        got = measuring.measure(
            {"a": [lambda: calls.append("a")], "b": [lambda: calls.append("b")]}, on_gpu=False, seconds=0
        )
        assert "".join(calls[:4]) == "aabb", "each is warmed up twice"
        assert "".join(calls[4:]) == "abba" * (measuring.MIN_ROUNDS // 2)
        assert {name: len(t.samples) for name, t in got.items()} == dict.fromkeys("ab", measuring.MIN_ROUNDS)

    def test_samples_belong_to_their_contender(self):
        got = measuring.measure(
            {"slow": [lambda: time.sleep(3e-3)], "fast": [lambda: None]}, on_gpu=False, seconds=0.05
        )
        assert min(got["slow"].samples) >= 3e-3 > min(got["fast"].samples)

    def test_rounds_are_bounded(self):
        got = measuring.measure({"x": [lambda: None]}, on_gpu=False, seconds=60)
        assert len(got["x"].samples) == measuring.MAX_ROUNDS

    def test_host_time_counts_calls(self):
        calls = []
        t = host_time(lambda: calls.append(1), lambda: None, calls=200, batch=20)
        assert len(t.samples) == 10
        assert len(calls) == 220, "one batch is a warm-up"


class TestSpeedup:
    def test_of_equal_samples_is_one(self):
        t = Timing(tuple(np.random.default_rng(0).normal(1, 0.1, 50)))
        assert (speedup(t, t).low, speedup(t, t).value, speedup(t, t).high) == (1, 1, 1)

    def test_common_drift_cancels(self):
        drift = np.linspace(1, 3, 60)
        ratio = speedup(Timing(tuple(2 * drift)), Timing(tuple(drift)))
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 2, 2))

    def test_interval_covers_the_truth(self):
        """95% of intervals contain the true ratio; fewer than 180 of 200 would be a rare accident."""
        rng = np.random.default_rng(1)
        covered = 0
        for _ in range(200):
            a, b = rng.lognormal(np.log(3), 0.2, 40), rng.lognormal(np.log(2), 0.2, 40)
            ratio = speedup(Timing(tuple(a)), Timing(tuple(b)))
            covered += ratio.low <= 1.5 <= ratio.high
        assert covered >= 180

    def test_unequal_lengths(self):
        ratio = speedup(Timing((2.0,) * 10), Timing((1.0,) * 7))
        assert ratio.value == 2
        assert str(ratio) == "2.00× (2.00–2.00)"


def alone(gpu, watch=None, **contenders):
    return measuring.alone(contenders, measuring.GpuLane(gpu), NoMeter("none"), seconds=1.0, watch=watch)


class TestAlone:
    def test_one_contender_after_the_other_each_warmed_up(self):
        gpu = Gpu()
        found = alone(gpu, a=[gpu.call("a", 1000)], b=[gpu.call("b", 2000)])
        assert "".join(gpu.order).count("ab") == 1, "no turns are taken"
        assert gpu.order.count("a") * 1e-3 >= 1.5, "warmed up and measured"
        for name, seconds in (("a", 1e-3), ("b", 2e-3)):
            timing, load = found[name], found[name].load
            assert timing.regime is Regime.SUSTAINED
            assert timing.p50 == pytest.approx(seconds)
            assert 1.0 <= load.seconds < 1.1 and load.calls == pytest.approx(load.seconds / seconds)
            assert not load.host_bound and load.power.missing

    def test_the_gpu_never_waits_and_the_host_never_runs_away(self):
        gpu = Gpu()
        (timing,) = alone(gpu, a=[gpu.call("a", 20, 5)]).values()
        assert timing.p50 == pytest.approx(20e-6) and timing.load.starved == 0
        assert gpu.furthest_ahead < 0.05e6

    def test_calls_slower_than_their_kernels_are_told(self):
        gpu = Gpu()
        (timing,) = alone(gpu, a=[gpu.call("a", 5, 20)]).values()
        assert timing.load.host_bound and timing.p50 == pytest.approx(20e-6, rel=0.1)

    def test_inputs_are_taken_in_rotation(self):
        gpu = Gpu()
        alone(gpu, x=[gpu.call(name, 1000) for name in "abc"])
        assert "".join(gpu.order).startswith("abcabc")
        assert {gpu.order.count(n) for n in "abc"} <= {len(gpu.order) // 3, len(gpu.order) // 3 + 1}

    def test_what_compiles_at_its_first_call_is_still_warmed_up(self):
        gpu = Gpu()
        later = gpu.call("a", 1000)

        def first():
            if not gpu.order:
                gpu.host += 60e6
            later()

        alone(gpu, a=[first])
        assert len(gpu.order) * 1e-3 >= 1.5

    def test_it_can_be_watched(self):
        gpu, seen = Gpu(), []
        alone(gpu, lambda taken: seen.append(len(taken["a"])), a=[gpu.call("a", 0.1e6)])
        assert seen == list(range(1, len(seen) + 1)) and len(seen) >= 10

    @pytest.mark.parametrize(("set_bytes", "sets"), [(1 << 30, 1), (60 << 20, 4), (1 << 20, 64), (0, 64)])
    def test_sets_that_outgrow_l2(self, set_bytes, sets):
        assert measuring.sets_wanted(set_bytes, l2_bytes=60 << 20) == sets


class TestPower:
    @staticmethod
    def samples(seconds, watts=600.0, step=0.1):
        """Every 25 ms, of a counter that moves only every ``step``."""
        times = [0.01 + 0.025 * n for n in range(int(seconds / 0.025))]
        return [Sample(t, watts * step * (t // step), watts + (n % 3), 1500.0) for n, t in enumerate(times)]

    def test_joules_from_step_to_step_of_the_counter(self):
        found = summarise(self.samples(3.0), seconds_per_call=2e-3)
        assert found.joules == pytest.approx(600 * 2e-3, rel=0.02)
        assert (found.watts, found.clock_mhz, found.missing) == (601, 1500, "")

    def test_a_short_run_has_power_and_no_joules(self):
        found = summarise(self.samples(1.0), 2e-3)
        assert found.joules is None and "3 s" in found.missing and found.watts == 601

    def test_a_counter_that_stands_still_has_no_joules(self):
        still = [dataclasses.replace(s, joules=5.0) for s in self.samples(3.0)]
        assert summarise(still, 2e-3).joules is None

    def test_what_cannot_be_read_says_why(self, monkeypatch):
        class Broken:
            def read(self):
                raise OSError("the driver went away")

        with power.Sampler(Broken()) as sampler:
            pass
        assert sampler.power(1.0) == Power(missing="the driver went away")
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(RuntimeError, match="nvidia-ml-py is not installed"):
            NvmlMeter()
        meter = power.open_meter(on_gpu=True)
        assert isinstance(meter, NoMeter) and "nvidia-ml-py" in meter.reason


class TestNvml:
    """On an NVML that is made up."""

    @pytest.fixture
    def nvml(self, monkeypatch):
        field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=650_000))
        fake = SimpleNamespace(
            NVMLError=type("NVMLError", (Exception,), {}), NVML_SUCCESS=0, NVML_FI_DEV_POWER_INSTANT=186,
            NVML_CLOCK_SM=1, nvmlInit=lambda: None, nvmlDeviceGetHandleByPciBusId=lambda bus: bus,
            nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 5_000,
            nvmlDeviceGetFieldValues=lambda gpu, fields: [field],
            nvmlDeviceGetPowerUsage=lambda gpu: 600_000, nvmlDeviceGetClockInfo=lambda gpu, kind: 1500,
            nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: 0x1, field=field,  # idle is no reason
        )  # fmt: skip
        runtime = SimpleNamespace(
            getDevice=lambda: 3, deviceGetPCIBusId=lambda number: f"0000:0{number}:00.0"
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        return fake

    def test_reads_the_gpu_that_cupy_is_on(self, nvml):
        meter = NvmlMeter()
        assert meter._gpu == "0000:03:00.0"
        found = meter.read()
        assert (found.joules, found.watts, found.clock_mhz) == (5.0, 650.0, 1500.0)

    def test_takes_the_average_where_the_power_of_the_instant_is_not_told(self, nvml):
        nvml.field.nvmlReturn = 3
        assert NvmlMeter().read().watts == 600

    def test_says_what_keeps_the_clock_down_where_that_is_told(self, nvml):
        assert NvmlMeter().read().throttled_by == ()
        nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda gpu: 0x1 | 0x4 | 0x20
        assert NvmlMeter().read().throttled_by == ("power limit", "thermal limit")

        def refuse(gpu):
            raise nvml.NVMLError("Function Not Found")

        nvml.nvmlDeviceGetCurrentClocksEventReasons = refuse
        assert NvmlMeter().read().throttled_by == ()

    def test_a_refusal_is_a_reason(self, nvml):
        def refuse(gpu):
            raise nvml.NVMLError("Not Supported")

        nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
        meter = power.open_meter(on_gpu=True)
        assert isinstance(meter, NoMeter) and meter.reason == "NVML: Not Supported"


class TestRegimes:
    def test_a_sustained_row_on_the_cpu(self):
        problem = make(1, 2, 64, 16, "float32", True)
        case = Case(problem, contenders("fa2"))
        rows, _ = run_case(case, None, LIMITS, regime=Regime.SUSTAINED, seconds=0.01)
        assert rows[0].regime is Regime.SUSTAINED and rows[0].error < 1e-5
        assert rows[0].load["input_sets"] == 1 and "CPU" in rows[0].load["missing"]
        assert rows[0].load["tflop_per_joule"] is None
