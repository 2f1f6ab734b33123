"""The sustained regime on a made-up clock, GPU and energy counter: no test waits or measures."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from cufa.measure import power, sustained
from cufa.measure.cases import Case, contenders
from cufa.measure.limits import Limits
from cufa.measure.power import NoMeter, NvmlMeter, Power, Sample, summarise
from cufa.measure.regimes import Regime
from cufa.measure.runner import run_case
from cufa.measure.suites import make
from cufa.measure.timing import Timing, speedup

LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)


class FakeGpu:
    """A queue of calls that run one after the other, each for its seconds; the host takes ``host`` per call.

    It is a lane, and :meth:`call` makes calls for it.
    """

    def __init__(self, host: float = 1e-6) -> None:
        self.now, self.busy_until, self.host = 0.0, 0.0, host
        self.order: list[str] = []
        self.furthest_ahead = 0.0

    def call(self, name: str, seconds: float):
        def run():
            self.now += self.host
            self.busy_until = max(self.busy_until, self.now) + seconds
            self.furthest_ahead = max(self.furthest_ahead, self.busy_until - self.now)
            self.order.append(name)

        return run

    def mark(self) -> float:
        return max(self.busy_until, self.now)

    def wait(self, mark: float) -> None:
        self.now = max(self.now, mark)

    def is_past(self, mark: float) -> bool:
        return mark <= self.now

    def seconds(self, first: float, second: float) -> float:
        return second - first


def alone(gpu, contenders, **options):
    return sustained.measure_alone(contenders, gpu, NoMeter("none"), seconds=1.0, **options)


class TestMeasuring:
    def test_one_contender_after_the_other_each_warmed_up(self):
        gpu = FakeGpu()
        found = alone(gpu, {"a": [gpu.call("a", 1e-3)], "b": [gpu.call("b", 2e-3)]})
        assert "".join(gpu.order).count("ab") == 1, "no turns are taken"
        assert gpu.order.count("a") * 1e-3 >= 1.5, "warmed up and measured"
        for name, seconds in (("a", 1e-3), ("b", 2e-3)):
            timing, load = found[name]
            assert timing.regime is Regime.SUSTAINED
            assert timing.p50 == pytest.approx(seconds)
            assert 1.0 <= load.seconds < 1.1 and load.calls == pytest.approx(load.seconds / seconds)
            assert not load.host_bound and load.power.missing

    def test_the_gpu_never_waits_and_the_host_never_runs_away(self):
        gpu = FakeGpu(host=5e-6)
        ((timing, load),) = alone(gpu, {"a": [gpu.call("a", 20e-6)]}).values()
        assert timing.p50 == pytest.approx(20e-6) and load.starved == 0
        assert gpu.furthest_ahead < 0.05

    def test_calls_slower_than_their_kernels_are_told(self):
        gpu = FakeGpu(host=20e-6)
        ((timing, load),) = alone(gpu, {"a": [gpu.call("a", 5e-6)]}).values()
        assert load.host_bound and timing.p50 == pytest.approx(20e-6, rel=0.1)

    def test_inputs_are_taken_in_rotation(self):
        gpu = FakeGpu()
        alone(gpu, {"x": [gpu.call(name, 1e-3) for name in "abc"]})
        assert "".join(gpu.order).startswith("abcabc")
        assert {gpu.order.count(n) for n in "abc"} <= {len(gpu.order) // 3, len(gpu.order) // 3 + 1}

    def test_what_compiles_at_its_first_call_is_still_warmed_up(self):
        gpu = FakeGpu()
        later = gpu.call("a", 1e-3)

        def first():
            if not gpu.order:
                gpu.now += 60
            later()

        alone(gpu, {"a": [first]})
        assert len(gpu.order) * 1e-3 >= 1.5

    def test_it_can_be_watched(self):
        gpu, seen = FakeGpu(), []
        alone(gpu, {"a": [gpu.call("a", 0.1)]}, watch=lambda taken: seen.append(len(taken["a"])))
        assert seen == list(range(1, len(seen) + 1)) and len(seen) >= 10

    @pytest.mark.parametrize(("set_bytes", "sets"), [(1 << 30, 1), (60 << 20, 4), (1 << 20, 64), (0, 64)])
    def test_sets_that_outgrow_l2(self, set_bytes, sets):
        assert sustained.sets_wanted(set_bytes, l2_bytes=60 << 20) == sets


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
            NVMLError=type("NVMLError", (Exception,), {}),
            NVML_SUCCESS=0,
            NVML_FI_DEV_POWER_INSTANT=186,
            NVML_CLOCK_SM=1,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByPciBusId=lambda bus: bus,
            nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 5_000,
            nvmlDeviceGetFieldValues=lambda gpu, fields: [field],
            nvmlDeviceGetPowerUsage=lambda gpu: 600_000,
            nvmlDeviceGetClockInfo=lambda gpu, kind: 1500,
            field=field,
        )
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
        nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda gpu: 0x1 | 0x4 | 0x20  # idle is no reason
        assert NvmlMeter().read().throttled_by == ("power limit", "thermal limit")

    def test_a_refusal_is_a_reason(self, nvml):
        def refuse(gpu):
            raise nvml.NVMLError("Not Supported")

        nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
        meter = power.open_meter(on_gpu=True)
        assert isinstance(meter, NoMeter) and meter.reason == "NVML: Not Supported"


class TestRegimes:
    def test_times_of_different_regimes_are_not_compared(self):
        in_turns, alone = (Timing((1.0, 1.0), regime) for regime in Regime)
        with pytest.raises(ValueError, match="sustained is not compared with one measured in turns"):
            speedup(alone, in_turns)

    def test_a_sustained_row_on_the_cpu(self):
        problem = make(1, 2, 64, 16, "float32", True)
        case = Case(problem, contenders("fa2"))
        rows, _ = run_case(case, None, LIMITS, regime=Regime.SUSTAINED, seconds=0.01)
        assert rows[0].regime is Regime.SUSTAINED and rows[0].error < 1e-5
        assert rows[0].load.sets == 1 and "CPU" in rows[0].power.missing
        assert rows[0].tflop_per_joule is None
