"""The benchmark layer: statistics, references, contenders, suites. Measurements are of the CPU path."""

from __future__ import annotations

import sys
import time

import ml_dtypes
import numpy as np
import pytest

from cufa import attention_reference
from cufa.bench import peers, runner, suites, timing
from cufa.bench.limits import Limits, measure_limits
from cufa.bench.runner import Contender, run_problem
from cufa.bench.timing import Timing, speedup
from cufa.core.architectures import Device
from cufa.kernels import KERNELS, TileConfig
from cufa.planner import make_plan

LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)


class TestTiming:
    def test_percentiles(self):
        t = Timing(tuple(np.linspace(1, 2, 101)))
        assert (t.p10, t.p50, t.p90) == pytest.approx((1.1, 1.5, 1.9))

    def test_contenders_take_turns_in_alternating_order(self):
        calls = []
        got = timing.measure(
            {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, on_gpu=False, seconds=0
        )
        assert "".join(calls[:4]) == "aabb", "each is warmed up twice"
        assert "".join(calls[4:]) == "abba" * (timing.MIN_ROUNDS // 2)
        assert {name: len(t.samples) for name, t in got.items()} == dict.fromkeys("ab", timing.MIN_ROUNDS)

    def test_samples_belong_to_their_contender(self):
        got = timing.measure(
            {"slow": lambda: time.sleep(3e-3), "fast": lambda: None}, on_gpu=False, seconds=0.05
        )
        assert min(got["slow"].samples) >= 3e-3 > got["fast"].p50

    def test_rounds_are_bounded(self):
        got = timing.measure({"x": lambda: None}, on_gpu=False, seconds=60)
        assert len(got["x"].samples) == timing.MAX_ROUNDS

    def test_host_time_counts_calls(self):
        calls = []
        t = timing.host_time(lambda: calls.append(1), lambda: None, calls=200, batch=20)
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
        for seed in range(200):
            a, b = rng.lognormal(np.log(3), 0.2, 40), rng.lognormal(np.log(2), 0.2, 40)
            ratio = speedup(Timing(tuple(a)), Timing(tuple(b)), resamples=300, seed=seed)
            covered += ratio.low <= 1.5 <= ratio.high
        assert covered >= 180

    def test_unequal_lengths(self):
        ratio = speedup(Timing((2.0,) * 10), Timing((1.0,) * 7))
        assert ratio.value == 2
        assert str(ratio) == "2.00× (2.00–2.00)"


class TestSampledReference:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (30, 50), (50, 30), (300, 300)])
    def test_equals_the_reference(self, dtype, causal, seqlen_q, seqlen_k):
        problem = suites.make(2, 4, seqlen_q, 16, dtype, causal, kv_heads=2, seqlen_k=seqlen_k)
        q, k, v = runner.random_inputs(problem, on_gpu=False, seed=3)
        expected = runner.sampled_reference(problem, q, k, v)
        full = attention_reference(q, k, v, causal=causal)
        assert len(expected.rows) <= runner.CHECKED_ROWS
        assert len(expected.rows) == min(runner.CHECKED_ROWS, 4 * seqlen_q)
        assert runner.max_error(full, expected) < 1e-14

    def test_nan_is_no_small_error(self):
        problem = suites.make(1, 1, 8, 8, "float32", False)
        q, k, v = runner.random_inputs(problem, on_gpu=False, seed=0)
        expected = runner.sampled_reference(problem, q, k, v)
        out = attention_reference(q, k, v)
        out[0, 0, 3, 5] = np.nan
        assert np.isnan(runner.max_error(out, expected))

    def test_a_wrong_element_is_found(self):
        problem = suites.make(1, 2, 20, 8, "float32", True)
        q, k, v = runner.random_inputs(problem, on_gpu=False, seed=0)
        expected = runner.sampled_reference(problem, q, k, v)
        out = attention_reference(q, k, v, causal=True)
        out[0, 1, 19, 7] += 0.25
        assert runner.max_error(out, expected) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_poison_is_nan_in_every_type(dtype):
    x = np.zeros((2, 3), dtype)
    runner.poison(x)
    assert np.isnan(x.astype(np.float64)).all()


