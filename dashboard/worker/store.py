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

from cufa.cache import runs_dir
from cufa.calls.tuning import write_json
from cufa.dashboard.worker import reading
from cufa.dashboard.worker.jobs import Job, gpu_index
from cufa.dashboard.worker.run import Run, Status

_ID = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{6}-[0-9a-f]{6}")
_OUTCOME_BYTES = 4096
"""Reserved at submission: a worker can report a full disk."""


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
        """Queue a job; returns the run's id. Raises OSError if the folder cannot be written."""
        now = datetime.datetime.now(datetime.UTC)
        run_id = f"{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"
        draft = self.root / f".new-{run_id}"
        try:
            draft.mkdir(parents=True)
            write_json(draft / "request.json", job.to_json())
            (draft / "outcome.json").write_bytes(b" " * _OUTCOME_BYTES)
            draft.rename(self.root / run_id)  # the folder appears complete
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return run_id

    def cancel(self, run_id: str) -> None:
        """Request a run to stop; a queued run never starts. Raises OSError."""
        (self.folder(run_id) / "cancel").touch()

    def ids(self) -> list[str]:
        """Ids, the newest first; empty if the folder does not exist."""
        try:
            names = os.listdir(self.root)
        except OSError:
            return []
        return sorted((name for name in names if _ID.fullmatch(name)), reverse=True)

    def all(self) -> list[Run]:
        """All runs, the newest first, including damaged runs."""
        runs = []
        for run_id in self.ids():
            with contextlib.suppress(KeyError):  # deleted meanwhile
                runs.append(self.read(run_id))
        return runs

    def read(self, run_id: str) -> Run:
        """Raises KeyError for an unknown run."""
        if run_id in self._over:
            return self._over[run_id]
        run = reading.read(self.folder(run_id))
        if run.is_settled:
            self._over[run_id] = run
        return run

    def delete(self, run_id: str) -> None:
        """Delete a finished run. Raises ValueError for an unfinished run, OSError if its folder cannot be removed."""
        with contextlib.suppress(KeyError, FileNotFoundError):  # deleted by another process
            if not self.read(run_id).status.is_over:
                raise ValueError("an unfinished run can be cancelled, not deleted")
            going = self.root / f".deleted-{run_id}"
            self.folder(run_id).rename(going)  # disappears at once; the removal may take longer
            shutil.rmtree(going, ignore_errors=True)
        self._over.pop(run_id, None)

    def size(self, run_id: str) -> int:
        """Bytes of a run's files; 0 for a deleted run."""
        with contextlib.suppress(OSError):
            return sum(file.stat().st_size for file in self.folder(run_id).iterdir())
        return 0

    def finish(self, run_id: str, status: Status, message: str = "", detail: str = "") -> None:
        """Write the outcome of a run; on a full disk, to the reserved space."""
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
        """Queued runs of a device, in order."""
        queued = [run for run in self.all() if run.status is Status.QUEUED and run.job.device == device]
        return queued[::-1]

    def active(self) -> list[Run]:
        """Running and queued runs of all devices, oldest first."""
        return [run for run in self.all() if not run.status.is_over][::-1]

    def worker_lock(self, device: str) -> Path:
        """Lock of a device's worker; contains its process id. Raises ValueError for an unknown device."""
        gpu_index(device)
        return self.root / f"worker-{device.replace(':', '')}.lock"

    def worker_log(self, device: str) -> Path:
        return self.worker_lock(device).with_suffix(".log")
