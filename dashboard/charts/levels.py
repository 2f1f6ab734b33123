"""One kernel under the roofs of every level of memory."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.levels import Level
from cufa.dashboard.theme import Palette
from cufa.problem.problem import Problem

_LOOKS = (("solid", "circle", 2), ("dash", "diamond", 0), ("dot", "square", 1))
"""Dash, marker, and number of the series' colour."""


def levels_figure(
    problem: Problem, levels: Sequence[Level], top: float, reached: float | None, palette: Palette
) -> go.Figure:
    """FLOP/s against useful FLOP per byte of each level. ``top`` is the ceiling of products, ``reached`` the measured
    rate. A mark on a slope: the level limits the kernel."""
    figure = theme.new_figure(palette, 420)
    ridges = [top / level.ceiling for level in levels if level.ceiling]
    at = [level.intensity(problem) for level in levels]
    low, high = min(*at, *ridges) / 3, 3 * max(*at, *ridges)
    bottom = min(top, reached or top)
    for number, (level, x) in enumerate(zip(levels, at, strict=True)):
        dash, symbol, series = _LOOKS[number % len(_LOOKS)]
        colour, edge = palette.series[series], {"width": 1.5, "color": palette.background}
        if level.ceiling:
            figure.add_scatter(
                x=[low, top / level.ceiling],
                y=[low * level.ceiling / 1e12, top / 1e12],
                mode="lines",
                name=f"{level.name}: {level.ceiling / 1e12:,.1f} TB/s",
                line={"color": colour, "dash": dash, "width": 2},
                hoverinfo="skip",
            )
            bottom = min(bottom, x * level.ceiling)
        if reached:
            figure.add_scatter(
                x=[x],
                y=[reached / 1e12],
                mode="markers+text",
                text=[level.name],
                textposition=f"{'top' if number == 2 else 'bottom'} center",
                name=f"measured, {level.name}",
                marker={"symbol": symbol, "size": 12, "color": colour, "line": edge},
                hovertemplate=f"{level.name}: %{{x:,.3g}} FLOP per byte, %{{y:,.1f}} TFLOP/s<extra></extra>",
                showlegend=False,
            )
    figure.add_scatter(
        x=[min(ridges, default=low), high],
        y=[top / 1e12] * 2,
        mode="lines",
        name=f"products: {top / 1e12:,.0f} TFLOP/s",
        line={"color": palette.text, "width": 2},
        hoverinfo="skip",
    )
    axis = theme.logarithmic(low, high, short=True)
    figure.update_xaxes(axis, title_text="useful FLOP per byte that the level moves")
    figure.update_yaxes(theme.logarithmic(bottom / 3e12, 1.6 * top / 1e12), title_text="TFLOP/s (useful)")
    return figure.update_layout(legend={"y": -0.28, "yanchor": "top"})
