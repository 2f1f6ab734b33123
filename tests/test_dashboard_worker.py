"""The dashboard's run engine: real worker processes on the CPU, and what happens to their runs."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_support import DEVICE

from cufa.bench import decode, records
from cufa.bench.limits import Limits
from cufa.bench.runner import Contender
from cufa.bench.suites import contenders, make
from cufa.bench.timing import Timing
from cufa.dashboard.model.decode_rows import decode_rows
from cufa.dashboard.worker import client, measuring, serve
from cufa.dashboard.worker.jobs import Job, gpu_index
from cufa.dashboard.worker.store import Run, Status, Store, hold, is_locked
from cufa.kernels import KERNELS

PATIENCE = 90.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs whose worker serves one test after the other."""
    root = tmp_path_factory.mktemp("runs")
    yield root
    end_worker(Store(root))


@pytest.fixture
def store(shared: Path) -> Store:
    return Store(shared)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Store]:
    """A store of its own, without a worker."""
    found = Store(tmp_path / "runs")
    yield found
    end_worker(found)


def end_worker(store: Store) -> None:
    for device in ("cpu", "cuda:0"):
        pid = client.worker_pid(store, device)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


def small(seqlen: int = 64, *names: str) -> Job:
    case = make(1, 2, seqlen, 32, "float32", True), contenders(*(names or ("fa2",)))
    return Job("small", "cpu", (case,), 0.01)


def endless() -> Job:
    """Ten minutes of samples, unless it is stopped."""
    case = make(1, 1, 64, 32, "float32", True), contenders("fa2")
    return Job("endless", "cpu", (case,) * 4000, 0.15)


