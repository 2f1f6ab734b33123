"""One kernel on one problem, by date."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.many import time_of
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import Palette

_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "star", "x")


def over_time(series: dict[str, Sequence[Measurement]], palette: Palette, height: int = 320) -> go.Figure:
    """Median times, p10 to p90 as bars, of each machine; another version of the source is another symbol."""
    figure = theme.new_figure(palette, height, hovermode="closest")
    factor, unit = unit_for(max(m.seconds for rows in series.values() for m in rows))
    versions = {v: n for n, v in enumerate(dict.fromkeys(m.commit for rows in series.values() for m in rows))}
    for number, (name, rows) in enumerate(series.items()):
        colour = palette.series[number % len(palette.series)]
        times = [factor * m.timing.p50 for m in rows]
        spread = {
            "array": [factor * m.timing.p90 - t for m, t in zip(rows, times, strict=True)],
            "arrayminus": [t - factor * m.timing.p10 for m, t in zip(rows, times, strict=True)],
        }
        figure.add_trace(
            go.Scatter(
                x=[time_of(m.recorded) for m in rows],
                y=times,
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 1.5, "dash": ("solid", "dash", "dot")[number % 3]},
                error_y={**spread, "color": colour, "thickness": 1.2},
                marker={"size": 10, "symbol": [_SYMBOLS[versions[m.commit] % len(_SYMBOLS)] for m in rows]},
                customdata=[version(m) for m in rows],
                hovertemplate=f"%{{x|%Y-%m-%d %H:%M}}<br>%{{y:,.4g}} {unit}<br>%{{customdata}}<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="measured on (UTC)")
    figure.update_yaxes(title_text=f"time ({unit})", rangemode="tozero")
    return figure


def version(m: Measurement) -> str:
    """What of the source was measured, in words."""
    return f"version {m.commit[:10]}" if m.commit else "version not kept"