class TestRunProblem:
    def test_every_algorithm_on_the_cpu(self):
        problem = suites.make(1, 2, 150, 24, "float32", True)
        names = dict.fromkeys(spec.algorithm for spec in KERNELS.values())
        rows, skipped = run_problem(problem, [Contender(n) for n in names], None, LIMITS, seconds=0.02)
        assert [row.label for row in rows] == list(names)
        assert not skipped
        for row in rows:
            assert row.error < 1e-5
            assert row.tflops == pytest.approx(problem.flops / row.seconds / 1e12)
            assert row.gbytes == pytest.approx(problem.io_bytes / row.seconds / 1e9)
            assert row.plan is not None

    def test_inputs_differ_by_seed(self):
        problem = suites.make(1, 1, 64, 8, "bfloat16", False)
        first, again, other = (runner.random_inputs(problem, on_gpu=False, seed=s) for s in (0, 0, 1))
        assert first[0].dtype == ml_dtypes.bfloat16
        assert (first[0] == again[0]).all()
        assert (first[0] != other[0]).any()
        assert (first[0] != first[1]).any()

    def test_what_cannot_run_is_named_not_raised(self):
        problem = suites.make(1, 1, 64, 8, "float32", False)
        rows, skipped = run_problem(
            problem, [Contender("torch flash"), Contender("fa2")], None, LIMITS, seconds=0.01
        )
        assert [row.label for row in rows] == ["fa2"]
        assert [(s.label, bool(s.reason)) for s in skipped] == [("torch flash", True)]

    def test_output_is_poisoned_before_it_is_checked(self, monkeypatch):
        """A backend that writes nothing must not pass on what an earlier run left in the output."""
        from cufa.backends import cpu

        runs = []

        def lazy(plan, q, k, v, out, lse):
            runs.append(1)
            if len(runs) == 1:
                out[...] = 0

        monkeypatch.setattr(cpu, "run", lazy)
        problem = suites.make(1, 1, 16, 8, "float32", False)
        rows, _ = run_problem(problem, [Contender("fa2")], None, LIMITS, seconds=0.01)
        assert np.isnan(rows[0].error)


class TestLimits:
    def test_floor_names_what_binds(self):
        limits = Limits(copy_bytes=1e12, flops={"float16": 1e15, "tf32": 5e14}, exponentials=4e12)
        long = suites.make(1, 16, 8192, 128, "float16", False)
        seconds, bound = limits.floor(long)
        assert bound == "float16 products"
        assert seconds == pytest.approx(long.flops / 1e15)
        assert limits.floor(suites.make(1, 16, 8192, 8, "float16", False))[1] == "exponentials"
        assert limits.floor(suites.make(1, 16, 16, 128, "float16", False))[1] == "memory"
        assert limits.floor(suites.make(1, 16, 8192, 128, "float32", False))[1] == "tf32 products"

    def test_of_this_cpu(self):
        limits = measure_limits(None)
        assert limits.copy_bytes > 1e8
        assert min(limits.flops["float32"], limits.flops["float64"]) > 1e8
        assert limits.exponentials > 1e6


class TestSuites:
    @pytest.mark.parametrize("name", suites.SUITES)
    @pytest.mark.parametrize(
        "device", [None, Device.typical("sm_90"), Device.typical("sm_86")], ids=["cpu", "h200", "a10"]
    )
    def test_every_kernel_in_it_can_be_planned(self, name, device):
        if suites.SUITES[name].gpu_only and device is None:
            device = Device.typical("sm_80")
        for problem, contenders in suites.SUITES[name].cases(device):
            labels = [c.label for c in contenders]
            assert len(set(labels)) == len(labels), "labels tell contenders apart"
            for contender in contenders:
                if not contender.is_peer:
                    plan = make_plan(problem, device, contender.algorithm, config=contender.config)
                    assert plan.spec.algorithm == contender.algorithm

    def test_forward_covers_the_published_shapes(self):
        cases = [problem for problem, _ in suites.SUITES["forward"].cases(Device.typical("sm_90"))]
        assert len(cases) == 18
        for problem in cases:
            assert problem.batch * problem.seqlen_q == 16384
            assert problem.heads * problem.head_dim == 2048
            assert problem.dtype == "bfloat16"

    def test_fa3_is_forward_without_the_older_kernels(self):
        device = Device.typical("sm_90")
        cases = dict(suites.SUITES["fa3"].cases(device))
        assert list(cases) == [problem for problem, _ in suites.SUITES["forward"].cases(device)]
        assert {c.label for some in cases.values() for c in some} == {"fa3", "torch flash", "torch cudnn"}

    def test_awkward_covers_what_kernels_neglect(self):
        cases = list(suites.SUITES["awkward"].cases(Device.typical("sm_90")))
        problems = [problem for problem, _ in cases]
        for causal in (False, True):
            found = [p for p in problems if p.causal == causal]
            assert {p.seqlen_q for p in found if (p.batch, p.heads) == (1, 8)} == {512, 1024, 2048}
            assert any((p.seqlen_q, p.seqlen_k) == (128, 8192) for p in found)
            assert any((p.heads, p.kv_heads) == (32, 4) for p in found)
            assert {-1, 1} <= {(p.seqlen_q + 1) % 64 - 1 for p in found}
            assert {80, 96, 192} <= {p.head_dim for p in found}
        assert all({"torch flash", "torch cudnn"} <= {c.label for c in some} for _, some in cases)

    def test_ladder_is_hoppers(self):
        assert list(suites.SUITES["ladder"].cases(Device.typical("sm_80"))) == []
        cases = list(suites.SUITES["ladder"].cases(Device.typical("sm_90")))
        assert {problem.head_dim for problem, _ in cases} == {64, 128, 256}
        assert all(len(rungs) >= 3 for _, rungs in cases)

    def test_evidence_times_every_kernel(self):
        device = Device.typical("sm_90")
        timed = set()
        for name in suites.EVIDENCE:
            for problem, contenders in suites.SUITES[name].cases(device):
                for contender in contenders:
                    if not contender.is_peer:
                        plan = make_plan(problem, device, contender.algorithm, config=contender.config)
                        timed.add(plan.spec.name)
        assert timed == set(KERNELS)

    def test_the_fa1_sweep_has_the_published_blocks(self):
        _, contenders = next(suites.SUITES["fa1-blocks"].cases(Device.typical("sm_86")))
        published = {(64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8)}
        assert published <= {(c.config.block_q, c.config.block_kv, c.config.num_warps) for c in contenders}


