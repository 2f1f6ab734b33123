"""The run engine with real worker processes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_run_support import endless, over, small, wait_for, wait_until, worker_pid
from dashboard_support import DEVICE

from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job, gpu_index
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store
from cufa.kernels import TileConfig, kernels_of
from cufa.measure import machine, measured
from cufa.measure.cases import Case, Contender, contenders
from cufa.measure.decode_cases import make_decode
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES, make
from cufa.plan.operation import OPERATIONS
from cufa.problem.mask import CAUSAL, Band

# --- Jobs ------------------------------------------------------------------------------------------------


def test_a_job_survives_its_journey_through_json() -> None:
    wanted = {
        operation: tuple(Contender(s.algorithm, c) for s in kernels_of(operation).values() for c in s.configs)
        for operation in OPERATIONS
    }
    problems = (
        make(1, 8, 64, 64, "bfloat16", CAUSAL, kv_heads=2),
        make(1, 8, 64, 64, "float16", Band(5, None, -3), softcap=30.0),
        make_decode(1, 8, 2, 4096),
    )
    others = (Contender("torch flash"), Contender("naive"), Contender("fa2", TileConfig(16, 24, num_warps=0)))
    cases = tuple(Case(p, (*wanted[p.operation], *others)) for p in problems[:2])
    cases += (Case(problems[2], wanted["decode"]),)
    job = Job("all", "cuda:0", cases, 0.5)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize("regime", list(Regime))
def test_a_job_of_any_operation_survives_its_journey(regime: Regime) -> None:
    cases = tuple(case for suite in SUITES.values() for case in suite.cases(DEVICE))
    job = Job("all suites", "cuda:0", cases, 3.0, regime)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert {case.problem.operation for case in job.cases} == set(OPERATIONS)


def test_a_job_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="it has schema 1; this version reads schema 2"):
        Job.from_json({"title": "old", "device": "cuda:0", "seconds": 0.5, "cases": []})


@pytest.mark.parametrize(
    "content", [{}, {"schema": 9}, {"title": "x", "device": "cpu", "seconds": 1, "cases": [{}]}]
)
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
    assert run.record["schema"] == measured.SCHEMA
    assert run.record["environment"]["device"] == machine.environment(None)["device"]
    saved = json.loads((store.folder(run_id) / "record.json").read_text())
    assert saved["rows"] == run.rows
    assert Store(store.root).read(run_id) == run  # a second application reads the same


def test_one_worker_takes_turns_and_clients_share_it(store: Store) -> None:
    other = Store(store.root)  # a second browser, or a second application
    ids = [client.submit(store, small()), client.submit(other, small()), client.submit(store, small())]
    for run_id in ids:
        assert wait_for(other, run_id, over).status is Status.DONE
    pids = {json.loads((store.folder(i) / "started.json").read_text())["pid"] for i in ids}
    assert pids == {worker_pid(store, "cpu")}
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
    pid = worker_pid(store, "cpu")
    store.cancel(running)
    run = wait_for(store, running, over)
    assert run.status is Status.CANCELLED
    assert len(run.rows) >= 2
    assert wait_for(store, last, over).status is Status.DONE
    assert worker_pid(store, "cpu") == pid
    assert not (store.folder(waiting) / "started.json").exists()


def test_a_run_deep_in_one_long_call_is_cut_off(store: Store) -> None:
    case = Case(make(4, 16, 8192, 128, "float32"), contenders("fa2"))  # a minute for one call
    cut, following = client.submit(store, Job("deep", "cpu", (case,), 0.1)), client.submit(store, small())
    wait_for(store, cut, lambda run: "timing" in run.phase)
    store.cancel(cut)
    run = wait_for(store, cut, over)
    assert run.status is Status.CANCELLED
    assert wait_for(store, following, over).status is Status.DONE


def test_samples_are_told_while_they_are_taken(store: Store, tmp_path: Path) -> None:
    """A folder just before its first result."""
    case = Case(make(1, 2, 256, 64, "float32", CAUSAL), contenders("naive", "fa2"))
    run_id = client.submit(store, Job("watched", "cpu", (case,), 0.6))
    run = wait_for(store, run_id, over)
    assert run.status is Status.DONE
    assert run.live == {}  # the rows have them
    before = Store(tmp_path)
    folder = before.folder(run_id)
    shutil.copytree(store.folder(run_id), folder)
    lines = (folder / "progress.jsonl").read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if json.loads(line)["event"] == "row")
    (folder / "progress.jsonl").write_text("".join(lines[:first]))
    (folder / "outcome.json").write_text(" ")
    (folder / "record.json").unlink()
    seen = before.read(run_id).live
    assert set(seen) == {"naive", "fa2"}
    for row in run.rows:
        taken = seen[row["label"]]
        assert taken and row["samples_ns"][: len(taken)] == taken


def test_a_run_that_is_over_can_be_deleted(store: Store) -> None:
    kept, gone = client.submit(store, small()), client.submit(store, small())
    for run_id in (kept, gone):
        wait_for(store, run_id, over)
    other = Store(store.root)  # a second application that has read the run
    assert other.read(gone).rows
    assert store.size(gone) > 1000
    store.delete(gone)
    assert not store.folder(gone).exists()
    assert next(iter(other.ids())) == kept
    other.delete(gone)  # the other application deleted it first
    assert other.size(gone) == 0
    assert not list(store.root.glob(".deleted-*"))


def test_a_run_that_goes_on_is_not_deleted(store: Store) -> None:
    running = client.submit(store, endless())
    wait_for(store, running, lambda run: len(run.rows) >= 1)
    with pytest.raises(ValueError, match="cancelled, not deleted"):
        store.delete(running)
    store.cancel(running)
    assert wait_for(store, running, over).rows


@pytest.mark.in_turn
def test_a_killed_worker_is_noticed_and_the_next_run_is_served(store: Store) -> None:
    killed, following = client.submit(store, endless()), client.submit(store, small())
    before = wait_for(store, killed, lambda run: len(run.rows) >= 2)
    pid = worker_pid(store, "cpu")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run = wait_for(store, killed, over)
    assert run.status is Status.CRASHED
    assert "died" in run.message
    assert run.rows[:2] == before.rows[:2]  # nothing recorded is lost
    assert wait_for(store, following, over).status is Status.DONE
    wait_for(Store(store.root), killed, lambda run: "SIGKILL" in run.message)
    assert worker_pid(store, "cpu") != pid


@pytest.mark.in_turn
def test_a_crash_leaves_its_traceback(store: Store) -> None:
    run_id = client.submit(store, endless())
    wait_for(store, run_id, lambda run: len(run.rows) >= 1)
    pid = worker_pid(store, "cpu")
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    run = wait_for(store, run_id, lambda run: "SIGSEGV" in run.message)
    assert run.status is Status.CRASHED
    assert "Segmentation fault" in run.detail


@pytest.mark.parametrize("regime", list(Regime))
def test_any_operation_runs_under_any_mask_and_regime(store: Store, regime: Regime) -> None:
    window = make(1, 2, 128, 32, "float32", Band(20, 0), softcap=30.0)
    decode = make_decode(2, 4, 2, 300, head_dim=32, dtype="float32", mask=Band(99, 0))
    cases = (Case(window, contenders("fa2")), Case(decode, contenders("auto", "balanced")))
    run = wait_for(store, client.submit(store, Job("any", "cpu", cases, 0.05, regime)), over)
    assert run.status is Status.DONE, run.message
    assert [row["label"] for row in run.rows] == ["fa2", "auto", "balanced"]
    for row in run.rows:
        assert row["regime"] == regime
        assert row["max_error"] < 1e-5
        assert ("load" in row) == (regime is Regime.SUSTAINED)


def test_too_large_a_problem_is_out_of_memory_and_the_rest_is_measured(store: Store) -> None:
    too_large = make(64, 64, 1 << 20, 256, "float32")
    cases = (Case(too_large, contenders("fa2")), *small().cases)
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
        wait_until(lambda: worker_pid(fresh, "cpu") is None)


def started(store: Store) -> bool:
    assert client.ensure_worker(store, "cpu", idle=1.0) == ""
    return worker_pid(store, "cpu") is not None


@pytest.mark.gpu
def test_a_gpu_run_is_measured_in_the_worker(fresh: Store) -> None:
    names = ("naive", "fa1", "fa2", "fa3", "torch flash")
    job = Job("gpu", "cuda:0", (Case(make(1, 8, 512, 64, "float16", CAUSAL), contenders(*names)),), 1.0)
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
    case = Case(make(1, 8, 512, 64, "float16", CAUSAL), contenders("fa2"))
    endless, short = Job("endless", "cuda:0", (case,) * 400, 2.0), Job("short", "cuda:0", (case,), 0.1)
    cancelled, killed = client.submit(fresh, endless), client.submit(fresh, endless)
    wait_for(fresh, cancelled, lambda run: len(run.rows) >= 1)
    fresh.cancel(cancelled)
    assert wait_for(fresh, cancelled, over).status is Status.CANCELLED
    before = wait_for(fresh, killed, lambda run: len(run.rows) >= 1)
    pid = worker_pid(fresh, "cuda:0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run = wait_for(fresh, killed, over)
    assert run.status is Status.CRASHED
    assert run.rows[:1] == before.rows[:1]
    assert wait_for(fresh, client.submit(fresh, short), over).status is Status.DONE
    assert worker_pid(fresh, "cuda:0") != pid
