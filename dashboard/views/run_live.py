"""The page Run: starting, waiting, cancelling, and choosing which run to look at."""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import samples as charts
from cufa.dashboard.model.measurements import in_words
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.run_controls import seconds_expected
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import CPU, Job
from cufa.dashboard.worker.memory import shortfall
from cufa.dashboard.worker.run import Run, Status
from cufa.measure.regimes import Regime
from cufa.measure.timing import Timing

_MOST_LISTED = 60
_LONG_SECONDS = 60.0
STATUS_ICONS = {
    Status.QUEUED: "…",
    Status.RUNNING: "▸",
    Status.DONE: "✓",
    Status.FAILED: "✗",
    Status.CANCELLED: "■",
    Status.CRASHED: "✗",
    Status.DAMAGED: "✗",
}


def show_start(job: Job, runs: list[Run], refused: Sequence[str]) -> None:
    """The button, and what it will do. Off while a field holds what it cannot (``refused``), or memory is too small."""
    lacking = shortfalls(job)
    left, right = st.columns([1, 4], vertical_alignment="center")
    with left:
        st.button(
            "Start",
            key="run.start",
            type="primary",
            icon=":material/play_arrow:",
            disabled=not job.total or bool(refused or lacking),
            on_click=engine.start,
            args=(job,),
            width="stretch",
        )
    with right:
        if refused:
            st.caption(f"Nothing starts while a field is wrong: {refused[0]}")
        elif lacking:
            page.verdict(f"Too large for this machine's memory: {lacking[0]}.", "alarm", small=True)
        else:
            st.caption(_what_starts(job, runs))
    engine.show_problems()


def shortfalls(job: Job) -> list[str]:
    """Shapes of a CPU job that this machine's memory cannot hold, each in words."""
    if job.device != CPU:
        return []
    found = ((in_words(case.problem, case.name), shortfall(case.problem)) for case in job.cases)
    return [f"{name} {lacking}" for name, lacking in found if lacking]


def _what_starts(job: Job, runs: list[Run]) -> str:
    if not job.total:
        return "Choose at least one kernel."
    first = job.cases[0]
    shapes = f"{job.total} shapes" if job.total > 1 else in_words(first.problem, first.name)
    text = f"{sentences.count(job.contenders, 'timing')}, {job.regime}: {shapes}."
    expected = seconds_expected(job, _cpu_rate(job, runs))
    if expected is not None:
        text += f" About {sentences.seconds(expected)} on this CPU."
        if expected > _LONG_SECONDS:
            text = f"**{text}** It can be cancelled at any time."
    elif job.device == CPU:
        text += (
            " On the CPU, with NumPy: the same schedule and the same results as on a GPU, at a CPU's speed."
        )
    return text


def _cpu_rate(job: Job, runs: list[Run]) -> float | None:
    """FLOP/s of products as the last CPU run measured them."""
    limits = next(
        (r.record.get("limits") for r in runs if r.job.device == CPU and r.record.get("limits")), None
    )
    if not limits:
        return None
    kind = job.cases[0].problem.dtype if job.cases else "float32"
    return float(limits["flops"].get(kind, limits["flops"]["float32"]))


def choose_run(controls: Controls, runs: list[Run]) -> Run | None:
    """Which run the page shows; None when there is none."""
    wanted = controls.asked("run")  # an older one, perhaps
    shown = [*runs[:_MOST_LISTED], *(r for r in runs[_MOST_LISTED:] if r.id == wanted)]
    if not shown:
        controls.choice("run", "Result of", {"none": "no run yet"})
        return None
    # Without its status, which changes: a browser goes on showing the words that were chosen.
    chosen = controls.choice("run", "Result of", {r.id: run_name(r) for r in shown}, local=True)
    return next(r for r in shown if r.id == chosen)


def show_first_steps() -> None:
    """Nothing has been run here yet."""
    page.verdict("Nothing has been run here yet: press Start.", small=True)
    st.caption("Or begin with what needs no run:")
    for name, label in (
        ("masked_work", "Masked work: what a mask leaves to do, tile by tile"),
        ("compare", "Compare: recorded on a GPU, against other libraries"),
        ("occupancy", "Occupancy: every kernel compiled here, for any GPU"),
    ):
        st.page_link(f"screens/{name}.py", label=label)


def run_words(run: Run) -> str:
    """One line about a run."""
    return f"{STATUS_ICONS[run.status]} {run_name(run)} · {run.status}"


def run_name(run: Run) -> str:
    """What never changes about it."""
    if run.status is Status.DAMAGED:
        return f"{run.id} · cannot be read"
    names = ", ".join(run.job.kernels[:6]) + ("…" if len(run.job.kernels) > 6 else "")
    where = "CPU" if run.job.device == CPU else run.job.device
    return f"{run.submitted:%Y-%m-%d %H:%M:%S} UTC · {where} · {run.job.title} · {names}"


