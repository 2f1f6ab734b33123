"""The application's side: submit a job, keep its worker running, and notice when a worker has died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import cufa
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.locks import is_locked
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store

_START = (
    "from cufa.commands.dashboard import make_importable; make_importable(); "
    "from cufa.dashboard.worker.serve import main; raise SystemExit(main())"
)
#: Minimum delay before a worker that cannot start is started again.
_RETRY_SECONDS = 5.0


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    at: float


_started: dict[tuple[Path, str], _Started] = {}
_lock = threading.Lock()


def submit(store: Store, job: Job) -> str:
    """Queue a job and ensure that a worker runs. Returns the run's id; raises OSError."""
    run_id = store.submit(job)
    ensure_worker(store, job.device)
    return run_id


def ensure_worker(store: Store, device: str, idle: float | None = None) -> str:
    """Start the device's worker if none runs. Returns the error of a worker that does not start, or "".

    Cheap: called at each refresh of a waiting page. Raises OSError if the folder cannot be written.
    """
    with _lock:
        _reap(store)
        if is_locked(store.worker_lock(device)):
            return ""
        key = (store.root, device)
        started = _started.get(key)
        if started is not None:
            code = started.process.poll()
            if code is None:
                return ""  # it is starting
            if code > 0 and time.monotonic() - started.at < _RETRY_SECONDS:
                log = store.worker_log(device).read_text(encoding="utf-8", errors="replace").strip()
                return f"The worker for {device} does not start (exit code {code}): {log[-1500:]}"
        _started[key] = _Started(_spawn(store, device, idle), time.monotonic())
    return ""


def _spawn(store: Store, device: str, idle: float | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", _START, "--device", device, "--root", str(store.root.resolve())]
    command += ["--idle", str(idle)] if idle is not None else []
    # The worker must import the same cufa, installed or not.
    paths = [str(Path(cufa.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    store.root.mkdir(parents=True, exist_ok=True)
    with open(store.worker_log(device), "wb") as log:
        # A separate session: Ctrl-C in the application's terminal does not end a run.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def refresh(store: Store) -> list[str]:
    """Reap dead workers and start workers for queued runs. Returns errors in words."""
    reap(store)
    problems = []
    waiting = {run.job.device for run in store.active() if run.status is Status.QUEUED}
    for device in sorted(waiting):
        try:
            problems.append(ensure_worker(store, device))
        except OSError as error:
            problems.append(f"The worker for {device} cannot be started: {error}")
    return [p for p in problems if p]


def reap(store: Store) -> None:
    """Record the death of workers of this application."""
    with _lock:
        _reap(store)


def _reap(store: Store) -> None:
    """Record the signal of each dead worker; only its parent knows the signal."""
    for (root, device), started in list(_started.items()):
        code = started.process.poll()
        if root != store.root or code is None or code >= 0:
            continue
        del _started[(root, device)]
        for run in store.all()[:50]:
            if run.status is Status.CRASHED and run.job.device == device and "signal" not in run.message:
                with contextlib.suppress(OSError):
                    store.finish(run.id, Status.CRASHED, _killed_by(-code), run.detail)


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    cause = {
        "SIGKILL": "killed by a user, or by the system for lack of memory",
        "SIGSEGV": "a segmentation fault",
        "SIGABRT": "it aborted",
    }.get(name, "a signal")
    return f"The worker process died of {name} (signal {number}) during this run: {cause}."
