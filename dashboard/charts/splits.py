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
    """Of fixed splits, by their number."""
    planned: float
    here: float
    """Of the marked number of splits."""
    floor: float
    """Bound of memory alone."""


def split_figure(
    curve: Sequence[Split],
    planned: tuple[str, Split],
    looked_at: Split,
    palette: Palette,
    measured: Mapping[int, float] | None = None,
    times: Times | None = None,
    height: int = 440,
) -> go.Figure:
    """Time above, SM fill below, by number of fixed splits. Where no time can be predicted, tiles of the place with the
    most to do stand in its place.

    ``planned`` is the planner's schedule and what it comes to: a point of the curve, or a line across when it
    is balanced, which has no splits. ``measured`` is seconds by splits.
    """
    schedule, chosen = planned
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.07)
    theme.style(figure, palette, height, hovermode="x unified")
    splits = [s.splits for s in curve]
    tops = [s.span for s in curve] if times is None else [1e6 * t for t in times.curve]
    top = {"planned": chosen.span, "here": looked_at.span}
    if times is not None:
        top = {"planned": 1e6 * times.planned, "here": 1e6 * times.here}
    words = "%{y:,.0f} tiles one after the other" if times is None else "%{y:,.1f} µs predicted"
    panels = (
        (1, tops, words + ", %{customdata[0]:,} blocks"),
        (2, [s.fill for s in curve], "%{y:.1%} of time on tiles, %{customdata[1]:.2f} waves"),
    )
    for row, values, hover in panels:
        figure.add_trace(
            go.Scatter(
                x=splits,
                y=values,
                customdata=[(s.blocks, s.waves) for s in curve],
                mode="lines+markers",
                name="fixed splits",
                showlegend=row == 1,
                line={"color": palette.predicted, "dash": "dash", "width": 2},
                marker={"size": 5},
                hovertemplate=hover + "<extra></extra>",
            ),
            row,
            1,
        )
        if schedule == "balanced":
            y = top["planned"] if row == 1 else chosen.fill
            line = {"color": palette.measured, "dash": "longdash", "width": 2}
            figure.add_trace(
                go.Scatter(
                    x=[splits[0], splits[-1]], y=[y, y], mode="lines", line=line, hoverinfo="skip",
                    name="the planner: shares of all tiles", legendgroup="planner", showlegend=row == 1,
                ),
                row, 1,
            )  # fmt: skip
        marks = [("this view", looked_at, top["here"], "circle-open", palette.series[1])]
        if schedule == "fixed":
            marks.insert(0, ("the planner", chosen, top["planned"], "diamond", palette.predicted))
        for name, split, above, symbol, colour in marks:
            y = above if row == 1 else split.fill
            figure.add_trace(
                go.Scatter(
                    x=[split.splits],
                    y=[y],
                    name=name,
                    legendgroup=name,
                    showlegend=row == 1,
                    mode="markers",
                    marker={
                        "symbol": symbol,
                        "size": 13,
                        "color": colour,
                        "line": {"width": 3, "color": colour},
                    },
                    hoverinfo="skip",
                ),
                row,
                1,
            )
    if times is not None:
        seen = [1e6 * t for t in (measured or {}).values()]
        if seen:
            figure.add_trace(
                go.Scatter(
                    x=list(measured or {}), y=seen, mode="markers", name="measured",
                    marker={"symbol": "square", "size": 10, "color": palette.measured},
                    hovertemplate="measured: %{y:,.1f} µs<extra></extra>",
                ),
                1, 1,
            )  # fmt: skip
        least = 1e6 * times.floor
        figure.add_hline(least, line={"color": palette.muted, "dash": "dot", "width": 1.5}, row=1, col=1)
        figure.add_annotation(
            x=0.01, xref="x domain", xanchor="left", y=math.log10(least), yref="y", yanchor="top",
            text="every byte at the card's rate",
        )  # fmt: skip
        tops = [*tops, *seen, least]
    ticks = [s for s in (1 << n for n in range(10)) if s <= splits[-1]]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[str(t) for t in ticks])
    figure.update_xaxes(title_text="fixed splits of each sequence's keys", row=2, col=1)
    axis = theme.logarithmic(0.5 * min(*tops, *top.values()), 1.3 * max(*tops, *top.values()))
    title = "tiles of the busiest place" if times is None else "time (µs)"
    figure.update_yaxes(title_text=title, **axis, row=1, col=1)
    figure.update_yaxes(title_text="SM fill", tickformat=".0%", range=[0, 1.05], row=2, col=1)
    return figure
