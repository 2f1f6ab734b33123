"""Runs on disk: submitting, reading, cancelling; telling a run that goes on from one whose worker died."""

from __future__ import annotations

import contextlib
import datetime
import enum
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cufa.bench.records import SCHEMA, upgrade
from cufa.dashboard.worker.jobs import Job, Json
from cufa.tuning import write_json

_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{6}")
_OUTCOME_BYTES = 4096
"""Reserved when a run is submitted, so that a worker can still say that the disk is full."""
_DETAIL_CHARACTERS = 2500


class Status(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRASHED = "crashed"

    @property
    def is_over(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING)


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it now."""

    id: str
    job: Job
    status: Status
    message: str = ""
    """Why it ended, when not well."""
    detail: str = ""
    """A traceback or the end of the worker's log."""
    phase: str = ""
    """What the worker is doing."""
    phase_began: float = 0.0
    """Seconds since the epoch."""
    cases_done: int = 0
    cancelling: bool = False
    live: dict[str, list[int]] = field(default_factory=dict)
    """Samples so far of the case that runs now, nanoseconds by contender."""
    record: Json = field(default_factory=dict)
    """As of :func:`cufa.bench.records.run_record`; of an unfinished run, the rows measured so far."""

    @property
    def rows(self) -> list[Json]:
        return list(self.record.get("rows", []))

    @property
    def timings(self) -> int:
        """Contenders measured."""
        return len(self.rows)

    @property
    def submitted(self) -> datetime.datetime:
        """UTC."""
        return datetime.datetime.strptime(self.id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)


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
        """Every run that can be read, newest first."""
        found = []
        for run_id in self.ids():
            with contextlib.suppress(KeyError, ValueError, TypeError, OSError):
                found.append(self.read(run_id))
        return found

    def read(self, run_id: str) -> Run:
        """Raises KeyError, ValueError, TypeError or OSError when there is no such run, or it is damaged."""
        if run_id in self._over:
            return self._over[run_id]
        folder = self.folder(run_id)
        job = Job.from_json(json.loads((folder / "request.json").read_text(encoding="utf-8")))
        # In this order: a run that ends in between is still seen as running, never as crashed.
        started, alive = (folder / "started.json").exists(), is_locked(folder / "lock")
        outcome = _outcome(folder)
        events = list(_events(folder / "progress.jsonl"))
        record = _record(folder, events)
        cancelling = (folder / "cancel").exists()
        if outcome is not None:
            status = Status(outcome["status"])
            message, detail = outcome.get("message", ""), outcome.get("detail", "")
        else:
            status, message, detail = _unfinished(folder, started, alive, cancelling)
        phase = next((e for e in reversed(events) if e.get("event") == "phase"), {})
        run = Run(
            run_id,
            job,
            status,
            message,
            detail,
            phase.get("text", ""),
            phase.get("time", 0.0),
            sum(e.get("event") == "case done" for e in events),
            cancelling,
            _live(events) if outcome is None else {},
            record,
        )
        if outcome is not None:
            self._over[run_id] = run  # nothing changes any more
        return run

    def delete(self, run_id: str) -> None:
        """Remove a run that is over. Raises ValueError while it is not, OSError when its folder cannot go."""
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
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
            {"status": status, "message": message[:800], "detail": _shortened(detail)},
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
        """Held by the worker of a device; contains its process id."""
        return self.root / f"worker-{device.replace(':', '')}.lock"

    def worker_log(self, device: str) -> Path:
        return self.worker_lock(device).with_suffix(".log")


def _unfinished(folder: Path, started: bool, alive: bool, cancelling: bool) -> tuple[Status, str, str]:
    """(status, message, detail) of a run without an outcome."""
    if alive:
        return Status.RUNNING, "", ""
    if started:
        log = _tail(folder / "log.txt")
        why = "It left a message." if log else "It left no message: killed from outside, or out of memory."
        return Status.CRASHED, f"The worker process died during this run. {why}", log
    if cancelling:
        return Status.CANCELLED, "Cancelled before it started.", ""
    return Status.QUEUED, "", ""


def _outcome(folder: Path) -> Json | None:
    """None while there is only the reserved place."""
    text = (folder / "outcome.json").read_text(encoding="utf-8").strip()
    return json.loads(text) if text else None


def _events(file: Path) -> Iterator[Json]:
    """Complete lines only: the last one may be half written, or cut by a full disk."""
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _record(folder: Path, events: list[Json]) -> Json:
    try:
        content: Json = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        content = _from_events(events)
    # What an older version measured; a record that names no schema is damaged, and whoever reads its rows says so.
    return upgrade(content) if content.get("schema", SCHEMA) != SCHEMA else content


#: Where a record keeps what an event of a kind tells. Older versions kept rows of decoding apart.
_SECTIONS = {"row": "rows", "skipped": "skipped", "failed": "failed"}


def _from_events(events: list[Json]) -> Json:
    record: Json = {"rows": [], "skipped": [], "failed": []}
    for event in events:
        kind = str(event.get("event"))
        if kind == "about":
            record |= event["record"]
        elif kind == "decode":
            record.setdefault(kind, {"rows": []})["rows"].append(event["record"])
        elif kind in _SECTIONS:
            record[_SECTIONS[kind]].append(event["record"])
    return record


def _live(events: Sequence[Json]) -> dict[str, list[int]]:
    """Samples told since the last case was done."""
    samples: dict[str, list[int]] = {}
    for event in events:
        if event.get("event") == "case done":
            samples = {}
        elif event.get("event") == "samples":
            for name, taken in event["samples_ns"].items():
                samples.setdefault(name, []).extend(taken)
    return samples


def _tail(file: Path) -> str:
    try:
        return _shortened(file.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def _shortened(text: str) -> str:
    """A log begins with what happened and ends with where: the middle is left out of a long one."""
    if len(text) <= _DETAIL_CHARACTERS:
        return text
    begin = _DETAIL_CHARACTERS // 4
    return f"{text[:begin]}\n…\n{text[begin + 3 - _DETAIL_CHARACTERS :]}"


def is_locked(file: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        with open(file, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def hold(file: Path, *, wait: bool) -> Any:
    """Take a lock; keep what is returned, the lock lives as long. None when another process has it.

    The lock goes with the process, whatever ends it. Raises OSError when the file cannot be made.
    """
    stream = open(file, "a+b")  # noqa: SIM115 - held on purpose
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        # A reader that looks (is_locked) holds it for an instant; the caller tries again.
        stream.close()
        return None
    return stream
