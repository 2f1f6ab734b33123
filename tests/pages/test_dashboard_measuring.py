"""One job in a worker: failing kernels, suites, ceilings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dashboard_run_support import over, small, wait_for
from dashboard_support import DEVICE

from cufa.dashboard.worker import client, measuring, serve
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store
from cufa.measure.cases import READ, Case, Work, contenders
from cufa.measure.limits import Limits
from cufa.measure.measured import Measured, row_of
from cufa.measure.power import Power
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES, make
from cufa.measure.timing import Load, Timing
from cufa.problem.mask import CAUSAL


@pytest.fixture
def measured_rows() -> Any:
    """Rows as pages read them: the only part of these tests that needs Streamlit."""
    pytest.importorskip("streamlit", reason="pages need streamlit: pip install 'cufa[dashboard]'")
    from cufa.dashboard.model import measured_rows

    return measured_rows


# --- Errors of kernels, simulated ---------------------------------------------------------------------------


class CUDARuntimeError(RuntimeError):
    """CuPy's error has this name."""


def test_a_kernel_error_ends_the_run_and_the_process(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(measuring, "run_case", lost)
    job = dataclasses.replace(small(), cases=small().cases * 3)
    run_id = fresh.submit(job)
    assert serve.Worker(fresh, fresh.read(run_id)).run() is True  # the caller replaces the process
    run = fresh.read(run_id)
    assert run.status is Status.FAILED
    assert run.message.startswith("The kernel failed on the GPU: cudaErrorIllegalAddress")
    assert len(run.record["failed"]) == 1  # no further case runs in a lost context


def test_other_errors_do_not_stop_the_next_shape(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measuring.run_case, []

    def first_fails(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such luck")
        return real(*args, **options)

    monkeypatch.setattr(measuring, "run_case", first_fails)
    run_id = fresh.submit(dataclasses.replace(small(), cases=small().cases * 2))
    assert serve.Worker(fresh, fresh.read(run_id)).run() is False
    run = fresh.read(run_id)
    assert (run.status, len(run.rows), run.message) == (Status.FAILED, 1, "RuntimeError: no such luck")


def test_a_gpu_run_compiles_before_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up GPU: kernels that serve the type are compiled, others are not."""
    prepared = []

    class Backend:
        @staticmethod
        def prepare(plan: Any) -> None:
            prepared.append(plan.spec.name)

    monkeypatch.setitem(__import__("sys").modules, "cufa.run.cuda.backend", Backend)
    monkeypatch.setattr("cufa.run.cuda.backend", Backend, raising=False)
    case = Case(make(1, 8, 128, 64, "float32", CAUSAL), contenders("fa2", "fa3", "torch flash", READ))
    told: list[dict[str, Any]] = []
    seconds = measuring._prepare(case, DEVICE, told.append)
    assert list(seconds) == ["fa2"]  # FA3 is made for 16-bit types
    assert prepared == ["fa2_forward_f32"]
    assert [e["text"] for e in told] == ["compiling fa2", "compiling fa3"]


def test_a_suite_is_timed_case_by_case(
    fresh: Store, monkeypatch: pytest.MonkeyPatch, measured_rows: Any
) -> None:
    """On a made-up GPU with made-up times: the rows in the folder, and the measurements read back."""
    cases = tuple(SUITES["decode"].cases(DEVICE))
    limits = Limits(4e12, {"bfloat16": 7e14}, 4e12)

    def run_case(
        case: Case, device: object, limits: object, **options: Any
    ) -> tuple[list[Measured], list[Any]]:
        assert (options["seconds"], options["regime"]) == (0.5, Regime.SUSTAINED)
        if "ragged" in case.name:
            raise MemoryError("too large")
        times = {c.label: 1e-5 if c.algorithm == READ else 2e-5 for c in case.contenders}
        plans = {c.label: c.plan(case.problem, DEVICE) if c.is_ours else None for c in case.contenders}
        load = Load(10, 2, 0.5, 0.0, Power(600.0, 1500.0, 0.01))
        work, floor = Work.of(case.problem), (1e-5, "memory")
        rows = [
            row_of(
                case.name, label, case.problem, Timing((t,) * 3, Regime.SUSTAINED, load=load), work, floor,
                error=0.0, plan=plans[label],
            )
            for label, t in times.items()
        ]  # fmt: skip
        return rows, []

    monkeypatch.setattr(measuring, "run_case", run_case)
    monkeypatch.setattr(measuring, "_device", lambda name: DEVICE)
    monkeypatch.setattr(measuring, "_limits", lambda device: limits)
    monkeypatch.setattr(measuring, "_free", lambda device: None)
    monkeypatch.setattr(measuring, "_prepare", lambda case, device, tell: {})
    monkeypatch.setattr(
        "cufa.measure.measured.environment", lambda device: {"device": "Made-up GPU", "arch": "sm_90"}
    )
    run_id = fresh.submit(Job("suite decode", "cuda:0", cases, 0.5, Regime.SUSTAINED))
    serve.Worker(fresh, fresh.read(run_id)).run()
    run = Store(fresh.root).read(run_id)
    assert run.status is Status.FAILED
    assert run.message == "Out of memory: too large"
    timed = [case for case in cases if "ragged" not in case.name]
    assert run.timings == sum(len(case.contenders) for case in timed)
    assert run.cases_done == len(cases)
    rows = measured_rows.of_run(run)
    assert len(rows) == run.timings - len(timed)  # the plain read is the reference of the other rows
    assert {row.of_read for row in rows} == {0.5}
    assert {row.load["watts"] for row in rows} == {600.0}
    assert "600 W" in rows[0].load_text
    (fresh.folder(run_id) / "record.json").unlink()  # as if the worker had died
    assert Store(fresh.root).read(run_id).rows == run.rows


@pytest.mark.gpu
@pytest.mark.parametrize("regime", list(Regime))
def test_decoding_is_timed_on_a_gpu(fresh: Store, regime: Regime, measured_rows: Any) -> None:
    case = next(iter(SUITES["decode"].cases(DEVICE)))
    run_id = client.submit(fresh, Job("decode", "cuda:0", (case,), 0.2, regime))
    run = wait_for(fresh, run_id, over)
    assert run.status is Status.DONE, f"{run.message}\n{run.detail}"
    ours = next(row for row in measured_rows.of_run(run) if row.row.is_ours)
    assert ours.error is not None
    assert ours.error < 1e-2
    assert 0 < ours.of_read < 1.5


def test_old_ceilings_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []

    def limits(device: object) -> Limits:
        return Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)

    limits.cache_clear = lambda: cleared.append(1)  # type: ignore[attr-defined]
    monkeypatch.setattr(measuring, "measure_limits", limits)
    monkeypatch.setattr(measuring, "_limits_measured", {})
    for _ in range(2):
        measuring.measure(small(), lambda event: None)
    assert len(cleared) == 1
    monkeypatch.setattr(measuring, "_LIMITS_SECONDS", 0.0)
    measuring.measure(small(), lambda event: None)
    assert len(cleared) == 2


def test_worker_and_client_need_neither_streamlit_nor_plotly() -> None:
    """The worker's tests need neither: a bare GPU machine has numpy, cupy and pytest."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('streamlit', 'plotly', 'PIL', 'playwright')))"
    code = (
        f"{missing}; sys.path[:0] = ['tests', 'tests/support', 'tests/pages']; import test_dashboard_worker"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
