"""Runs on disk: submitting, listing, cancelling, deleting."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import shutil
from pathlib import Path

from cufa.calls.tuning import write_json
from cufa.dashboard.worker import reading
from cufa.dashboard.worker.jobs import Job, gpu_index
from cufa.dashboard.worker.run import Run, Status

_ID = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{6}-[0-9a-f]{6}")
_OUTCOME_BYTES = 4096
"""Reserved when a run is submitted, so that a worker can still say that the disk is full."""


def runs_dir() -> Path:
    """``$CUFA_RUNS_DIR``, or ``cufa/runs`` in the user's data folder. Not created here."""
    named = os.environ.get("CUFA_RUNS_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cufa" / "runs"


class Store:
    """The folder of all runs."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or runs_dir()
        self._over: dict[str, Run] = {}

    def folder(self, run_id: str) -> Path:
        if not _ID.fullmatch(run_id):
            raise KeyError(run_id)
        return self.root / run_id

    def submit(self, job: Job) -> str:
        """Queue a job; returns the run's id. Raises OSError when the folder cannot be written."""
        now = datetime.datetime.now(datetime.UTC)
        run_id = f"{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"
        draft = self.root / f".new-{run_id}"
        try:
            draft.mkdir(parents=True)
            write_json(draft / "request.json", job.to_json())
            (draft / "outcome.json").write_bytes(b" " * _OUTCOME_BYTES)
            draft.rename(self.root / run_id)  # it appears complete
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return run_id

    def cancel(self, run_id: str) -> None:
        """Ask for a run to stop; one that nobody has taken yet never starts. Raises OSError."""
        (self.folder(run_id) / "cancel").touch()

    def ids(self) -> list[str]:
        """Newest first; empty where there is no folder."""
        try:
            names = os.listdir(self.root)
        except OSError:
            return []
        return sorted((name for name in names if _ID.fullmatch(name)), reverse=True)

    def all(self) -> list[Run]:
        """Every run, newest first; one whose folder is damaged says so."""
        found = []
        for run_id in self.ids():
            with contextlib.suppress(KeyError):  # deleted meanwhile
                found.append(self.read(run_id))
        return found

    def read(self, run_id: str) -> Run:
        """Raises KeyError when there is no such run."""
        if run_id in self._over:
            return self._over[run_id]
        run = reading.read(self.folder(run_id))
        if run.is_settled:
            self._over[run_id] = run
        return run

    def delete(self, run_id: str) -> None:
        """Remove a run that is over. Raises ValueError while it is not, OSError when its folder cannot go."""
        with contextlib.suppress(KeyError, FileNotFoundError):  # somebody else was faster
            if not self.read(run_id).status.is_over:
                raise ValueError("a run that waits or goes on can be cancelled, not deleted")
            going = self.root / f".deleted-{run_id}"
            self.folder(run_id).rename(going)  # gone at once, however long removing takes
            shutil.rmtree(going, ignore_errors=True)
        self._over.pop(run_id, None)

    def size(self, run_id: str) -> int:
        """Bytes of a run's files; 0 when it is gone."""
        with contextlib.suppress(OSError):
            return sum(file.stat().st_size for file in self.folder(run_id).iterdir())
        return 0

    def finish(self, run_id: str, status: Status, message: str = "", detail: str = "") -> None:
        """Write how a run ended. On a full disk this goes into the place that was reserved for it."""
        text = json.dumps(
            {"status": status, "message": message[:800], "detail": reading.shortened(detail)},
            ensure_ascii=True,
        )
        file = self.folder(run_id) / "outcome.json"
        try:
            write_json(file, json.loads(text))
        except OSError:
            if len(text) > _OUTCOME_BYTES:
                text = json.dumps({"status": status, "message": message[:200]})
            with open(file, "r+b") as stream:
                stream.write(text.encode().ljust(_OUTCOME_BYTES))

    def waiting(self, device: str) -> list[Run]:
        """Queued runs of a device, the first to run first."""
        found = [run for run in self.all() if run.status is Status.QUEUED and run.job.device == device]
        return found[::-1]

    def active(self) -> list[Run]:
        """Running and queued runs of all devices, oldest first."""
        return [run for run in self.all() if not run.status.is_over][::-1]

    def worker_lock(self, device: str) -> Path:
        """Held by the worker of a device; contains its process id. Raises ValueError for what is no device."""
        gpu_index(device)
        return self.root / f"worker-{device.replace(':', '')}.lock"

    def worker_log(self, device: str) -> Path:
        return self.worker_lock(device).with_suffix(".log")
