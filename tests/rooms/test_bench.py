"""The benchmark layer: statistics, references, contenders. Measurements are of the CPU path."""

from __future__ import annotations

import dataclasses
import sys

import ml_dtypes
import numpy as np
import pytest

from cufa import flash_attention, masks
from cufa.gpu.architectures import Device
from cufa.kernels import kernels_of
from cufa.kernels.forward.fa2 import Fa2Config
from cufa.measure import check, inputs, peers, runner, suites
from cufa.measure.cases import READ, Case, Contender, Work, contenders
from cufa.measure.decode_cases import make_decode
from cufa.measure.limits import Limits, measure_limits
from cufa.measure.runner import run_case
from cufa.plan.operation import OPERATIONS
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Packed, Padded
from cufa.problem.mask import CAUSAL, Band
from cufa.reference.dense import attention_reference, attention_reference_backward
from cufa.run.cpu.run import RUNS

LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)
GPU_LIMITS = Limits(1e12, {"bfloat16": 1e15, "float16": 1e15}, 1e12)


def checked(problem, lengths=None, on_gpu=False):
    """(what is expected of some rows, the whole result of the operation's reference)."""
    arrays = inputs.Inputs(problem, lengths, on_gpu=on_gpu, seed=3).arrays(problem)
    return check.sampled_reference(problem, arrays, lengths, seed=3), arrays


