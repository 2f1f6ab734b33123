"""Reads the folder of a run. Every folder gives a run; a damaged folder gives a run with the error.

Files may be truncated, edited or foreign. This module checks them once: a :class:`~cufa.dashboard.worker.run.Run` has
valid types.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cufa.dashboard.worker.jobs import Job, Json
from cufa.dashboard.worker.locks import is_locked
from cufa.dashboard.worker.run import Run, Status, submitted
from cufa.measure.limits import Limits
from cufa.measure.measured import SCHEMA

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors from reading foreign data."""
_DETAIL_CHARACTERS = 2500


def read(folder: Path) -> Run:
    """The run of a folder, whose name is the run's id. Raises KeyError if the folder does not exist."""
    if not folder.is_dir():
        raise KeyError(folder.name)
    try:
        with _naming("its name is not a date"):
            submitted(folder.name)
        return _read(folder)
    except (*DAMAGE, OSError) as error:
        if not folder.is_dir():  # deleted meanwhile
            raise KeyError(folder.name) from error
        return Run.damaged(folder.name, str(error))


def _read(folder: Path) -> Run:
    with _naming("request.json is not a job"):
        job = _job((folder / "request.json").read_text(encoding="utf-8"))
    # In this order: a run that ends in between appears as running, not as crashed.
    started, alive = (folder / "started.json").exists(), is_locked(folder / "lock")
    with _naming("outcome.json does not say how the run ended"):
        ended = _outcome(folder)
    with _naming("progress.jsonl has a line that is not an event"):
        events = list(_events(folder / "progress.jsonl"))
        phase = next((e for e in reversed(events) if e.get("event") == "phase"), {})
        words, began = str(phase.get("text", "")), float(phase.get("time", 0.0))
        live = _live(events) if ended is None else {}
    with _naming("its record is damaged"):
        record = _checked(_record(folder, events))
    cancelling = (folder / "cancel").exists()
    status, message, detail = ended or _unfinished(folder, started, alive, cancelling)
    done = sum(e.get("event") == "case done" for e in events)
    return Run(
        folder.name, job, status, message, detail, words, began, done, cancelling, live, record, ended is not None
    )  # fmt: skip


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Prefix errors with their context."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{Path(error.filename).name} is missing") from error
    except RecursionError as error:
        raise ValueError(f"{what}: it is nested too deeply") from error
    except DAMAGE as error:
        raise ValueError(f"{what}: {error!r}"[:400]) from error


@functools.lru_cache(16)  # pages and worker read an active run several times per second
def _job(text: str) -> Job:
    return Job.from_json(_json_object(json.loads(text)))


def _object(file: Path) -> Json:
    """The JSON object of a file."""
    return _json_object(json.loads(file.read_text(encoding="utf-8")))


def _json_object(content: Any) -> Json:
    if not isinstance(content, dict):
        raise TypeError(f"an object is wanted, not {str(content)[:40]!r}")
    return content


def _unfinished(folder: Path, started: bool, alive: bool, cancelling: bool) -> tuple[Status, str, str]:
    """(status, message, detail) of a run without an outcome."""
    if alive:
        return Status.RUNNING, "", ""
    if started:
        log = _tail(folder / "log.txt")
        why = "It left a message." if log else "It left no message: killed by a user, or out of memory."
        return Status.CRASHED, f"The worker process died during this run. {why}", log
    if cancelling:
        return Status.CANCELLED, "Cancelled before it started.", ""
    return Status.QUEUED, "", ""


def _outcome(folder: Path) -> tuple[Status, str, str] | None:
    """(status, message, detail); None if the file has only its reserved space."""
    text = (folder / "outcome.json").read_text(encoding="utf-8").strip()
    if not text:
        return None
    content = _json_object(json.loads(text))
    status = Status(content["status"])
    if not status.is_over:
        raise ValueError(f"{status} is not a final status")
    return status, str(content.get("message", "")), str(content.get("detail", ""))


def _events(file: Path) -> Iterator[Json]:
    """Complete lines only: the last line may be incomplete."""
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_bytes().split(b"\n"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            yield _json_object(event)


def _record(folder: Path, events: list[Json]) -> Json:
    try:
        content = _object(folder / "record.json")
    except (FileNotFoundError, ValueError):
        content = _from_events(events)
    # A record without a schema is damaged: reading its rows raises the error.
    if (schema := content.get("schema", SCHEMA)) != SCHEMA:
        raise ValueError(f"it has schema {schema!r}; this version reads schema {SCHEMA}")
    return content


#: Section of a record for each kind of event.
_SECTIONS = {"row": "rows", "skipped": "skipped", "failed": "failed"}


def _from_events(events: list[Json]) -> Json:
    record: Json = {"rows": [], "skipped": [], "failed": []}
    for event in events:
        kind = str(event.get("event"))
        if kind == "about":
            record |= _json_object(event["record"])
        elif kind in _SECTIONS:
            record[_SECTIONS[kind]].append(event["record"])
    return record


#: Text fields of each section, which pages show.
_SAID = {"rows": ("label",), "skipped": ("label", "reason"), "failed": ("kind", "message")}


def _checked(record: Json) -> Json:
    """The record with checked sections and ceilings; numbers of rows are checked later."""
    for section, names in _SAID.items():
        for entry in record.get(section, []):
            for name in names:
                if not isinstance(_json_object(entry)[name], str):
                    raise TypeError(f"{name} of {section} is {entry[name]!r}, not text")
    if record.get("limits"):
        limits = Limits(**record["limits"])
        for number in (limits.copy_bytes, limits.exponentials, *limits.flops.values()):
            if not 0 < number < float("inf"):
                raise ValueError(f"a ceiling is {number!r}")
    return record


def _live(events: Sequence[Json]) -> dict[str, list[int]]:
    """Samples since the end of the last case."""
    samples: dict[str, list[int]] = {}
    for event in events:
        if event.get("event") == "case done":
            samples = {}
        elif event.get("event") == "samples":
            for name, taken in event["samples_ns"].items():
                samples.setdefault(name, []).extend(int(ns) for ns in taken)
    return samples


def _tail(file: Path) -> str:
    try:
        return shortened(file.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def shortened(text: str) -> str:
    """A long log without its middle: the beginning has the error, the end its place."""
    if len(text) <= _DETAIL_CHARACTERS:
        return text
    begin = _DETAIL_CHARACTERS // 4
    return f"{text[:begin]}\n…\n{text[begin + 3 - _DETAIL_CHARACTERS :]}"
