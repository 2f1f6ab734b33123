"""A run, as read from its folder."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass, field

from cufa.dashboard.worker.jobs import UNREADABLE, Job, Json


class Status(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    DAMAGED = "damaged"
    """The folder contains foreign or damaged data."""

    @property
    def is_over(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING)


@dataclass(frozen=True)
class Run:
    """The current state of a run."""

    id: str
    job: Job
    status: Status
    message: str = ""
    """Why the run failed."""
    detail: str = ""
    """A traceback or the end of the worker's log."""
    phase: str = ""
    """Current activity of the worker."""
    phase_began: float = 0.0
    """Seconds since the epoch."""
    cases_done: int = 0
    cancelling: bool = False
    live: dict[str, list[int]] = field(default_factory=dict)
    """Samples of the current case so far, nanoseconds by contender."""
    record: Json = field(default_factory=dict)
    """Record by :func:`cufa.measure.measured.run_json`; of an unfinished run, with the rows so far."""
    is_settled: bool = False
    """The outcome is written: the run does not change any more."""

    @property
    def rows(self) -> list[Json]:
        return list(self.record.get("rows", []))

    @property
    def timings(self) -> int:
        """Contenders measured."""
        return len(self.rows)

    @property
    def submitted(self) -> datetime.datetime:
        """UTC. Raises ValueError for an invalid name, which only a damaged run has."""
        return submitted(self.id)

    @classmethod
    def damaged(cls, run_id: str, why: str) -> Run:
        """A damaged run with its error."""
        return cls(run_id, UNREADABLE, Status.DAMAGED, f"This run cannot be read: {why}.")


def submitted(run_id: str) -> datetime.datetime:
    """Submission time of a run, UTC. Raises ValueError for an invalid name."""
    return datetime.datetime.strptime(run_id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
