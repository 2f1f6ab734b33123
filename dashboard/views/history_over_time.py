"""History: one kernel on one problem, over dates and versions of the source."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import difference as charts
from cufa.dashboard.model.many import days, grouped, speedup, time_of
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette

_MOST_OFFERED = 200


def show(controls: Controls, rows: Sequence[Measurement], palette: Palette) -> None:
    """All times of a chosen kernel and problem, one curve per machine. The options begin with the most measurements,
    then cufa's kernels."""
    page.header("One kernel over time")
    rows = [*_earlier(rows), *rows]
    # A problem in several suites of one source is one point.
    once = {(m.source, m.label, in_words(m.problem, m.row.case), m.regime): m for m in reversed(rows)}
    by_time = sorted(once.values(), key=lambda m: time_of(m.recorded))
    series = grouped(by_time, lambda m: f"{m.label} · {in_words(m.problem, m.row.case)} · {m.regime}")

    def interest(name: str) -> tuple[int, bool]:
        return len(series[name]), series[name][-1].kernel is not None

    ranked = sorted(series, key=interest, reverse=True)[:_MOST_OFFERED]
    name = controls.choice("series", "Kernel, problem and regime", ranked, local=True)
    times = series[name]
    by_machine = grouped(times, lambda m: m.machine)
    origin = "recorded" if {m.origin for m in times} == {"recorded"} else "run"
    page.verdict(_verdict(by_machine), "", page.origin_tag(origin), small=True)
    texts = [f"{m.recorded[:16]} {m.machine}: {seconds_text(m.seconds)}, {charts.version(m)}" for m in times]
    alt = f"By date: times of {name}. " + "; ".join(texts[:40]) + "."
    page.figure(charts.over_time(by_machine, palette), "history.over_time", alt)
    st.caption("Bars are p10 to p90. Clocks, drivers and other load also change from day to day.")


def _earlier(rows: Sequence[Measurement]) -> list[Measurement]:
    """Earlier sessions of the shown rows."""
    wanted = {_key(m) for m in rows if m.origin == "recorded"}
    return [m for m in engine.past() if _key(m) in wanted]


def _key(m: Measurement) -> tuple[object, ...]:
    return m.machine, m.label, in_words(m.problem, m.row.case), m.regime


def _verdict(by_machine: dict[str, list[Measurement]]) -> str:
    """First and last on the machine with the most measurements."""
    machine = max(by_machine, key=lambda name: len(by_machine[name]))
    rows = by_machine[machine]
    versions = len({m.commit for m in rows if m.commit})
    if len(rows) == 1:
        return f"Measured once on {machine}, on {rows[0].recorded[:10]}: {seconds_text(rows[0].seconds)}."
    first, last = rows[0], rows[-1]
    ratio = speedup(first, last)
    change = f"the last is {ratio} faster than the first"
    if ratio.low <= 1 <= ratio.high:
        change = "no significant difference between first and last"
    elif ratio.value < 1:
        change = f"the last is {1 / ratio.value:.2f}× slower than the first"
    return (
        f"Measured {len(rows):,} times on {machine}, {days(rows)}, in "
        f"{sentences.count(versions, 'version')}: {change}."
    )
