"""The worker: a process that owns one device and runs its jobs one at a time.

The worker locks the device (a second worker exits at once), runs the queue on disk, and exits after some idle time. A
kernel error destroys the GPU context of the process: the worker then replaces itself with a fresh process.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cufa.calls.tuning import write_json
from cufa.dashboard.worker import measuring
from cufa.dashboard.worker.jobs import Json
from cufa.dashboard.worker.locks import hold
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store

IDLE_SECONDS = 120.0
_POLL_SECONDS = 0.15
_GRACE_SECONDS = 3.0
"""Time for a cancelled run to return from a long call."""


class Cancelled(BaseException):
    """Raised in the main thread to stop a run."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS)
    options = parser.parse_args(arguments)
    faulthandler.enable()  # a segmentation fault leaves its traceback in the run's log
    store = Store(options.root)
    lock = _take_device(store, options.device)
    if lock is None:
        return 0  # another worker has the device
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < options.idle:
        waiting = store.waiting(options.device)
        if not waiting:
            time.sleep(_POLL_SECONDS)
            continue
        if Worker(store, waiting[0]).run():
            restart()
        idle_since = time.monotonic()
    return 0


def _take_device(store: Store, device: str) -> Any:
    for _ in range(20):  # a reader holds the lock for an instant
        lock = hold(store.worker_lock(device), wait=False)
        if lock is not None:
            return lock
        time.sleep(0.02)
    return None


def restart() -> NoReturn:
    """Become a fresh process: locks and GPU context end, the process id stays."""
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)


class Worker:
    """Executes one run and writes its outcome."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store, self._run = store, run
        self._folder = store.folder(run.id)
        self._ended = threading.Event()
        self._interruptible = False

    def run(self) -> bool:
        """Returns whether the GPU context was lost."""
        lock = hold(self._folder / "lock", wait=True)
        try:
            if (self._folder / "cancel").exists():
                return False  # cancelled at the last moment
            (self._folder / "started.json").write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
            with self._log(), self._cancellable():
                return self._measure()
        except OSError as error:
            self._cannot_write(error)
            return False
        finally:
            lock.close()

    def _measure(self) -> bool:
        store, run_id = self._store, self._run.id
        try:
            with open(self._folder / "progress.jsonl", "a", encoding="utf-8") as progress:

                def tell(event: Json) -> None:
                    try:
                        progress.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")
                        progress.flush()
                    except OSError as error:
                        raise measuring.CannotWrite(*error.args) from error

                self._interruptible = True
                result = measuring.measure(self._run.job, tell)
                self._interruptible = False
            write_json(self._folder / "record.json", result.record)
        except Cancelled:
            store.finish(run_id, Status.CANCELLED, "Cancelled while it ran.")
            return False
        except OSError:
            raise
        except Exception as error:  # before the first case, for example a missing device
            failure = measuring.explain(error)
            store.finish(run_id, Status.FAILED, _words(failure), failure["detail"])
            return bool(failure["kind"] == "kernel error")
        finally:
            self._interruptible = False
        if result.failures:
            first = result.failures[0]
            store.finish(run_id, Status.FAILED, _words(first), first["detail"])
        elif not result.record["rows"]:
            reasons = dict.fromkeys(s["reason"] for s in result.record["skipped"])
            store.finish(run_id, Status.FAILED, "No kernel could run: " + "; ".join(reasons))
        else:
            store.finish(run_id, Status.DONE)
        return result.poisoned

    def _cannot_write(self, error: OSError) -> None:
        """Mostly a full disk: write the outcome to the reserved space. The rows so far stay readable."""
        message = f"The run's folder cannot be written: {error.strerror or error}. {self._folder}"
        with contextlib.suppress(OSError):
            self._store.finish(self._run.id, Status.FAILED, message)

    @contextlib.contextmanager
    def _log(self) -> Iterator[None]:
        """Redirect stderr to the run's folder: the messages of a dying process belong to the run."""
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            with open(self._folder / "log.txt", "ab") as log:
                os.dup2(log.fileno(), 2)
            self._saved_stderr = saved
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)

    @contextlib.contextmanager
    def _cancellable(self) -> Iterator[None]:
        """Within this context, a file ``cancel`` in the run's folder stops the run."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            watcher.join()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False
            raise Cancelled

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            if (self._folder / "cancel").exists():
                _thread.interrupt_main()
                if self._ended.wait(_GRACE_SECONDS):
                    return
                # Still inside a long call: replace the process.
                text = "Cancelled during a long call, which was aborted."
                self._store.finish(self._run.id, Status.CANCELLED, text)
                os.dup2(self._saved_stderr, 2)
                restart()


def _words(failure: Json) -> str:
    kind = failure["kind"]
    words = {
        "out of memory": "Out of memory",
        "kernel error": "The kernel failed on the GPU",
        "does not compile": "The kernel does not compile",
    }.get(kind)
    message = str(failure["message"])
    if words is None or message.startswith(words):  # CuPy's message has these words
        return message
    return f"{words}: {message}"
