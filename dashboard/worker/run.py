"""A run, as its folder shows it."""

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
    """Its folder holds something that no version of cufa wrote."""

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
    """As of :func:`cufa.measure.measured.run_json`; of an unfinished run, the rows measured so far."""
    is_settled: bool = False
    """Its end is written: nothing of it changes any more."""

    @property
    def rows(self) -> list[Json]:
        return list(self.record.get("rows", []))

    @property
    def timings(self) -> int:
        """Contenders measured."""
        return len(self.rows)

    @property
    def submitted(self) -> datetime.datetime:
        """UTC. Raises ValueError for a name that is no date, which only a damaged run has."""
        return submitted(self.id)

    @classmethod
    def damaged(cls, run_id: str, why: str) -> Run:
        """A run of which nothing can be shown but that, and why."""
        return cls(run_id, UNREADABLE, Status.DAMAGED, f"This run cannot be read: {why}.")


def submitted(run_id: str) -> datetime.datetime:
    """When a run was submitted, UTC. Raises ValueError for a name that is no date."""
    return datetime.datetime.strptime(run_id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
