"""The run engine for pages: one store per process, errors in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import streamlit as st

from cufa.cache import runs_dir
from cufa.dashboard import sentences
from cufa.dashboard.model import evidence, measured_rows
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store

_ERROR = "engine.error"


@st.cache_resource(show_spinner=False)
def _store(root: str) -> Store:
    return Store(runs_dir())


def store() -> Store:
    """The process's store: it keeps finished runs in memory, and lists the folder at each use."""
    opened: Store = _store(str(runs_dir()))
    return opened


def start(job: Job) -> None:
    """Queue a job and show its run on the page Run; a callback of a button."""
    st.session_state.pop(_ERROR, None)
    try:
        run_id = client.submit(store(), job)
    except OSError as error:
        st.session_state[_ERROR] = _cannot_write(error)
        return
    Controls.put("run", "run", run_id)


def cancel(run_id: str) -> None:
    """A callback of a button."""
    try:
        store().cancel(run_id)
    except OSError as error:
        st.session_state[_ERROR] = _cannot_write(error)


def delete(run_ids: Sequence[str]) -> None:
    """A callback of a button."""
    st.session_state.pop(_ERROR, None)
    for run_id in run_ids:
        try:
            store().delete(run_id)
        except (OSError, ValueError) as error:
            st.session_state[_ERROR] = f"Run {run_id} cannot be deleted: {error}."
            return


def _cannot_write(error: OSError) -> str:
    return (
        f"Runs cannot be saved in `{runs_dir()}`: {error.strerror or error}. No run was started. Free some space, make "
        "the folder writable, or set `CUFA_RUNS_DIR` to another folder and restart the dashboard."
    )


def show_problems() -> None:
    """The error that kept a run from starting, being cancelled or being deleted, if any."""
    if text := st.session_state.get(_ERROR):
        st.error(text, icon=":material/report:")


@dataclasses.dataclass
class _Checked:
    """Checked settled runs by id: the run as read, the run as checked, and its measurements."""

    runs: dict[str, tuple[Run, Run, list[Measurement]]] = dataclasses.field(default_factory=dict)

    def look(self, run: Run) -> tuple[Run, list[Measurement]]:
        known = self.runs.get(run.id)
        if known is not None and known[0] is run:
            return known[1:]
        sound = measured_rows.checked(run)
        rows = measured_rows.of_run(sound)
        own = evidence.of_run(sound, rows)
        result = sound, rows if own is None else list(own.rows)
        if run.is_settled:
            self.runs[run.id] = (run, *result)
        return result


@st.cache_resource(show_spinner=False)
def _checked(root: str) -> _Checked:
    return _Checked()


def _looked_through() -> list[tuple[Run, list[Measurement]]]:
    client.reap(store())
    checked: _Checked = _checked(str(runs_dir()))
    return [checked.look(run) for run in store().all()]


def all_runs() -> list[Run]:
    """All runs, the newest first; unreadable runs are marked as damaged."""
    return [run for run, _ in _looked_through()]


def own_evidence() -> list[Evidence]:
    """Runs of this machine with measured ceilings, the newest first."""
    runs = (evidence.of_run(run, rows) for run, rows in _looked_through())
    return [e for e in runs if e is not None]


def recorded() -> list[Evidence]:
    """Recorded evidence; empty if a file is damaged (:func:`all_measurements` returns the message)."""
    try:
        return evidence.load()
    except ValueError:
        return []


def past() -> list[Measurement]:
    """Earlier recorded sessions; a message if a file is damaged."""
    try:
        return evidence.past()
    except ValueError as error:
        st.warning(f"Earlier measurements cannot be read: {error}", icon=":material/broken_image:")
        return []


def all_measurements(*, listed: bool = False) -> list[Measurement]:
    """Own runs, then recorded measurements. A message says how many damaged runs are omitted, unless the page lists
    them (``listed``)."""
    looked = _looked_through()
    measured = [m for _, rows in looked for m in rows]
    damaged = sum(run.status is Status.DAMAGED for run, _ in looked)
    if damaged and not listed:
        st.warning(
            f"{sentences.count(damaged, 'run')} cannot be read and {sentences.plural(damaged, 'is')} ignored. "
            "The page History shows the reasons.",
            icon=":material/broken_image:",
        )
    try:
        measured += evidence.measurements()
    except ValueError as error:
        st.error(f"Recorded measurements cannot be read: {error}", icon=":material/broken_image:")
    return measured
