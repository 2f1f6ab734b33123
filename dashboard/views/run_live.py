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
from cufa.dashboard.state import Controls, Place
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
    """The button, and the job that it starts. It is off for invalid fields (``refused``) or too little memory."""
    lacking = shortfalls(job)
    left, right = st.columns([1, 4], vertical_alignment="center")
    with left:
        is_off = not job.total or bool(refused or lacking)
        look = {"type": "primary", "width": "stretch", "disabled": is_off}
        page.button("Start", "run.start", "play_arrow", engine.start, job, **look)
    with right:
        if refused:
            st.caption(f"Start is off while a field is invalid: {refused[0]}")
        elif lacking:
            page.verdict(f"Too large for this machine's memory: {lacking[0]}.", "alarm", small=True)
        else:
            st.caption(_what_starts(job, runs))
    engine.show_problems()


def shortfalls(job: Job) -> list[str]:
    """Shapes of a CPU job that exceed this machine's memory, in words."""
    if job.device != CPU:
        return []
    checked = ((in_words(case.problem, case.name), shortfall(case.problem)) for case in job.cases)
    return [f"{name} {lacking}" for name, lacking in checked if lacking]


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
            text = f"**{text}** You can cancel it at any time."
    elif job.device == CPU:
        text += " On the CPU, with NumPy: the schedule and results of a GPU, at the speed of a CPU."
    return text


def _cpu_rate(job: Job, runs: list[Run]) -> float | None:
    """FLOP/s of products, from the last CPU run."""
    records = (r.record.get("limits") for r in runs if r.job.device == CPU)
    limits = next(filter(None, records), None)
    if limits is None:
        return None
    kind = job.cases[0].problem.dtype if job.cases else "float32"
    return float(limits["flops"].get(kind, limits["flops"]["float32"]))


def choose_run(controls: Controls, runs: list[Run], place: Place) -> Run | None:
    """The run that the page shows; None if there is none."""
    wanted = controls.asked("run")  # may be an older run
    shown = [*runs[:_MOST_LISTED], *(r for r in runs[_MOST_LISTED:] if r.id == wanted)]
    if not shown:
        controls.choice("run", "Result of", {"none": "no run yet"}, at=place)
        return None
    # Without the status, which changes: a browser keeps the words of the chosen option.
    chosen = controls.choice("run", "Result of", {r.id: run_name(r) for r in shown}, local=True, at=place)
    return next(r for r in shown if r.id == chosen)


def show_first_steps() -> None:
    """Shown before the first run."""
    page.verdict("No run on this machine yet: press Start.", small=True)
    st.caption("These pages need no run:")
    for name, label in (
        ("masked_work", "Masked work: the remaining work under a mask, tile by tile"),
        ("compare", "Compare: GPU measurements against other libraries"),
        ("occupancy", "Occupancy: every kernel compiled here, for any GPU"),
    ):
        st.page_link(f"screens/{name}.py", label=label)


def run_words(run: Run) -> str:
    """One line about a run."""
    return f"{STATUS_ICONS[run.status]} {run_name(run)} · {run.status}"


def run_name(run: Run) -> str:
    """The constant part of :func:`run_words`."""
    if run.status is Status.DAMAGED:
        return f"{run.id} · cannot be read"
    names = ", ".join(run.job.kernels[:6]) + ("…" if len(run.job.kernels) > 6 else "")
    where = "CPU" if run.job.device == CPU else run.job.device
    return f"{run.submitted:%Y-%m-%d %H:%M:%S} UTC · {where} · {run.job.title} · {names}"


def watch(runs: list[Run], palette: Palette | None = None) -> None:
    """Poll the active runs, and draw them if there is a ``palette``. When they differ from ``runs``, which the page
    shows, run the whole page again."""
    problems = client.refresh(engine.store())
    st.session_state["run.drawn"] = _drawn(runs)
    st.fragment(_watch, run_every=0.6 if st.session_state["run.drawn"] else 4.0)(problems, palette)


def _watch(problems: list[str], palette: Palette | None) -> None:
    runs = engine.store().active()
    problems = client.refresh(engine.store()) if runs else problems
    if _drawn(runs) != st.session_state.get("run.drawn"):
        st.rerun(scope="app")
    if palette is None:
        return
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
                others = f"{ahead} earlier on {run.job.device}" if ahead else "a worker is starting"
                st.progress(0.0, text=f"waiting: {others}")
            else:
                done = f", {run.cases_done} of {total} shapes done" if total > 1 else ""
                text = f"{run.phase} (for {sentences.seconds(time.time() - run.phase_began)}{done})"
                st.progress(_share_done(run), text=text)
        with right:
            look = {"disabled": run.cancelling, "width": "stretch"}
            page.button("Cancel", f"cancel.{run.id}", "stop", engine.cancel, run.id, **look)
        if run.live:
            _show_samples(run, palette)


def _show_samples(run: Run, palette: Palette) -> None:
    """Samples so far of the current shape."""
    lanes = [(name, Timing(tuple(s * 1e-9 for s in taken))) for name, taken in run.live.items() if taken]
    rounds = min((len(t.samples) for _, t in lanes), default=0)
    text = ", ".join(f"{name} {seconds_text(t.p50)}" for name, t in lanes)
    taken = sentences.count(rounds, "round") if run.job.regime is Regime.IN_TURNS else "some batches"
    page.verdict(f"After {taken}: {text}.", tag="so far", small=True)
    figure = charts.samples_figure(lanes, palette)
    page.figure(figure, f"run.live.{run.id}", charts.describe(lanes), describe=False)


def _share_done(run: Run) -> float:
    """0 to 1: finished shapes, and the estimated share of the current shape."""
    share, total = 0.0, run.job.total
    limits = run.record.get("limits")
    if limits and run.cases_done < len(run.job.cases) and run.phase_began:
        case = dataclasses.replace(run.job, cases=run.job.cases[run.cases_done :][:1])
        expected = seconds_expected(case, limits["flops"].get("float32"))
        share = min(0.95, (time.time() - run.phase_began) / expected) if expected else 0.0
    return (run.cases_done + share) / total


def explain_end(run: Run) -> None:
    """How a run failed, and which results remain."""
    if run.status is Status.DONE:
        return
    if not run.status.is_over:
        if not run.timings:
            page.verdict(f"This run is {run.status}; its results will appear here.", small=True)
        return
    tone = "warn" if run.status is Status.CANCELLED else "alarm"
    page.verdict(run.message or f"The run was {run.status}.", tone, str(run.status))
    if run.status is Status.DAMAGED:
        st.caption("The page History can delete this run. No page shows its results.")
        return
    saved = f"{run.timings} of {run.job.contenders} timings are complete and saved."
    st.caption(saved if run.timings else "No timing is complete.")
    for failure in run.record.get("failed", [])[1:]:
        st.caption(f"Also: {failure['kind']}: {failure['message']}")
    if run.detail:
        with st.expander("Messages of the worker", icon=":material/terminal:"):
            st.code(run.detail, language=None)


def _drawn(runs: list[Run]) -> tuple[object, ...]:
    """The state of active runs on which a page depends."""
    return tuple(sorted((r.id, r.status.name, r.timings) for r in runs if not r.status.is_over))
