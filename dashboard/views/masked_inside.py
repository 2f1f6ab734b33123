"""Masked work, inside a thread block: the activity of each warp of one SM over time."""

from __future__ import annotations

import numpy as np
import streamlit as st

from cufa.build.phases import WORDS, mistakes
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import inside as charts
from cufa.dashboard.model import counters
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.masked_controls import View
from cufa.dashboard.views.masked_sms import offer_trace
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Intervals, Sums, busiest_sm, lanes, perfetto, sums

_FIRST = 600
"""Phases drawn at first: a few tiles per warp."""


def show_inside(view: View, palette: Palette) -> None:
    """A recorded trace of such a thread block, or its order from the executor."""
    page.header("Inside a block")
    if not counters.has_stamps(view.spec):
        page.verdict(
            f"{view.spec.name} has no time stamps inside its warps; FA2, FA3 and decoding have them.",
            small=True,
        )
        return
    trace = counters.matching_inside(view.problem, view.spec, view.config, view.device)
    if trace is None:
        trace = _execute(view)
    if trace is not None:
        if differs := counters.differences(trace, view.problem, view.device.name):
            page.verdict(f"{differs}.", "warn", small=True)
        show_trace(trace, palette)


def _execute(view: View) -> InsideTrace | None:
    """Without a GPU trace: the order, on demand."""
    page.not_measured(
        "no trace of the inside of such a thread block is recorded. Executing the kernel's source on this CPU shows "
        "the order of its phases, not their time."
    )
    launch = (view.problem, view.device, view.algorithm, view.config)
    result: InsideTrace | str | None = page.on_demand(
        "Execute one head here", "masked.inside", "play_arrow", launch,
        lambda: counters.execute_inside(*launch), refused=view.why_not_executed,
    )  # fmt: skip
    if isinstance(result, str):
        st.error(result, icon=":material/error:")
        return None
    return result


def show_trace(trace: InsideTrace, palette: Palette) -> None:
    times = trace.intervals()
    of_sm = sums(trace, times, busiest_sm(trace))
    sm_lanes = [lane for lane in lanes(trace, times) if lane.sm == of_sm.sm]
    tone, tag = ("", "recorded") if trace.is_time else ("warn", "")
    page.verdict(_verdict(trace, of_sm, times), tone, tag, small=True)
    for text in mistakes(trace.logs):
        st.warning(text, icon=":material/broken_image:")
    intervals = times[np.isin(times["log"], [lane.log for lane in sm_lanes])]
    begin, end = float(intervals["begin"].min()), float(intervals["end"].max())
    first = float(np.sort(intervals["begin"])[min(_FIRST, len(intervals) - 1)])
    label, form = ("Time span", "%.1f") if trace.is_time else ("Span of executed primitives", "%.0f")
    stretch = st.slider(
        label, begin, end, (begin, max(first, begin + (end - begin) / 1000)), format=form,
        key=f"masked.inside.stretch.{trace.name}",
        help=f"In {trace.unit}. Drag in the figure to zoom in, double-click to zoom out.",
    )  # fmt: skip
    spans = charts.drawn(intervals, *stretch)
    there = set(spans["log"].tolist())
    running = [lane for lane in sm_lanes if lane.log in there]
    shown = running[: charts.MOST_LANES]
    spans = spans[np.isin(spans["log"], [lane.log for lane in shown])]
    cut = len(spans) > charts.MOST_BARS
    spans = spans[np.argsort(spans["begin"], kind="stable")][: charts.MOST_BARS]
    figure = charts.inside_figure(trace, spans, shown, palette)
    st.html(charts.legend(figure))
    page.figure(figure, "masked.inside.lanes", charts.describe(trace, shown))
    st.caption(_caption(trace, len(running), len(shown), cut))
    _table(trace, of_sm)
    offer_trace(lambda: perfetto(trace, times), f"inside-{trace.name}")


def _verdict(trace: InsideTrace, of_sm: Sums, times: Intervals) -> str:
    if not trace.is_time:
        return "Executed on the CPU: order, not time. Only a GPU trace shows which phases overlap."
    lost, design = (counters.waits_of(trace, times, of_sm.sm, producer) for producer in (False, True))
    text = f"{of_sm.span:,.1f} µs on one SM{_cost(trace).replace(':', ', with stamps:')}; "
    text += f"warps that multiply wait {sentences.share(lost or 0.0)} of their time, which is lost"
    if design is not None:
        text += f"; the producer waits {sentences.share(design)}, by design: for free buffers"
    if of_sm.softmax and of_sm.products:
        text += (
            f". {sentences.share(of_sm.overlap)} of the softmax overlaps products; {of_sm.exposed:,.1f} µs "
            f"({sentences.share(of_sm.exposed / of_sm.span)}) are exposed"
        )
    return text + "."


def _caption(trace: InsideTrace, number: int, shown: int, cut: bool) -> str:
    parts = [f"{trace.kernel}: {trace.problem}, {trace.config}."]
    if trace.is_time:
        stamped = (
            "One lane of each warp, or of the first warp of a warpgroup, records the SM's clock, in a special build"
            f"{_cost(trace)}."
        )
        parts += [f"{trace.environment['device']}, {trace.environment['recorded'][:10]}.", stamped]
        parts += [] if trace.is_current else ["**The kernel's sources have changed since.**"]
    if number > shown:
        parts.append(f"The first {shown} of the {number} warps of this span.")
    if cut:
        parts.append(
            f"Only the first {charts.MOST_BARS:,} phases of the span are drawn: choose a shorter span."
        )
    return " ".join(parts)


def _cost(trace: InsideTrace) -> str:
    """Cost of the stamps; "" if not measured."""
    if trace.slowdown is None:
        return ""
    more = "longer" if trace.slowdown >= 1 else "less"
    return f": its run takes {sentences.share(abs(trace.slowdown - 1))} {more} than a run without stamps"


def _table(trace: InsideTrace, of_sm: Sums) -> None:
    """Time of all warps of the SM, by phase."""
    rows = sorted(of_sm.phases.items(), key=lambda item: -item[1])
    of = "of all warps' time" if trace.is_time else "of all warps' primitives"
    lines = [{of: f"{of_sm.share(t):.1%}", trace.unit: round(t, 2), "phase": WORDS[name]} for name, t in rows]
    st.dataframe(lines, hide_index=True, key="masked.inside.sums")
