"""Splits against predicted time and SM fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cufa.dashboard import theme
from cufa.dashboard.model.splits import Split
from cufa.dashboard.theme import Palette


def megabytes(size: int) -> str:
    """Of bytes."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def split_figure(
    curve: Sequence[Split],
    planned: tuple[str, Split],
    looked_at: Split,
    palette: Palette,
    measured: Mapping[int, float] | None = None,
    height: int = 440,
) -> go.Figure:
    """Time over the shortest above, SM fill below, by number of fixed splits.

    ``planned`` is the planner's schedule and what it comes to: a point of the curve, or a line across when it
    is balanced, which has no splits. ``measured`` is seconds by splits, drawn over the shortest of them.
    """
    schedule, chosen = planned
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.07)
    theme.style(figure, palette, height, hovermode="x unified")
    splits = [s.splits for s in curve]
    shortest = min(chosen.span, *(s.span for s in curve))
    panels = (
        (1, [s.span / shortest for s in curve], "%{y:.2f}× the shortest time, %{customdata[0]:,} blocks"),
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
            y = chosen.span / shortest if row == 1 else chosen.fill
            line = {"color": palette.measured, "dash": "longdash", "width": 2}
            figure.add_trace(
                go.Scatter(
                    x=[splits[0], splits[-1]], y=[y, y], mode="lines", line=line, hoverinfo="skip",
                    name="the planner: shares of all tiles", legendgroup="planner", showlegend=row == 1,
                ),
                row, 1,
            )  # fmt: skip
        marks = [("this view", looked_at, "circle-open", palette.series[1])]
        if schedule == "fixed":
            marks.insert(0, ("the planner", chosen, "diamond", palette.measured))
        for name, split, symbol, colour in marks:
            y = split.span / shortest if row == 1 else split.fill
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
    if measured and len(measured) > 1:  # one alone would be the shortest of itself
        figure.add_trace(
            go.Scatter(
                x=list(measured), y=[t / min(measured.values()) for t in measured.values()],
                customdata=[1e6 * t for t in measured.values()], mode="markers", name="measured",
                marker={"symbol": "square", "size": 10, "color": palette.measured},
                hovertemplate="measured: %{customdata:,.1f} µs, %{y:.2f}× the shortest<extra></extra>",
            ),
            1, 1,
        )  # fmt: skip
    ticks = [s for s in (1 << n for n in range(10)) if s <= splits[-1]]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[str(t) for t in ticks])
    figure.update_xaxes(title_text="fixed splits of each sequence's keys", row=2, col=1)
    axis = theme.logarithmic(0.9, 1.2 * max(s.span for s in curve) / shortest, "×")
    figure.update_yaxes(title_text="time ÷ shortest", **axis, row=1, col=1)
    figure.update_yaxes(title_text="SM fill", tickformat=".0%", range=[0, 1.05], row=2, col=1)
    return figure