def test_predicted_speedup_from_tiles():
    """The ratio tends to 2 and cannot reach it: the last query block sees every key block."""
    problem = suites.make(1, 1, 4096, 64, "float16", True)
    device = Device.typical("sm_90")
    slow, fast = (make_plan(problem, device, name, TileConfig(64, 64, 4)) for name in ("fa2_noskip", "fa2"))
    assert runner.predicted_speedup(slow, slow) == 1
    assert runner.predicted_speedup(slow, fast) == pytest.approx(64 * 64 / (64 * 65 / 2))


def test_torch_is_never_imported_unasked():
    problem = suites.make(1, 1, 64, 8, "float32", False)
    loaded = "torch" in sys.modules
    run_problem(problem, [Contender("fa2"), *(Contender(p) for p in peers.PEERS)], None, LIMITS, seconds=0.01)
    assert ("torch" in sys.modules) == loaded


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(scope="class")
    def device(self):
        from cufa.backends import cuda

        return cuda.current_device()

    def test_limits(self, device):
        limits = measure_limits(device)
        assert limits.copy_bytes > 1e11
        assert limits.flops["float16"] > limits.flops["tf32"] > 1e12
        assert limits.exponentials > 1e11
        assert set(limits.sustained_flops) == (
            {"float16", "bfloat16"} if device.arch.capability == 90 else set()
        )
        for kind, rate in limits.sustained_flops.items():
            assert limits.flops[kind] / 2 < rate <= limits.flops[kind]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_random_inputs_are_standard_normal(self, device, dtype):
        problem = suites.make(2, 4, 512, 64, dtype, False)
        q, k, v = (x.get().astype(np.float64) for x in runner.random_inputs(problem, on_gpu=True, seed=1))
        for x in (q, k, v):
            assert abs(x.mean()) < 0.01
            assert abs(x.std() - 1) < 0.01
        assert abs((q * k).mean()) < 0.01
        assert np.isfinite(q).all()

    def test_errors_beside_times(self, device):
        problem = suites.make(1, 4, 300, 64, "bfloat16", True)
        names = [s.algorithm for s in KERNELS.values() if "bfloat16" in s.dtypes]
        limits = Limits(1e12, {"bfloat16": 1e15}, 1e12)
        rows, skipped = run_problem(problem, [Contender(n) for n in names], device, limits, seconds=0.05)
        assert not skipped
        assert [row.label for row in rows] == names
        assert all(row.error < 3e-2 and 0 < row.seconds < 0.1 for row in rows)

    def test_torch_peers_compute_the_same(self, device):
        pytest.importorskip("torch")
        problem = suites.make(1, 4, 512, 64, "bfloat16", True)
        limits = Limits(1e12, {"bfloat16": 1e15}, 1e12)
        rows, _ = run_problem(problem, [Contender(p) for p in peers.PEERS], device, limits, seconds=0.05)
        assert {"torch flash", "torch math"} <= {row.label for row in rows}
        assert all(row.error < 5e-2 for row in rows)

    def test_torch_peers_align_causal_bottom_right(self, device):
        """Where lengths differ: flash computes what we do; cuDNN, which does not, says so."""
        pytest.importorskip("torch")
        problem = suites.make(1, 4, 100, 64, "bfloat16", True, seqlen_k=300)
        limits = Limits(1e12, {"bfloat16": 1e15}, 1e12)
        peer = [Contender("torch flash"), Contender("torch cudnn"), Contender("fa2")]
        rows, skipped = run_problem(problem, peer, device, limits, seconds=0.05)
        assert {row.label for row in rows} == {"torch flash", "fa2"}
        assert all(row.error < 5e-2 for row in rows)
        assert [(s.label, "top-left" in s.reason) for s in skipped] == [("torch cudnn", True)]

    def test_torch_peers_run_on_the_timed_stream(self, device):
        """Eight times the work takes more than twice the time; events see nothing of another stream."""
        pytest.importorskip("torch")
        limits = Limits(1e12, {"float16": 1e15}, 1e12)
        seconds = []
        for batch in (1, 8):
            problem = suites.make(batch, 16, 4096, 64, "float16", False)
            rows, _ = run_problem(problem, [Contender("torch flash")], device, limits, seconds=0.1)
            seconds.append(rows[0].seconds)
        assert seconds[1] > 2 * seconds[0] > 50e-6