def wait_for(store: Store, run_id: str, wanted: Callable[[Run], bool]) -> Run:
    """Refreshing as a page would, until the run is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        client.refresh(store)
        run = store.read(run_id)
        if wanted(run):
            return run
        time.sleep(0.05)
    raise AssertionError(f"{run.status}: {run.message} {run.phase}\n{run.detail}")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def over(run: Run) -> bool:
    return run.status.is_over


# --- Jobs ------------------------------------------------------------------------------------------------


def test_a_job_survives_its_journey_through_json() -> None:
    configs = [c for spec in KERNELS.values() for c in spec.configs]
    wanted = (*(Contender("fa2", c) for c in configs), Contender("torch flash"), Contender("naive"))
    job = Job("all", "cuda:0", ((make(1, 8, 64, 64, "bfloat16", True, kv_heads=2), wanted),), 0.5)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize("content", [{}, {"title": "x", "device": "cpu", "seconds": 1, "cases": [{}]}])
def test_a_damaged_job_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Job.from_json(content)


def test_device_names() -> None:
    assert gpu_index("cpu") is None
    assert gpu_index("cuda:3") == 3
    with pytest.raises(ValueError, match="not known"):
        gpu_index("tpu:0")


# --- Runs on the CPU --------------------------------------------------------------------------------------


def test_a_run_measures_and_is_recorded_as_the_benchmark_records(store: Store) -> None:
    run_id = client.submit(store, small(64, "naive", "fa1", "fa2"))
    run = wait_for(store, run_id, over)
    assert run.status is Status.DONE, run.message
    assert [row["label"] for row in run.rows] == ["naive", "fa1", "fa2"]
    for row in run.rows:
        assert len(row["samples_ns"]) >= 10
        assert row["p50_ns"] == pytest.approx(np.median(row["samples_ns"]), abs=1)
        assert row["max_error"] < 1e-5
        assert "because" in row["plan"]
    assert run.record["schema"] == records.SCHEMA
    assert run.record["environment"]["device"] == records.environment(None)["device"]
    saved = json.loads((store.folder(run_id) / "record.json").read_text())
    assert saved["rows"] == run.rows
    assert Store(store.root).read(run_id) == run  # a second application reads the same


def test_one_worker_takes_turns_and_clients_share_it(store: Store) -> None:
    other = Store(store.root)  # a second browser, or a second application
    ids = [client.submit(store, small()), client.submit(other, small()), client.submit(store, small())]
    for run_id in ids:
        assert wait_for(other, run_id, over).status is Status.DONE
    pids = {json.loads((store.folder(i) / "started.json").read_text())["pid"] for i in ids}
    assert pids == {client.worker_pid(store, "cpu")}
    spans = []
    for run_id in ids:
        lines = (store.folder(run_id) / "progress.jsonl").read_text().splitlines()
        spans.append((json.loads(lines[0])["time"], json.loads(lines[-1])["time"]))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert store.ids()[:3] == ids[::-1]


def test_cancelling_keeps_what_was_measured_and_the_queue_goes_on(store: Store) -> None:
    running, waiting, last = (client.submit(store, job) for job in (endless(), endless(), small()))
    wait_for(store, running, lambda run: len(run.rows) >= 2)
    assert store.read(waiting).status is Status.QUEUED
    store.cancel(waiting)
    assert store.read(waiting).status is Status.CANCELLED
    pid = client.worker_pid(store, "cpu")
    store.cancel(running)
    run = wait_for(store, running, over)
    assert run.status is Status.CANCELLED
    assert len(run.rows) >= 2
    assert wait_for(store, last, over).status is Status.DONE
    assert client.worker_pid(store, "cpu") == pid
    assert not (store.folder(waiting) / "started.json").exists()


def test_a_run_deep_in_one_long_call_is_cut_off(store: Store) -> None:
    case = make(4, 16, 8192, 128, "float32", False), contenders("fa2")  # a minute a call
    cut, following = client.submit(store, Job("deep", "cpu", (case,), 0.1)), client.submit(store, small())
    wait_for(store, cut, lambda run: "timing" in run.phase)
    store.cancel(cut)
    run = wait_for(store, cut, over)
    assert run.status is Status.CANCELLED
    assert wait_for(store, following, over).status is Status.DONE


def test_samples_are_seen_while_they_are_taken(store: Store) -> None:
    case = make(1, 2, 256, 64, "float32", True), contenders("naive", "fa2")
    run_id = client.submit(store, Job("watched", "cpu", (case,), 1.5))
    seen = wait_for(store, run_id, lambda run: bool(run.live)).live
    assert set(seen) == {"naive", "fa2"}
    run = wait_for(store, run_id, over)
    assert run.status is Status.DONE
    assert run.live == {}  # they are in the rows now
    for row in run.rows:
        taken = seen[row["label"]]
        assert row["samples_ns"][: len(taken)] == taken


def test_a_run_that_is_over_can_be_deleted(store: Store) -> None:
    kept, gone = client.submit(store, small()), client.submit(store, small())
    for run_id in (kept, gone):
        wait_for(store, run_id, over)
    other = Store(store.root)  # a second application, that has read it
    assert other.read(gone).rows
    assert store.size(gone) > 1000
    store.delete(gone)
    assert not store.folder(gone).exists()
    assert next(iter(other.ids())) == kept
    other.delete(gone)  # somebody else was faster
    assert other.size(gone) == 0
    assert not list(store.root.glob(".deleted-*"))


def test_a_run_that_goes_on_is_not_deleted(store: Store) -> None:
    running = client.submit(store, endless())
    wait_for(store, running, lambda run: len(run.rows) >= 1)
    with pytest.raises(ValueError, match="cancelled, not deleted"):
        store.delete(running)
    store.cancel(running)
    assert wait_for(store, running, over).rows


def test_a_killed_worker_is_noticed_and_the_next_run_is_served(store: Store) -> None:
    killed, following = client.submit(store, endless()), client.submit(store, small())
    before = wait_for(store, killed, lambda run: len(run.rows) >= 2)
    pid = client.worker_pid(store, "cpu")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run = wait_for(store, killed, over)
    assert run.status is Status.CRASHED
    assert "died" in run.message
    assert run.rows[:2] == before.rows[:2]  # nothing recorded is lost
    assert wait_for(store, following, over).status is Status.DONE
    assert "SIGKILL" in Store(store.root).read(killed).message
    assert client.worker_pid(store, "cpu") != pid


def test_a_crash_leaves_its_traceback(store: Store) -> None:
    run_id = client.submit(store, endless())
    wait_for(store, run_id, lambda run: len(run.rows) >= 1)
    pid = client.worker_pid(store, "cpu")
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    run = wait_for(store, run_id, lambda run: "SIGSEGV" in run.message)
    assert run.status is Status.CRASHED
    assert "Segmentation fault" in run.detail


def test_too_large_a_problem_is_out_of_memory_and_the_rest_is_measured(store: Store) -> None:
    too_large = make(64, 64, 1 << 20, 256, "float32", False)
    cases = ((too_large, contenders("fa2")), *small().cases)
    run = wait_for(store, client.submit(store, Job("large", "cpu", cases, 0.01)), over)
    assert run.status is Status.FAILED
    assert run.message.startswith("Out of memory: needs about")
    assert len(run.rows) == 1
    assert run.record["failed"][0]["kind"] == "out of memory"


def test_no_gpu_is_a_failure_with_its_reason(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = wait_for(store, client.submit(store, dataclasses.replace(small(), device="cuda:0")), over)
    assert run.status is Status.FAILED
    assert run.message
    assert "Traceback" in run.detail
    assert run.rows == []


def test_a_worker_leaves_when_idle_and_another_comes(fresh: Store) -> None:
    for _ in range(2):
        wait_until(lambda: started(fresh))
        wait_until(lambda: client.worker_pid(fresh, "cpu") is None)


def started(store: Store) -> bool:
    assert client.ensure_worker(store, "cpu", idle=1.0) == ""
    return client.worker_pid(store, "cpu") is not None


@pytest.mark.gpu
def test_a_gpu_run_is_measured_in_the_worker(fresh: Store) -> None:
    names = ("naive", "fa1", "fa2", "fa3", "torch flash")
    job = Job("gpu", "cuda:0", ((make(1, 8, 512, 64, "float16", True), contenders(*names)),), 1.0)
    run_id = client.submit(fresh, job)
    run = wait_for(fresh, run_id, over)
    assert run.status is Status.DONE, f"{run.message}\n{run.detail}"
    ours = {row["label"]: row for row in run.rows if "kernel" in row}
    assert {"naive", "fa1", "fa2"} <= set(ours)
    for row in ours.values():
        assert row["max_error"] < 5e-3
        assert row["prepare_seconds"] > 0
        assert 0 < row["of_ceiling"] < 1.2
    assert all("because" in row["plan"] for row in ours.values())
    assert run.record["environment"]["gpu"]
    told = [json.loads(x) for x in (fresh.folder(run_id) / "progress.jsonl").read_text().splitlines()]
    seen = [event for event in told if event["event"] == "samples"]
    assert {label for event in seen for label in event["samples_ns"]} >= set(ours)


@pytest.mark.gpu
def test_a_gpu_run_is_cancelled_and_a_killed_one_replaced(fresh: Store) -> None:
    case = make(1, 8, 512, 64, "float16", True), contenders("fa2")
    endless, short = Job("endless", "cuda:0", (case,) * 400, 2.0), Job("short", "cuda:0", (case,), 0.1)
    cancelled, killed = client.submit(fresh, endless), client.submit(fresh, endless)
    wait_for(fresh, cancelled, lambda run: len(run.rows) >= 1)
    fresh.cancel(cancelled)
    assert wait_for(fresh, cancelled, over).status is Status.CANCELLED
    before = wait_for(fresh, killed, lambda run: len(run.rows) >= 1)
    pid = client.worker_pid(fresh, "cuda:0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run = wait_for(fresh, killed, over)
    assert run.status is Status.CRASHED
    assert run.rows[:1] == before.rows[:1]
    assert wait_for(fresh, client.submit(fresh, short), over).status is Status.DONE
    assert client.worker_pid(fresh, "cuda:0") != pid


# --- Folders that cannot be written ----------------------------------------------------------------------


@pytest.mark.parametrize("root", ["/proc/nowhere/runs", "/dev/null/runs"])
def test_an_unwritable_folder_is_said_at_once(root: str) -> None:
    with pytest.raises(OSError):
        client.submit(Store(Path(root)), small())
    assert Store(Path(root)).all() == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "runs")
    job = dataclasses.replace(small(), cases=small().cases * 400, seconds=0.02)
    run = wait_for(store, client.submit(store, job), over)
    end_worker(store)
    assert run.status is Status.FAILED
    assert "No space left on device" in run.message
    assert len(run.rows) > 3  # those that were measured before
    with pytest.raises(OSError, match="No space left"):
        client.submit(store, small())
    assert [found.id for found in store.all()] == [run.id]


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_mid_run_is_said_in_the_reserved_place(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = fresh.submit(small(64, "naive", "fa2"))
    size = (fresh.folder(run_id) / "outcome.json").stat().st_size
    monkeypatch.setattr(records, "save", no_space)
    monkeypatch.setattr("cufa.dashboard.worker.store.write_json", no_space)
    assert serve.Worker(fresh, fresh.read(run_id)).run() is False
    run = Store(fresh.root).read(run_id)
    assert run.status is Status.FAILED
    assert "No space left on device" in run.message
    assert (fresh.folder(run_id) / "outcome.json").stat().st_size == size
    assert len(run.rows) == 2  # the rows were streamed before


def test_a_disk_that_fills_while_events_are_written(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring.measure

    def measure(job: Job, tell: measuring.Tell) -> measuring.Result:
        def full_after_one(event: dict[str, Any]) -> None:
            tell(event)
            if event["event"] == "row":
                raise measuring.CannotWrite(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return real(job, full_after_one)

    monkeypatch.setattr(measuring, "measure", measure)
    run_id = fresh.submit(small(64, "naive", "fa2"))
    serve.Worker(fresh, fresh.read(run_id)).run()
    run = fresh.read(run_id)
    assert run.status is Status.FAILED
    assert "cannot be written" in run.message
    assert len(run.rows) == 1


def test_a_long_log_keeps_its_beginning_and_its_end(fresh: Store) -> None:
    run_id = fresh.submit(small())
    (fresh.folder(run_id) / "started.json").write_text("{}")  # and nobody holds its lock
    (fresh.folder(run_id) / "log.txt").write_text("Fatal Python error\n" + "frame\n" * 1000 + "the end")
    detail = fresh.read(run_id).detail
    assert detail.startswith("Fatal Python error")
    assert detail.endswith("the end")
    assert len(detail) == 2500
    fresh.finish(run_id, Status.CRASHED, "m", "x" * 3000)
    assert len(fresh.read(run_id).detail) == 2500


def test_half_a_line_is_not_an_event(fresh: Store) -> None:
    run_id = fresh.submit(small())
    events = [{"event": "phase", "text": "timing"}, {"event": "row", "record": {"label": "fa2"}}]
    text = "".join(json.dumps(e) + "\n" for e in events) + '{"event": "row", "reco'
    (fresh.folder(run_id) / "progress.jsonl").write_text(text)
    assert fresh.read(run_id).rows == [{"label": "fa2"}]


def test_strange_things_in_the_folder_are_passed_over(fresh: Store) -> None:
    run_id = fresh.submit(small())
    (fresh.root / "20260101T000000.000000-abcdef").mkdir()
    (fresh.root / "notes.txt").write_text("mine")
    assert [run.id for run in fresh.all()] == [run_id]
    with pytest.raises(KeyError):
        fresh.read("../../etc")


# --- Errors of kernels, simulated ---------------------------------------------------------------------------


class CUDARuntimeError(RuntimeError):
    """By the name that CuPy gives it."""


def test_a_kernel_error_ends_the_run_and_the_process(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(measuring, "run_problem", lost)
    job = dataclasses.replace(small(), cases=small().cases * 3)
    run_id = fresh.submit(job)
    assert serve.Worker(fresh, fresh.read(run_id)).run() is True  # the caller replaces the process
    run = fresh.read(run_id)
    assert run.status is Status.FAILED
    assert run.message.startswith("The kernel failed on the GPU: cudaErrorIllegalAddress")
    assert len(run.record["failed"]) == 1  # nothing more is tried in a lost context


def test_other_errors_do_not_stop_the_next_shape(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measuring.run_problem, []

    def first_fails(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such luck")
        return real(*args, **options)

    monkeypatch.setattr(measuring, "run_problem", first_fails)
    run_id = fresh.submit(dataclasses.replace(small(), cases=small().cases * 2))
    assert serve.Worker(fresh, fresh.read(run_id)).run() is False
    run = fresh.read(run_id)
    assert (run.status, len(run.rows), run.message) == (Status.FAILED, 1, "RuntimeError: no such luck")


def test_a_gpu_run_compiles_before_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up GPU: which kernels are prepared, and that one that does not serve the type is not."""
    prepared = []

    class Backend:
        @staticmethod
        def prepare(plan: Any) -> None:
            prepared.append(plan.spec.name)

    monkeypatch.setitem(__import__("sys").modules, "cufa.backends.cuda", Backend)
    monkeypatch.setattr("cufa.backends.cuda", Backend, raising=False)
    problem = make(1, 8, 128, 64, "float32", True)
    told: list[dict[str, Any]] = []
    seconds = measuring._prepare(problem, contenders("fa2", "fa1", "torch flash"), DEVICE, told.append)
    assert list(seconds) == ["fa2"]  # FA1 is made for 16-bit types
    assert prepared == ["fa2_forward_f32"]
    assert [e["text"] for e in told] == ["compiling fa2", "compiling fa1"]