class TestSampledReference:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("mask", [False, True, Band(5, 3), Band(None, -7, "top-left")], ids=str)
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (30, 50), (50, 30)])
    def test_equals_the_reference(self, dtype, mask, seqlen_q, seqlen_k):
        problem = suites.make(2, 4, seqlen_q, 16, dtype, mask, kv_heads=2, seqlen_k=seqlen_k, softcap=20.0)
        expected, arrays = checked(problem)
        whole = attention_reference(*(arrays[x] for x in "qkv"), mask=problem.mask, softcap=20.0)
        assert {row[:1] for row in expected["o"]} == {(0,), (1,)}
        exact = dataclasses.replace(problem, out_dtype="float64")
        assert check.max_error(exact, {"o": whole}, expected) < 1e-14

    @pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
    @pytest.mark.parametrize("mask", [False, True, Band(5, 3), Band(None, -7, "top-left")], ids=str)
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (30, 50), (50, 30)])
    def test_of_gradients(self, dtype, mask, seqlen_q, seqlen_k):
        """Every row of every result: there are few. Up to what rounding out to the dtype changes."""
        problem = suites.make(2, 4, seqlen_q, 16, dtype, mask, kv_heads=2, seqlen_k=seqlen_k, softcap=2.0)
        problem = dataclasses.replace(problem, operation="backward")
        expected, arrays = checked(problem)
        assert {name: len(x) for name, x in expected.items()} == {"dq": 32, "dk": 32, "dv": 32}
        exact = attention_reference_backward(
            *(arrays[x] for x in ("dout", "q", "k", "v")), mask=problem.mask, softcap=2.0
        )
        results = dict(zip(("dq", "dk", "dv"), exact, strict=True))
        of_float64 = dataclasses.replace(problem, out_dtype="float64")
        limit = 1e-13 if dtype == "float64" else 2e-2
        assert check.max_error(of_float64, results, expected) < limit
        for x in results.values():
            x[:, :, -1, 0] += 0.5
            assert check.max_error(of_float64, results, expected) == pytest.approx(0.5, abs=limit)
            x[:, :, -1, 0] -= 0.5

    @pytest.mark.parametrize("page_size", [0, 16])
    @pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3"])
    def test_of_a_ragged_cache(self, cache_dtype, page_size):
        """The CPU path reads lengths, pages and bytes as kernels do."""
        problem = make_decode(
            3, 4, 2, 80, tokens=2, head_dim=16, mask=Band(30, 0), page_size=page_size, lengths_given=True,
            cache_dtype=cache_dtype,
        )  # fmt: skip
        case = Case(problem, (Contender("balanced"), Contender("fixed")), lengths=(70, 33, 2))
        rows, skipped = run_case(case, None, LIMITS, seconds=0.01)
        assert [row.label for row in rows] == ["balanced", "fixed"] and not skipped
        assert all(row.error < 2e-2 for row in rows)

    def test_the_first_and_last_row_of_eight_pairs_are_looked_at(self):
        problem = make_decode(20, 4, 2, 9, head_dim=8)
        expected, _ = checked(problem)
        rows = expected["o"]
        assert len({(batch, head // 2) for batch, head, _ in rows}) == 8
        assert len(rows) == 16

    def test_a_wrong_element_is_found_and_nan_is_no_small_error(self):
        problem = suites.make(1, 2, 20, 8, "float32", True)
        expected, arrays = checked(problem)
        out = attention_reference(*(arrays[x] for x in "qkv"), causal=True).astype(np.float32)
        out[0, 1, 19, 7] += 0.25
        assert check.max_error(problem, {"o": out}, expected) == pytest.approx(0.25, rel=1e-5)
        out[0, 1, 19, 6] = np.nan
        assert np.isnan(check.max_error(problem, {"o": out}, expected))

    def test_rows_that_see_nothing_are_zero(self):
        problem = suites.make(1, 1, 20, 8, "float32", True, seqlen_k=5)
        expected, _ = checked(problem)
        assert not any(value.any() for row, value in expected["o"].items() if row[2] < 15)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_poison_is_nan_in_every_type(dtype):
    x = np.zeros((2, 3), dtype)
    inputs.poison(x)
    assert np.isnan(x.astype(np.float64)).all()


class TestWork:
    def test_of_sequences_shorter_than_their_cache(self):
        problem = make_decode(2, 8, 2, 100, head_dim=16)
        work = Work.of(problem, (10, 30))
        assert work.scores == 8 * 40
        assert work.flops == 4 * 16 * 8 * 40
        assert work.io_bytes == 2 * (40 * 2 * 16 * 2) + 2 * (2 * 8 * 16 * 2)
        assert Work.of(problem) == Work.of(problem, (100, 100))

    def test_a_window_reads_what_it_sees(self):
        long, short = (
            Work.of(make_decode(1, 8, 2, n, mask=m)) for n, m in ((4096, Band(63, 0)), (64, CAUSAL))
        )
        assert long == short


class TestRunCase:
    def test_every_algorithm_on_the_cpu(self):
        problem = suites.make(1, 2, 150, 24, "float32", True)
        names = dict.fromkeys(spec.algorithm for spec in kernels_of("forward").values())
        rows, skipped = run_case(Case(problem, contenders(*names)), None, LIMITS, seconds=0.02)
        assert [row.label for row in rows] == list(names)
        assert not skipped
        for row in rows:
            assert row.error < 1e-5
            assert row.tflops == pytest.approx(problem.flops / row.seconds / 1e12)
            assert row.gbytes == pytest.approx(problem.io_bytes / row.seconds / 1e9)
            assert row.plan is not None

    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_the_backward_on_the_cpu(self, kv_heads):
        problem = suites.make(1, 4, 150, 24, "float32", True, kv_heads=kv_heads)
        problem = dataclasses.replace(problem, operation="backward")
        (row,), skipped = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.02)
        assert not skipped and row.error < 1e-5 and row.plan.spec.name == "fa2_backward"
        assert row.tflops == pytest.approx(2.5 * 4 * 24 * row.json["scores"] / row.seconds / 1e12)

    def test_inputs_of_the_backward_are_what_the_forward_gives(self):
        problem = suites.make(1, 2, 40, 16, "float32", True, softcap=3.0)
        arrays = inputs.Inputs(
            dataclasses.replace(problem, operation="backward"), on_gpu=False, seed=0
        ).arrays(dataclasses.replace(problem, operation="backward"))
        out, lse = attention_reference(*(arrays[x] for x in "qkv"), causal=True, softcap=3.0, return_lse=True)
        np.testing.assert_allclose(arrays["o"], out, atol=1e-5)
        np.testing.assert_allclose(arrays["lse"], lse, atol=1e-5)
        assert abs(arrays["dout"].std() - 1) < 0.1
        assert not any((arrays["dout"] == arrays[x]).any() for x in "qkvo")
        given = inputs.given_to(OPERATIONS["backward"], arrays)
        assert [name for name, x in given.items() if x is None] == ["dlse"]

    @pytest.mark.parametrize("operation", ["forward", "backward"])
    def test_documents_in_columns_and_packed(self, operation, monkeypatch):
        """The same numbers from both; the sums are checked where each sequence lies, and a slip of one row is found."""
        lengths = (17, 1, 40, 22)
        packed = dataclasses.replace(
            suites.make(6, 4, 40, 16, "float32", True, kv_heads=2), operation=operation,
            batch=8, lengths=Packed(160, 160, 2 * lengths, 2 * lengths),
        )  # fmt: skip
        problem = suites.make(2, 4, 80, 16, "float32", masks.documents(lengths), kv_heads=2)
        problem = dataclasses.replace(problem, operation=operation)
        found = (Contender("fa2"), Contender("fa2", name="packed", problem=packed))
        rows, skipped = run_case(Case(problem, found, "documents"), None, LIMITS, seconds=0.01)
        assert not skipped and [row.label for row in rows] == ["fa2", "packed"]
        assert all(row.error < 1e-5 for row in rows)
        assert len({row.json["flops"] for row in rows}) == 1
        made = inputs.Inputs(problem, on_gpu=False, seed=0)
        dense, behind = made.arrays(problem), made.arrays(packed)
        for name in {"q", "k", "v", "dout"} & dense.keys():
            assert behind[name].shape == (1, dense[name].shape[1], 160, 16)
            np.testing.assert_array_equal(behind[name][0, :, 80:], dense[name][1])
        if operation == "forward":
            expected = check.sampled_reference(packed, behind)
            out = flash_attention(*(dense[x] for x in "qkv"), mask=problem.mask, device="cpu")
            assert check.max_error(packed, {"o": inputs.as_packed(out)}, expected) < 1e-5
            assert check.max_error(packed, {"o": np.roll(inputs.as_packed(out), 1, 2)}, expected) > 0.1

    def test_padded_sequences(self):
        """Rows behind a sequence's end are not asked for; its own stand where they do."""
        problem = suites.make(3, 2, 30, 16, "float32", True, seqlen_k=50)
        problem = dataclasses.replace(problem, lengths=Padded((30, 7, 0), (50, 20, 9)))
        expected, arrays = checked(problem)
        assert {row[0] for row in expected["o"]} == {0, 1}
        assert max(row[2] for row in expected["o"] if row[0] == 1) == 6
        rows, skipped = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.01)
        assert not skipped and rows[0].error < 1e-5
        assert arrays["seqlens_k"].tolist() == [50, 20, 9]

    def test_inputs_differ_by_seed(self):
        problem = suites.make(1, 1, 64, 8, "bfloat16")
        first, again, other = (
            inputs.Inputs(problem, on_gpu=False, seed=s).arrays(problem) for s in (0, 0, 1)
        )
        assert first["q"].dtype == ml_dtypes.bfloat16
        assert (first["q"] == again["q"]).all()
        assert (first["q"] != other["q"]).any()
        assert (first["q"] != first["k"]).any()

    def test_views_of_one_cache_share_its_memory(self):
        """In pages, only the first keys, under other query heads: what a case compares reads the same bytes."""
        problem = make_decode(2, 8, 2, 64, head_dim=16)
        made = inputs.Inputs(problem, on_gpu=False, seed=0)
        whole = made.arrays(problem)
        paged = made.arrays(make_decode(2, 8, 2, 64, head_dim=16, page_size=16))
        start = made.arrays(make_decode(2, 4, 2, 16, head_dim=16))
        assert paged["k"].shape == (8, 2, 16, 16) and np.shares_memory(paged["k"], whole["k"])
        assert start["k"].shape == (2, 2, 16, 16) and np.shares_memory(start["k"], whole["k"])
        assert start["q"].shape == (2, 4, 1, 16)
        assert sorted(paged["block_table"].ravel()) == list(range(8))

    def test_what_cannot_run_is_named_not_raised(self):
        problem = suites.make(1, 1, 64, 8, "float32")
        rows, skipped = run_case(
            Case(problem, contenders("torch flash", READ, "fa2"), "x"), None, LIMITS, seconds=0.01
        )
        assert [(row.case, row.label) for row in rows] == [("x", "fa2")]
        assert [(s.label, bool(s.reason)) for s in skipped] == [("torch flash", True), (READ, True)]

    def test_output_is_poisoned_before_it_is_checked(self, monkeypatch):
        """A backend that writes nothing must not pass on what an earlier run left in the output."""
        runs = []

        def lazy(plan, given):
            runs.append(1)
            if len(runs) == 1:
                given["out"][...] = 0

        monkeypatch.setitem(RUNS, "forward", lazy)
        problem = suites.make(1, 1, 16, 8, "float32")
        rows, _ = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.01)
        assert np.isnan(rows[0].error) and not rows[0].is_number


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

    def test_a_cache_is_held_to_the_faster_of_copy_and_read(self):
        limits = Limits(1e12, {"bfloat16": 1e15}, 1e15, read_bytes=2e12)
        problem = make_decode(1, 32, 8, 1 << 20)
        seconds, bound = limits.floor(problem)
        assert bound == "memory" and seconds == pytest.approx(problem.io_bytes / 2e12)

    def test_of_this_cpu(self):
        limits = measure_limits(None)
        assert limits.copy_bytes > 1e6, (
            "per second; a busy machine may be a thousand times slower than an idle one"
        )
        assert min(limits.flops["float32"], limits.flops["float64"]) > 1e6
        assert limits.exponentials > 1e4


