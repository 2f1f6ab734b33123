"""Times of two measurements, with the confidence interval of their ratio, and times of one kernel by date."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.many import time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import SYMBOLS, Palette
from cufa.measure.timing import Ratio

_LEAST_SPAN = 1.15


def ratio_figure(ratios: Sequence[tuple[str, Ratio]], palette: Palette) -> go.Figure:
    """Time of A over time of B for each pair: right of 1, B is faster. Bars are 95% intervals."""
    figure = theme.new_figure(palette, 110 + 46 * len(ratios), showlegend=False)
    span = max([_LEAST_SPAN, *(max(r.high, 1 / r.low) for _, r in ratios)]) ** 1.08
    for number, (name, ratio) in enumerate(ratios):
        tone = palette.measured if ratio.low > 1 else palette.alarm if ratio.high < 1 else palette.muted
        bar = theme.intervals([ratio.value], [ratio.low], [ratio.high], thickness=3, width=8, color=tone)
        figure.add_scatter(
            x=[ratio.value],
            y=[-number],
            error_x=bar,
            mode="markers+text",
            text=[f"{ratio.value:.2f}×"],
            textposition="top center",
            marker={"size": 12, "color": tone, "symbol": verdict_symbol(ratio)},
            hovertemplate=f"<b>{name}</b><br>time of A ÷ time of B: {ratio}<extra></extra>",
            cliponaxis=False,
        )
    figure.add_vline(1, line={"color": palette.text, "width": 1.5, "dash": "dot"})
    ticks = [t for t in _ticks(span) if 1 / span <= t <= span]
    figure.update_xaxes(
        type="log",
        range=[-math.log10(span), math.log10(span)],
        tickvals=ticks,
        ticktext=[f"{t:g}×" for t in ticks],
        title_text="time of A ÷ time of B (left: A is faster, right: B is faster)",
    )
    places, names = [-n for n in range(len(ratios))], [name for name, _ in ratios]
    return figure.update_yaxes(theme.PLAIN, tickvals=places, ticktext=names, range=[-len(ratios) + 0.4, 0.8])


def _ticks(span: float) -> tuple[float, ...]:
    """Round ratios; fewer on a wider axis."""
    if span > 4:
        return (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    return (0.3, 0.5, 0.7, 1, 1.5, 2, 3) if span > 1.5 else (0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4)


def verdict_symbol(ratio: Ratio) -> str:
    """A triangle towards the faster one, a circle if the interval contains 1."""
    return "triangle-right" if ratio.low > 1 else "triangle-left" if ratio.high < 1 else "circle"


def in_words(ratio: Ratio, a: str = "A", b: str = "B") -> tuple[str, str]:
    """(sentence, tone) of one difference."""
    if ratio.low > 1:
        return f"{b} is {ratio} faster than {a}.", "good"
    if ratio.high < 1:
        other = Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
        return f"{b} is {other} slower than {a}.", "warn"
    return f"No significant difference: the time of {a} ÷ the time of {b} is {ratio}.", ""


def over_time(series: Mapping[str, Sequence[Measurement]], palette: Palette) -> go.Figure:
    """Median times by date, p10 to p90 as bars, a curve per machine; each version of the source has its own symbol."""
    figure = theme.new_figure(palette, 320)
    factor, unit = unit_for(max(m.seconds for rows in series.values() for m in rows))
    versions = list(dict.fromkeys(m.commit for rows in series.values() for m in rows))
    for number, (name, rows) in enumerate(series.items()):
        colour = palette.series[number % len(palette.series)]
        low, times, high = ([factor * getattr(m.timing, p) for m in rows] for p in ("p10", "p50", "p90"))
        figure.add_scatter(
            x=[time_of(m.recorded) for m in rows],
            y=times,
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 1.5, "dash": ("solid", "dash", "dot")[number % 3]},
            error_y=theme.intervals(times, low, high, color=colour),
            marker={"size": 10, "symbol": [SYMBOLS[versions.index(m.commit) % len(SYMBOLS)] for m in rows]},
            customdata=[version(m) for m in rows],
            hovertemplate=f"%{{x|%Y-%m-%d %H:%M}}<br>%{{y:,.4g}} {unit}<br>%{{customdata}}<extra></extra>",
        )
    figure.update_xaxes(title_text="measured on (UTC)")
    return figure.update_yaxes(title_text=f"time ({unit})", rangemode="tozero")


def version(m: Measurement) -> str:
    """The measured version of the source, in words."""
    return f"version {m.commit[:10]}" if m.commit else "unknown version"