def test_decoding_is_timed_case_by_case(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up GPU, with made-up times: what reaches the run's folder and what is read from it."""
    cases = tuple(decode.cases())
    limits = Limits(4e12, {"bfloat16": 7e14}, 4e12)

    def run_case(case: decode.DecodeCase, device: object, **options: Any) -> list[decode.DecodeRow]:
        assert options["seconds"] == 0.5
        if "ragged" in case.title:
            raise MemoryError("too large")
        times = {decode.READ: 1e-5, **{c.label: 2e-5 for c in case.contenders}}
        plans = {c.label: c.plan(DEVICE) for c in case.contenders}
        return [
            decode.DecodeRow(case.title, label, case.problem, Timing((t,) * 3), 1000, 0.0, plans.get(label))
            for label, t in times.items()
        ]

    monkeypatch.setattr(decode, "run_case", run_case)
    monkeypatch.setattr(measuring, "_device", lambda name: DEVICE)
    monkeypatch.setattr(measuring, "_limits", lambda device: limits)
    monkeypatch.setattr(measuring, "_free", lambda device: None)
    monkeypatch.setattr(records, "environment", lambda device: {"device": "Made-up GPU"})
    run_id = fresh.submit(Job("suite decode", "cuda:0", (), 0.5, cases))
    serve.Worker(fresh, fresh.read(run_id)).run()
    run = Store(fresh.root).read(run_id)
    assert run.status is Status.FAILED
    assert run.message == "Out of memory: too large"
    contenders = sum(len(case.contenders) for case in cases if "ragged" not in case.title)
    assert run.timings == contenders
    assert run.cases_done == len(cases)
    rows = decode_rows(run.decode_rows)
    assert len(rows) == contenders
    assert {row.of_read for row in rows} == {0.5}
    (fresh.folder(run_id) / "record.json").unlink()  # as if the worker had died before
    assert Store(fresh.root).read(run_id).decode_rows == run.decode_rows


@pytest.mark.gpu
def test_decoding_is_timed_on_a_gpu(fresh: Store) -> None:
    case = next(iter(decode.cases()))
    run_id = client.submit(fresh, Job("decode", "cuda:0", (), 0.2, (case,)))
    run = wait_for(fresh, run_id, over)
    assert run.status is Status.DONE, f"{run.message}\n{run.detail}"
    rows = decode_rows(run.decode_rows)
    ours = next(row for row in rows if row.label == "flash_decode")
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
    """Nor do these tests: a bare machine with a GPU has numpy, cupy and pytest."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('streamlit', 'plotly', 'PIL', 'playwright')))"
    code = f"{missing}; sys.path.insert(0, 'tests'); import test_dashboard_worker"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Locks -------------------------------------------------------------------------------------------------


def test_a_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    held = hold(file, wait=False)
    assert is_locked(file)
    assert hold(file, wait=False) is None
    held.close()
    assert not is_locked(file)
