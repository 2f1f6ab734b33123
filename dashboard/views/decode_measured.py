"""The page Decode, last part, and a run's result: decoding as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from cufa.bench.decode import DecodeCase, DecodeContender
from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page
from cufa.dashboard.charts import decode as charts
from cufa.dashboard.model import evidence
from cufa.dashboard.model.decode_rows import DecodeRow, decode_rows
from cufa.dashboard.model.devices import run_devices
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.worker.jobs import CPU, Job
from cufa.decode.problem import DecodeProblem

_SPLITS_TIMED = 12


def load() -> dict[str, list[DecodeRow]]:
    """Rows by where they were measured: runs of this machine first, then recorded evidence."""
    found: dict[str, list[DecodeRow]] = {}
    try:
        for run in engine.all_runs():
            if run.decode_rows:
                machine = run.record["environment"]["device"]
                where = f"{machine}, run of {run.submitted:%Y-%m-%d %H:%M:%S} UTC"
                found[f"{where} ({run.id[-6:]})" if where in found else where] = decode_rows(run.decode_rows)
        found |= {e.where: list(e.decode) for e in evidence.load() if e.decode}
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        st.warning(f"A record of decoding is damaged ({error}); it is left out.")
    return found


def show_here(found: Mapping[str, Sequence[DecodeRow]], problem: DecodeProblem) -> None:
    """What the chosen problem took where it was measured."""
    for where, rows in found.items():
        row = next((r for r in rows if r.problem == problem and r.label in ("flash_decode", "planner")), None)
        if row is not None:
            text = f"{seconds_text(row.timing.p50)}, {row.tbytes:.2f} TB/s, {row.of_read:.0%} of a plain read"
            page.verdict(f"This very problem: {text} ({where}).", tag="measured", small=True)
            return


def offer_curve(problem: DecodeProblem, splits: Sequence[int], is_planned: bool) -> None:
    """On a GPU: the planner's choice, equal shares and some fixed splits, side by side."""
    some = [s for s in (1 << n for n in range(_SPLITS_TIMED)) if s <= splits[-1]]
    contenders = [DecodeContender("planner", problem), DecodeContender("balanced", problem, "balanced")]
    contenders += [DecodeContender(f"{s} splits", problem, "fixed", s) for s in some]
    offer(
        "Measure this curve on the GPU",
        "decode.measure",
        DecodeCase(str(problem), tuple(contenders)),
        is_planned,
    )
    engine.show_problems()


def offer(label: str, key: str, case: DecodeCase, is_planned: bool) -> None:
    """A button that starts a run of one case, where there is a GPU; with the planner's tiles only."""
    device = next(iter(run_devices()))
    if device == CPU:
        return
    st.button(
        label,
        key=key,
        icon=":material/play_arrow:",
        on_click=engine.start,
        args=(Job(case.title, device, (), 1.0, (case,)),),
        disabled=not is_planned,
        help="A run like any other: progress and result are on the page Run, the figures here."
        if is_planned
        else "Runs take the planner's tiles: choose those above.",
    )


def show(controls: Controls, found: Mapping[str, Sequence[DecodeRow]], palette: Palette) -> None:
    """Everything measured on one machine."""
    st.header("Measured", anchor=False)
    if not found:
        page.verdict("No decoding is recorded in this version yet.", "warn", small=True)
        return
    names = {str(n): where for n, where in enumerate(found)}
    chosen = controls.choice("record", "Measured", names)
    tag = "measured" if "run of" in names[chosen] else "recorded"
    show_rows(found[names[chosen]], "decode.measured", palette, tag)


def show_rows(rows: Sequence[DecodeRow], key: str, palette: Palette, tag: str = "measured") -> None:
    """Cases that other libraries joined; then the rest, in which one thing changes at a time."""
    joined = {r.case for r in rows if r.label.startswith("torch")}
    groups = ([r for r in rows if r.case in joined], [r for r in rows if r.case not in joined])
    for number, group in enumerate(g for g in groups if g):
        page.verdict(_verdict(group), tag=tag, small=bool(number))
        page.figure(charts.rates_figure(group, palette), f"{key}.{number}", _describe(group))
    st.caption(
        "Keys and values, each read once, over the median time; beside it a kernel that only reads as many "
        "bytes. Caches do not stay in L2 between calls."
    )


def _verdict(rows: Sequence[DecodeRow]) -> str:
    ours = [r for r in rows if r.schedule]
    best, least = (pick(ours, key=lambda r: r.of_read) for pick in (max, min))
    labels = {r.label for r in ours}
    who, what = (ours[0].label, "{case}") if len(labels) == 1 else ("Decoding", "{case}: {label}")
    top, bottom = (what.format(case=r.case, label=r.label) for r in (best, least))
    most = f"{best.of_read:.0%} of a plain read at best ({top}, {best.tbytes:.2f} TB/s)"
    return f"{who} reaches {most}, {least.of_read:.0%} at least ({bottom})."


def _describe(rows: Sequence[DecodeRow]) -> str:
    lines = [f"{r.case}, {r.label}: {r.tbytes:.2f} TB/s, {r.of_read:.0%}" for r in rows]
    return "Bars of the rate against a plain streaming read of as many bytes. " + "; ".join(lines) + "."
