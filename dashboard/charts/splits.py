"""Splits against predicted time and SM fill."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cufa.dashboard import theme
from cufa.dashboard.model.splits import Split
from cufa.dashboard.theme import Palette


def megabytes(size: int) -> str:
    """Bytes as text."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@dataclasses.dataclass(frozen=True)
class Times:
    """Predicted seconds."""

    curve: tuple[float, ...]
    """Seconds for each number of fixed splits on the curve."""
    planned: float
    here: float
    """Seconds for the marked number of splits."""
    floor: float
    """Lower bound in seconds: reading all bytes."""


def split_figure(
    curve: Sequence[Split], planned: tuple[str, Split], looked_at: Split, palette: Palette,
    measured: Mapping[int, float] | None = None, times: Times | None = None,
) -> go.Figure:  # fmt: skip
    """Time above, SM fill below, by number of fixed splits. Without predicted times, the upper panel shows the tiles of
    the busiest place.

    ``planned`` is the planner's kind of split and its result: a point of the curve, or a horizontal line for balanced
    shares. ``measured``: seconds by number of splits.
    """
    schedule, chosen = planned
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.07)
    theme.style(figure, palette, 440, hovermode="x unified")
    splits = [s.splits for s in curve]
    tops, top_planned, top_here = [s.span for s in curve], chosen.span, looked_at.span
    words = "%{y:,.0f} tiles in sequence"
    if times is not None:
        tops, top_planned, top_here = [1e6 * t for t in times.curve], 1e6 * times.planned, 1e6 * times.here
        words = "%{y:,.1f} µs predicted"
    fills = "%{y:.1%} of time on tiles, %{customdata[1]:.2f} waves"
    panels = (
        (1, tops, top_planned, top_here, words + ", %{customdata[0]:,} blocks"),
        (2, [s.fill for s in curve], chosen.fill, looked_at.fill, fills),
    )
    for row, values, of_planner, here, hover in panels:
        place = {"row": row, "col": 1, "showlegend": row == 1}
        figure.add_scatter(
            x=splits,
            y=values,
            customdata=[(s.blocks, s.waves) for s in curve],
            mode="lines+markers",
            name="fixed splits",
            line={"color": palette.predicted, "dash": "dash", "width": 2},
            marker={"size": 5},
            hovertemplate=hover + "<extra></extra>",
            **place,
        )
        if schedule == "balanced":
            line = {"color": palette.measured, "dash": "longdash", "width": 2}
            figure.add_scatter(
                x=[splits[0], splits[-1]], y=[of_planner] * 2, mode="lines", line=line, hoverinfo="skip",
                name="the planner: shares of all tiles", legendgroup="planner", **place,
            )  # fmt: skip
        marks = [("this view", looked_at, here, "circle-open", palette.series[1])]
        if schedule == "fixed":
            marks.insert(0, ("the planner", chosen, of_planner, "diamond", palette.predicted))
        for name, split, y, symbol, colour in marks:
            look = {"symbol": symbol, "size": 13, "color": colour, "line": {"width": 3, "color": colour}}
            figure.add_scatter(
                x=[split.splits], y=[y], name=name, legendgroup=name, mode="markers", marker=look,
                hoverinfo="skip", **place,
            )  # fmt: skip
    if times is not None:
        times_us = [1e6 * t for t in (measured or {}).values()]
        if times_us:
            figure.add_scatter(
                x=list(measured or {}), y=times_us, mode="markers", name="measured", row=1, col=1,
                marker={"symbol": "square", "size": 10, "color": palette.measured},
                hovertemplate="measured: %{y:,.1f} µs<extra></extra>",
            )  # fmt: skip
        least = 1e6 * times.floor
        figure.add_hline(least, line={"color": palette.muted, "dash": "dot", "width": 1.5}, row=1, col=1)
        figure.add_annotation(
            x=0.01, xref="x domain", xanchor="left", y=math.log10(least), yref="y", yanchor="top",
            text="all bytes at the card's read rate",
        )  # fmt: skip
        tops = [*tops, *times_us, least]
    ticks = [s for s in (1 << n for n in range(10)) if s <= splits[-1]]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[str(t) for t in ticks])
    figure.update_xaxes(title_text="fixed splits of each sequence's keys", row=2, col=1)
    ends = [*tops, top_planned, top_here]
    title = "tiles of the busiest place" if times is None else "time (µs)"
    figure.update_yaxes(theme.logarithmic(0.5 * min(ends), 1.3 * max(ends)), title_text=title, row=1, col=1)
    return figure.update_yaxes(title_text="SM fill", tickformat=".0%", range=[0, 1.05], row=2, col=1)
