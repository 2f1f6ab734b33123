"""Measured rates of memory-bound operations: on the page Decode and in the result of a run."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page
from cufa.dashboard.charts import rates as charts
from cufa.dashboard.model.asked import where
from cufa.dashboard.model.devices import run_devices
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import Palette
from cufa.dashboard.worker.jobs import CPU, Job


def show(rows: Sequence[Measurement], key: str, palette: Palette) -> None:
    """Cases with other libraries, then the other cases; only rows beside a plain read."""
    rows = [r for r in rows if r.of_read is not None]
    if not rows:
        return
    joined = {r.group for r in rows if r.row.is_peer}
    groups = ([r for r in rows if r.group in joined], [r for r in rows if r.group not in joined])
    for number, group in enumerate(g for g in groups if g):
        page.verdict(_verdict(group), tag=page.origin_tag(group[0].origin), small=bool(number))
        show_figure(group, f"{key}.{number}", palette)
    st.caption(
        f"Measured {rows[0].regime} on **{where(rows)}**. Rate: bytes of keys and values ÷ median time, compared with "
        "a kernel that only reads the same bytes. Keys and values do not stay in L2 between calls."
    )


def show_figure(rows: Sequence[Measurement], key: str, palette: Palette) -> None:
    lines = [f"{r.case}, {r.label}: {seconds_text(r.seconds)}, {r.speed}, {r.of_read:.0%}" for r in rows]
    alt = "Bars of the rate against a plain streaming read of the same bytes. " + "; ".join(lines) + "."
    page.figure(charts.rates_figure(rows, palette), key, alt)


def offer(label: str, key: str, job: Job, is_planned: bool) -> None:
    """A button that starts a run on a GPU; with the planner's tiles only."""
    if job.device == CPU:
        return
    help_text = "The page Run shows progress and result; the figures appear here."
    if not is_planned:
        help_text = "Runs use the planner's tiles: choose them above."
    page.button(label, key, "play_arrow", engine.start, job, disabled=not is_planned, help=help_text)


def source_words(rows: Sequence[Measurement]) -> str:
    """Machine, days and regime of one source."""
    m = rows[0]
    if m.origin == "recorded":
        return f"recorded on {where(rows)}, {m.regime}"
    when = m.recorded[:19].replace("T", " ")
    return f"{m.machine}, run of {when} UTC, {m.regime}"


def first_device() -> str:
    return next(iter(run_devices()))


def _verdict(rows: Sequence[Measurement]) -> str:
    ours = [r for r in rows if r.row.is_ours] or list(rows)
    best, least = (pick(ours, key=lambda r: r.of_read or 0.0) for pick in (max, min))
    labels = {r.label for r in ours}
    who = ours[0].label if len(labels) == 1 else ours[0].operation.title

    def what(r: Measurement) -> str:
        return r.case if len(labels) == 1 else f"{r.case}: {r.label}"

    if best is least:
        return f"{who} reaches {best.of_read:.0%} of a plain read ({what(best)}, {best.speed})."
    most = f"{best.of_read:.0%} of a plain read at best ({what(best)}, {best.speed})"
    return f"{who} reaches {most}, {least.of_read:.0%} at least ({what(least)})."
