"""The page History: runs that did not end well, and deleting runs."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.dashboard import engine
from cufa.dashboard.views.run_live import run_words
from cufa.dashboard.worker.store import Run, Status

_MOST_LISTED = 50


def show_ended(runs: Sequence[Run]) -> None:
    """Runs that did not end well have no line in the table, or not all of theirs."""
    bad = [r for r in runs if r.status in (Status.FAILED, Status.CRASHED, Status.CANCELLED)]
    if not bad:
        return
    with st.expander(f"{len(bad)} run{'s' * (len(bad) > 1)} did not finish", icon=":material/report:"):
        for run in bad[:_MOST_LISTED]:
            st.markdown(
                f"**{run.submitted:%Y-%m-%d %H:%M} UTC, {run.job.title}**, {run.status}: {run.message}"
            )


def show_kept(runs: Sequence[Run]) -> None:
    """Which runs are on disk, and a way to be rid of them. Recorded evidence is no run."""
    over = {run.id: run for run in runs if run.status.is_over}
    if not over:
        return
    store = engine.store()
    size = sum(store.size(run_id) for run_id in over)
    title = f"{len(over)} run{'s' * (len(over) > 1)} kept on this machine, {_bytes(size)}"
    with st.expander(title, icon=":material/folder:"):
        st.caption(f"In `{store.root}`. Deleting a run takes its measurements out of every page.")
        everything = st.toggle("All of them", key="history.delete.all")
        chosen = list(over)
        if not everything:
            chosen = st.multiselect(
                "Runs to delete", list(over), format_func=lambda i: run_words(over[i]), key="history.delete"
            )
        st.button(
            f"Delete {len(chosen)} run{'s' * (len(chosen) != 1)} for good",
            key="history.delete.now",
            icon=":material/delete:",
            disabled=not chosen,
            on_click=engine.delete,
            args=(chosen,),
        )


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
