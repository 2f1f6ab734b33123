"""Distributions of measured times: every sample, p10 to p90, and the median."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from cufa.commands.common import seconds_text
from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.measure.timing import Timing

_LANE = 0.3
"""Half the height of a lane, which samples cross from top to bottom in the order they were taken."""
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "hexagon", "cross")


def unit_for(seconds: float) -> tuple[float, str]:
    """(factor, unit) so that a time has few digits before the point."""
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if seconds >= limit:
            return factor, unit
    return 1e6, "µs"


def samples_figure(
    lanes: Sequence[tuple[str, Timing]], palette: Palette, *, zoomed: bool = False
) -> go.Figure:
    """One lane a contender, the first on top. Each dot is one call; recorded measurements keep none of their calls.

    ``zoomed`` leaves out the way to zero, and outliers (:func:`beyond`).
    """
    figure = theme.new_figure(palette, 96 + 74 * len(lanes), showlegend=False, hovermode="closest")
    factor, unit = unit_for(max((t.p50 for _, t in lanes), default=0.0))
    for number, (name, timing) in enumerate(lanes):
        y, colour = -number, palette.series[number % len(palette.series)]
        x = factor * np.array(timing.samples)
        p10, p50, p90 = (factor * t for t in (timing.p10, timing.p50, timing.p90))
        figure.add_shape(
            type="rect",
            x0=p10,
            x1=p90,
            y0=y - _LANE - 0.06,
            y1=y + _LANE + 0.06,
            fillcolor=colour,
            opacity=0.16,
            line_width=0,
            layer="below",
        )
        figure.add_shape(
            type="line", x0=p50, x1=p50, y0=y - 0.42, y1=y + 0.42, line={"color": palette.text, "width": 2}
        )
        order = np.linspace(_LANE, -_LANE, len(x)) if len(x) > 1 else np.zeros(len(x))
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y + order,
                mode="markers",
                name=name,
                marker={
                    "color": colour,
                    "size": 6 if len(x) > 60 else 8,
                    "opacity": 0.75,
                    "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                    "line": {"width": 0.5, "color": palette.background},
                },
                customdata=np.arange(1, len(x) + 1),
                hovertemplate=f"<b>{name}</b><br>call %{{customdata}} of {len(x)}: %{{x:.4g}} {unit}"
                f"<br>p10 {p10:.4g}, p50 {p50:.4g}, p90 {p90:.4g} {unit}<extra></extra>",
            )
        )
    axis: dict[str, object] = {"rangemode": "tozero"}
    if zoomed:
        low, high = (factor * t for t in _window(lanes))
        axis = {"range": [low - 0.03 * (high - low), high]}
    figure.update_xaxes(title_text=f"time of a call ({unit})", **axis)
    figure.update_yaxes(
        tickvals=[-n for n in range(len(lanes))],
        ticktext=[f"{name}<br><b>{seconds_text(t.p50)}</b>" for name, t in lanes],
        range=[-len(lanes) + 0.45, 0.55],
        showgrid=False,
        zeroline=False,
        ticks="",
    )
    return figure


def _window(lanes: Sequence[tuple[str, Timing]]) -> tuple[float, float]:
    """What a zoomed figure shows: from the fastest call to a little over every p90."""
    low = min(min(t.samples, default=t.p10) for _, t in lanes)
    return low, low + 1.15 * (max(t.p90 for _, t in lanes) - low) + 1e-9


def beyond(lanes: Sequence[tuple[str, Timing]]) -> int:
    """Calls that a zoomed figure leaves out."""
    return sum(s > _window(lanes)[1] for _, t in lanes for s in t.samples)


def describe(lanes: Sequence[tuple[str, Timing]]) -> str:
    """For people who do not see the figure."""
    parts = [
        f"{name}: median {seconds_text(t.p50)}, 80% between {seconds_text(t.p10)} and "
        f"{seconds_text(t.p90)}, {t.count} calls"
        for name, t in lanes
    ]
    shown = "Times of every call" if any(t.samples for _, t in lanes) else "Median and p10 to p90"
    return f"{shown}, one lane a kernel. " + "; ".join(parts) + "."
