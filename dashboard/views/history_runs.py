"""The page History: failed runs, and deletion of runs."""

from __future__ import annotations

import html
from collections.abc import Sequence

import streamlit as st

from cufa.dashboard import engine, page, sentences
from cufa.dashboard.views.run_live import run_name, run_words
from cufa.dashboard.worker.run import Run, Status

_MOST_LISTED = 50
_ENDS = {
    "did not finish": (Status.FAILED, Status.CRASHED, Status.CANCELLED),
    "cannot be read": (Status.DAMAGED,),
}


def show_ended(runs: Sequence[Run]) -> None:
    """Failed and unreadable runs, whose rows are missing in the table."""
    for words, statuses in _ENDS.items():
        listed = [r for r in runs if r.status in statuses]
        if not listed:
            continue
        with st.expander(f"{sentences.count(len(listed), 'run')} {words}", icon=":material/report:"):
            for run in listed[:_MOST_LISTED]:
                st.html(f"<b>{html.escape(run_name(run))}</b>, {run.status}: {html.escape(run.message)}")
            if len(listed) > _MOST_LISTED:
                st.caption(f"And {len(listed) - _MOST_LISTED} more.")


def show_kept(runs: Sequence[Run]) -> None:
    """Runs on disk, and their deletion."""
    over = {run.id: run for run in runs if run.status.is_over}
    if not over:
        return
    store = engine.store()
    size = sum(store.size(run_id) for run_id in over)
    title = f"{sentences.count(len(over), 'run')} kept on this machine, {_bytes(size)}"
    with st.expander(title, icon=":material/folder:"):
        st.caption(f"In `{store.root}`. Deleting a run removes its measurements from all pages.")
        everything = st.toggle("All runs", key="history.delete.all")
        chosen = list(over)
        if not everything:
            chosen = st.multiselect(
                "Runs to delete", list(over), format_func=lambda i: run_words(over[i]), key="history.delete"
            )
        label = f"Delete {sentences.count(len(chosen), 'run')} permanently"
        page.button(label, "history.delete.now", "delete", engine.delete, chosen, disabled=not chosen)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