def show_active(runs: list[Run], palette: Palette) -> None:
    """Runs that wait or go on, refreshed by themselves; the page is drawn anew when they are no more as in ``runs``,
    which the rest of it shows: one may have ended since."""
    problems = client.refresh(engine.store())
    st.session_state["run.drawn"] = _drawn(runs)
    st.fragment(_active, run_every=0.6 if st.session_state["run.drawn"] else 4.0)(problems, palette)


def _active(problems: list[str], palette: Palette) -> None:
    runs = engine.store().active()
    problems = client.refresh(engine.store()) if runs else problems
    if _drawn(runs) != st.session_state.get("run.drawn"):
        st.rerun(scope="app")
    for text in problems:
        st.error(text, icon=":material/report:")
    ahead: dict[str, int] = {}
    for run in runs:
        _show_active_run(run, ahead.get(run.job.device, 0), palette)
        ahead[run.job.device] = ahead.get(run.job.device, 0) + 1


def _show_active_run(run: Run, ahead: int, palette: Palette) -> None:
    total = run.job.total
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        with left:
            st.html(f"<b>{html.escape(run_words(run))}</b>")
            if run.cancelling:
                st.progress(run.cases_done / total, text="stopping…")
            elif run.status is Status.QUEUED:
                others = f"{ahead} before it on {run.job.device}" if ahead else "a worker is starting"
                st.progress(0.0, text=f"waiting: {others}")
            else:
                of = f", {run.cases_done} of {total} shapes done" if total > 1 else ""
                text = f"{run.phase} (for {sentences.seconds(time.time() - run.phase_began)}{of})"
                st.progress(_share_done(run), text=text)
        with right:
            st.button(
                "Cancel",
                key=f"cancel.{run.id}",
                icon=":material/stop:",
                disabled=run.cancelling,
                on_click=engine.cancel,
                args=(run.id,),
                width="stretch",
            )
        if run.live:
            _show_samples(run, palette)


def _show_samples(run: Run, palette: Palette) -> None:
    """What has been timed of the shape that runs now."""
    lanes = [(name, Timing(tuple(s * 1e-9 for s in taken))) for name, taken in run.live.items() if taken]
    rounds = min((len(t.samples) for _, t in lanes), default=0)
    text = ", ".join(f"{name} {seconds_text(t.p50)}" for name, t in lanes)
    taken = sentences.count(rounds, "round") if run.job.regime is Regime.IN_TURNS else "some batches"
    page.verdict(f"After {taken}: {text}.", tag="so far", small=True)
    figure = charts.samples_figure(lanes, palette)
    page.figure(figure, f"run.live.{run.id}", charts.describe(lanes), describe=False)


def _share_done(run: Run) -> float:
    """0 to 1: shapes done, and of the one that runs what is expected from its work."""
    share, total = 0.0, run.job.total
    limits = run.record.get("limits")
    if limits and run.cases_done < len(run.job.cases) and run.phase_began:
        case = dataclasses.replace(run.job, cases=run.job.cases[run.cases_done :][:1])
        expected = seconds_expected(case, limits["flops"].get("float32"))
        share = min(0.95, (time.time() - run.phase_began) / expected) if expected else 0.0
    return (run.cases_done + share) / total


def explain_end(run: Run) -> None:
    """How a run ended when not well: what happened, and what is left of it."""
    if run.status is Status.DONE:
        return
    if not run.status.is_over:
        if not run.timings:
            page.verdict(f"This run is {run.status}; its results will stand here.", small=True)
        return
    tone = "warn" if run.status is Status.CANCELLED else "alarm"
    page.verdict(run.message or f"The run was {run.status}.", tone, str(run.status))
    if run.status is Status.DAMAGED:
        st.caption("The page History can delete it. Nothing of it is shown anywhere.")
        return
    kept = run.timings
    st.caption(
        f"{kept} of {run.job.contenders} timings were finished and are kept."
        if kept
        else "No timing was finished."
    )
    for failure in run.record.get("failed", [])[1:]:
        st.caption(f"Also: {failure['kind']}: {failure['message']}")
    if run.detail:
        with st.expander("What the worker left behind", icon=":material/terminal:"):
            st.code(run.detail, language=None)


def redraw_when_done() -> None:
    """On other pages: draw anew when a run starts, moves on or ends."""
    st.session_state["run.drawn"] = _drawn(engine.store().active())
    st.fragment(_watch, run_every=1.0 if st.session_state["run.drawn"] else 5.0)()


def _watch() -> None:
    if engine.store().active():
        client.refresh(engine.store())
    if _drawn(engine.store().active()) != st.session_state.get("run.drawn"):
        st.rerun(scope="app")


def _drawn(runs: list[Run]) -> tuple[object, ...]:
    """What a page that shows runs depends on."""
    return tuple(sorted((r.id, r.status.name, r.timings) for r in runs if not r.status.is_over))
