"""Recorded traces from inside a block: of decoding on the page Decode, of two kernels side by side on Masked work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import streamlit as st

from cufa.build.phases import WORDS
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import inside as charts
from cufa.dashboard.model import counters
from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.sentences import share
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.masked_controls import View
from cufa.dashboard.views.masked_inside import show_trace
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Intervals, lanes, sums

_SPAN = 20.0
"""Microseconds that are drawn of each kernel."""


def _words(trace: InsideTrace) -> str:
    environment = trace.environment
    return f"{environment['device']}, {environment['recorded'][:10]}: {trace.kernel}, {trace.problem}, {trace.config}"


def show_decode(card: str, controls: Controls, palette: Palette) -> None:
    """A recorded trace of decoding, of this card if possible; the control names its card and shape."""
    page.header("Inside a block")
    known = {n: x for n, x in counters.inside_traces()[0].items() if x.problem.operation == "decode"}
    if not known:
        page.verdict("No trace from inside a decoding block is recorded.", small=True)
        return
    names = sorted(known, key=lambda n: not is_same_card(str(known[n].environment["device"]), card))
    name = controls.choice("inside", "Recorded trace", {n: _words(known[n]) for n in names}, local=True)
    if differs := counters.differences(known[name], known[name].problem, card):
        page.verdict(f"{differs}.", "warn", small=True)
    show_trace(known[name], palette)


def show_pair(sides: Sequence[View], names: Sequence[str], palette: Palette) -> None:
    """Two kernels from inside: the same stretch of time, and the time of each phase. Both traces are of one card."""
    page.header("Inside a block, side by side")
    matching = [counters.matching_inside(x.problem, x.spec, x.config, x.device) for x in sides]
    traces = [x for x in matching if x is not None]
    if len(traces) < len(sides) or len({x.environment["device"] for x in traces}) > 1:
        card = sides[0].device.name
        cards = ["" if x is None else str(x.environment["device"]) for x in matching]
        of_others = (n for n, x in zip(names, cards, strict=True) if not x or not is_same_card(x, card))
        missing = sentences.listed(of_others)
        page.not_measured(f"no trace from inside a block of {missing} is recorded on {card}.")
        return
    intervals = [x.intervals() for x in traces]
    of_sm = [sums(x, times) for x, times in zip(traces, intervals, strict=True)]
    texts = [
        f"{name}: {share(total.exposed / total.span)} of the time is exposed softmax; warps that multiply wait "
        f"{share(counters.waits_for_data(trace, times, total.sm))} for data"
        for name, trace, times, total in zip(names, traces, intervals, of_sm, strict=True)
    ]
    for name, trace, side in zip(names, traces, sides, strict=True):
        if differs := counters.differences(trace, side.problem, side.device.name):
            page.verdict(f"{name}: {differs[0].lower()}{differs[1:]}.", "warn", small=True)
    page.verdict(f"{'. '.join(texts)}.", "", "recorded", small=True)
    for name, trace, times, total in zip(names, traces, intervals, of_sm, strict=True):
        shown = [lane for lane in lanes(trace, times) if lane.sm == total.sm]
        drawn = _first(times, [lane.log for lane in shown])
        there = set(drawn["log"].tolist())
        shown = [lane for lane in shown if lane.log in there][: charts.MOST_LANES]
        stale = "" if trace.is_current else " The sources have changed since."
        st.caption(f"**{name}**: {_words(trace)}.{stale}")
        figure = charts.inside_figure(trace, drawn, shown, palette)
        st.html(charts.legend(figure))
        begin = float(drawn["begin"].min())
        figure.update_xaxes(range=[begin, begin + _SPAN])
        key = f"masked.pair.inside.{len(shown)}.{name}"
        page.figure(figure, key, charts.describe(trace, shown), describe=False)
    most = {p: max(x.phases.get(p, 0.0) for x in of_sm) for x in of_sm for p in x.phases}
    rows = []
    for p in sorted(most, key=lambda p: -most[p]):
        shares = [share(x.share(x.phases.get(p, 0.0))) for x in of_sm]
        rows.append({"phase": WORDS[p], **dict(zip(names, shares, strict=True))})
    page.table(rows)
    st.caption(
        f"The first {_SPAN:g} µs of one SM of each kernel, on one scale. Shares are of all warps' time."
    )


def _first(times: Intervals, logs: Sequence[int]) -> Intervals:
    """The intervals of these logs that overlap the drawn span."""
    spans = times[np.isin(times["log"], logs)]
    begin = float(spans["begin"].min())
    return charts.drawn(spans, begin, begin + _SPAN)[: charts.MOST_BARS]