def test_predicted_speedup_from_tiles():
    """The ratio tends to 2 and cannot reach it: the last query block sees every key block."""
    problem = suites.make(1, 1, 4096, 64, "float16", True)
    device = Device.typical("sm_90")
    slow, fast = (make_plan(problem, device, name, Fa2Config(64, 64, 4)) for name in ("fa2_noskip", "fa2"))
    assert runner.predicted_speedup(slow, slow) == 1
    assert runner.predicted_speedup(slow, fast) == pytest.approx(64 * 64 / (64 * 65 / 2))


def test_torch_is_never_imported_unasked():
    problem = suites.make(1, 1, 64, 8, "float32", False)
    loaded = "torch" in sys.modules
    run_case(Case(problem, contenders("fa2", *peers.PEERS)), None, LIMITS, seconds=0.01)
    assert ("torch" in sys.modules) == loaded


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(scope="class")
    def device(self):
        from cufa.run.cuda import backend as cuda

        return cuda.current_device()

    @pytest.mark.alone
    def test_limits(self, device):
        limits = measure_limits(device)
        assert limits.copy_bytes > 1e11
        assert limits.flops["float16"] > limits.flops["tf32"] > 1e12
        assert limits.exponentials > 1e11
        assert limits.launch_seconds > 0
        assert limits.mma_flops.keys() == limits.flops.keys()
        assert all(1e12 < rate <= limits.flops[kind] for kind, rate in limits.mma_flops.items())
        assert set(limits.sustained_flops) == (
            {"float16", "bfloat16"} if device.arch.capability == 90 else set()
        )
        for kind, rate in limits.sustained_flops.items():
            assert limits.flops[kind] / 2 < rate <= limits.flops[kind]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_random_inputs_are_standard_normal(self, device, dtype):
        problem = suites.make(2, 4, 512, 64, dtype, False)
        arrays = inputs.Inputs(problem, on_gpu=True, seed=1).arrays(problem)
        q, k, v = (arrays[name].get().astype(np.float64) for name in "qkv")
        for x in (q, k, v):
            assert abs(x.mean()) < 0.01
            assert abs(x.std() - 1) < 0.01
        assert abs((q * k).mean()) < 0.01
        assert np.isfinite(q).all()

    def test_errors_beside_times(self, device):
        problem = suites.make(1, 4, 300, 64, "bfloat16", True)
        names = [s.algorithm for s in kernels_of("forward").values() if "bfloat16" in s.dtypes]
        rows, skipped = run_case(Case(problem, contenders(*names)), device, GPU_LIMITS, seconds=0.05)
        assert [row.label for row in rows] == names and not skipped
        assert all(row.error < 3e-2 and 0 < row.seconds < 0.1 for row in rows)

    def test_torch_peers_compute_the_same(self, device):
        pytest.importorskip("torch")
        problem = suites.make(1, 4, 512, 64, "bfloat16", True)
        rows, skipped = run_case(Case(problem, contenders(*peers.PEERS)), device, GPU_LIMITS, seconds=0.05)
        assert {"torch flash", "torch math"} <= {row.label for row in rows}, skipped
        assert all(row.error < 5e-2 for row in rows)

    def test_torch_peers_align_causal_bottom_right(self, device):
        """Where lengths differ: flash computes what we do; cuDNN, which does not, says so."""
        pytest.importorskip("torch")
        problem = suites.make(1, 4, 100, 64, "bfloat16", True, seqlen_k=300)
        case = Case(problem, contenders("torch flash", "torch cudnn", "fa2"))
        rows, skipped = run_case(case, device, GPU_LIMITS, seconds=0.05)
        assert {row.label for row in rows} == {"torch flash", "fa2"}, skipped
        assert all(row.error < 5e-2 for row in rows)
        assert [(s.label, "top-left" in s.reason) for s in skipped] == [("torch cudnn", True)]

    def test_torch_peers_run_on_the_timed_stream(self, device):
        """Eight times the work takes more than twice the time; events see nothing of another stream."""
        pytest.importorskip("torch")
        seconds = []
        for batch in (1, 8):
            problem = suites.make(batch, 16, 4096, 64, "float16", False)
            rows, skipped = run_case(
                Case(problem, contenders("torch flash")), device, GPU_LIMITS, seconds=0.1
            )
            assert rows, skipped  # with the peer's error
            seconds.append(rows[0].seconds)
        assert seconds[1] > 2 * seconds[0] > 50e-6

    @pytest.mark.parametrize("mask", [False, True, Band(100, 0), Band(64, 32)], ids=str)
    @pytest.mark.parametrize("name", ["flex", "fa4"])
    def test_peers_of_all_masks_compute_the_same(self, device, name, mask):
        if peers.family_of(name).missing:
            pytest.skip(peers.family_of(name).missing)
        problem = suites.make(
            2, 8, 512, 64, "bfloat16", mask, kv_heads=2, softcap=None if mask is True else 20.0
        )
        rows, skipped = run_case(Case(problem, contenders(name, "fa2")), device, GPU_LIMITS, seconds=0.05)
        assert not skipped and all(row.error < 5e-2 for row in rows)

    @pytest.mark.parametrize("operation", ["forward", "backward"])
    @pytest.mark.parametrize("of_heads", [False, True], ids=["documents", "of each head"])
    def test_flex_computes_the_same_under_columns(self, device, of_heads, operation):
        if peers.family_of("flex").missing:
            pytest.skip(peers.family_of("flex").missing)
        rows = np.arange(512) + np.random.default_rng(0).integers(1, 300, (2, 2, 512))
        mask = masks.evict(rows) if of_heads else masks.documents([100, 250, 162])
        problem = suites.make(2, 8, 512, 64, "bfloat16", mask, kv_heads=2)
        case = Case(dataclasses.replace(problem, operation=operation), contenders("flex", "fa2"))
        found, skipped = run_case(case, device, GPU_LIMITS, seconds=0.05)
        assert not skipped and all(row.error < 5e-2 for row in found)
