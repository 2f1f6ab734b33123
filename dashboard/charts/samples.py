"""Distributions of measured times: the samples, p10 to p90, and the median."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from cufa.commands.common import seconds_text
from cufa.dashboard import theme
from cufa.dashboard.theme import SYMBOLS, Palette
from cufa.measure.timing import Timing

_LANE = 0.3
"""Half the height of a lane. Samples cross the lane from top to bottom in measuring order."""

Lanes = Sequence[tuple[str, Timing]]


def unit_for(seconds: float) -> tuple[float, str]:
    """(factor, unit) for a time with few digits before the point."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def samples_figure(lanes: Lanes, palette: Palette, *, zoomed: bool = False) -> go.Figure:
    """One lane per contender, the first on top, one dot per sample; recorded measurements have no samples.

    ``zoomed``: the axis begins at the fastest call and omits outliers (:func:`beyond`).
    """
    figure = theme.new_figure(palette, 96 + 74 * len(lanes), showlegend=False)
    factor, unit = unit_for(max((t.p50 for _, t in lanes), default=0.0))
    for number, (name, timing) in enumerate(lanes):
        y, colour = -number, palette.series[number % len(palette.series)]
        x = factor * np.array(timing.samples)
        p10, p50, p90 = (factor * t for t in (timing.p10, timing.p50, timing.p90))
        band = {"x0": p10, "x1": p90, "y0": y - _LANE - 0.06, "y1": y + _LANE + 0.06}
        figure.add_shape(type="rect", **band, fillcolor=colour, opacity=0.16, line_width=0, layer="below")
        median = {"x0": p50, "x1": p50, "y0": y - 0.42, "y1": y + 0.42}
        figure.add_shape(type="line", **median, line={"color": palette.text, "width": 2})
        order = np.linspace(_LANE, -_LANE, len(x)) if len(x) > 1 else np.zeros(len(x))
        figure.add_scatter(
            x=x,
            y=y + order,
            mode="markers",
            name=name,
            marker={
                "color": colour,
                "size": 6 if len(x) > 60 else 8,
                "opacity": 0.75,
                "symbol": SYMBOLS[number % len(SYMBOLS)],
                "line": {"width": 0.5, "color": palette.background},
            },
            customdata=np.arange(1, len(x) + 1),
            hovertemplate=f"<b>{name}</b><br>call %{{customdata}} of {len(x)}: %{{x:.4g}} {unit}"
            f"<br>p10 {p10:.4g}, p50 {p50:.4g}, p90 {p90:.4g} {unit}<extra></extra>",
        )
    axis: dict[str, object] = {"rangemode": "tozero"}
    if zoomed:
        low, high = (factor * t for t in _window(lanes))
        axis = {"range": [low - 0.03 * (high - low), high]}
    figure.update_xaxes(title_text=f"time of a call ({unit})", **axis)
    names = [f"{name}<br><b>{seconds_text(t.p50)}</b>" for name, t in lanes]
    places = [-n for n in range(len(lanes))]
    return figure.update_yaxes(theme.PLAIN, tickvals=places, ticktext=names, range=[-len(lanes) + 0.45, 0.55])


def _window(lanes: Lanes) -> tuple[float, float]:
    """The range of a zoomed figure: from the fastest call to slightly above every p90."""
    low = min(min(t.samples, default=t.p10) for _, t in lanes)
    return low, low + 1.15 * (max(t.p90 for _, t in lanes) - low) + 1e-9


def beyond(lanes: Lanes) -> int:
    """Calls beyond the right edge of a zoomed figure."""
    return sum(s > _window(lanes)[1] for _, t in lanes for s in t.samples)


def describe(lanes: Lanes) -> str:
    """The figure in words."""
    parts = [
        f"{name}: median {seconds_text(t.p50)}, 80% between {seconds_text(t.p10)} and "
        f"{seconds_text(t.p90)}, {t.count} calls"
        for name, t in lanes
    ]
    shown = "Times of every call" if any(t.samples for _, t in lanes) else "Median and p10 to p90"
    return f"{shown}, one lane per kernel. " + "; ".join(parts) + "."
