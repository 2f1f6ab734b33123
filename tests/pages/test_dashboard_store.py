"""Folders of runs: full disks, foreign files, locks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_run_support import end_worker, over, small, wait_for

from cufa.dashboard.worker import client, measuring, serve
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.locks import hold, is_locked
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store

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


@pytest.mark.in_turn
def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "runs")
    job = dataclasses.replace(small(), cases=small().cases * 120, seconds=0.02)
    run = wait_for(store, client.submit(store, job), over)
    end_worker(store)
    assert run.status is Status.FAILED
    assert "No space left on device" in run.message
    assert len(run.rows) > 3  # the rows measured before
    with pytest.raises(OSError, match="No space left"):
        client.submit(store, small())
    assert [found.id for found in store.all()] == [run.id]


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.in_turn
def test_a_full_disk_mid_run_is_said_in_the_reserved_place(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = fresh.submit(small(64, "naive", "fa2"))
    size = (fresh.folder(run_id) / "outcome.json").stat().st_size
    monkeypatch.setattr(serve, "write_json", no_space)
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
    (fresh.folder(run_id) / "started.json").write_text("{}")  # no process holds its lock
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
    (fresh.root / "notes.txt").write_text("mine")
    (fresh.root / "٢٠٢٦٠١٠١T000000.000000-abcdef").mkdir()  # digits, but not an id
    assert [run.id for run in fresh.all()] == [run_id]
    with pytest.raises(KeyError):
        fresh.read("../../etc")


# --- Locks -------------------------------------------------------------------------------------------------


def test_a_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    held = hold(file, wait=False)
    assert is_locked(file)
    assert hold(file, wait=False) is None
    held.close()
    assert not is_locked(file)
