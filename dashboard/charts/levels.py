"""One kernel under the roofs of every level of memory."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.levels import Level
from cufa.dashboard.theme import Palette
from cufa.problem.problem import Problem

_LOOKS = (("solid", "circle"), ("dash", "diamond"), ("dot", "square"))


def levels_figure(
    problem: Problem,
    levels: Sequence[Level],
    top: float,
    reached: float | None,
    palette: Palette,
    height: int = 420,
) -> go.Figure:
    """FLOP/s against useful FLOP per byte of each level; ``top`` is what products allow, ``reached`` what was measured.
    A mark on a slope is the most that the level lets through; one below it is where the kernel is."""
    figure = theme.new_figure(palette, height, hovermode="closest")
    known = [level for level in levels if level.ceiling]
    at = [level.intensity(problem) for level in levels]
    ridges = [top / (level.ceiling or 1) for level in known]
    low, high = min(*at, *ridges) / 3, 3 * max(*at, *ridges)
    bottom = top
    for number, level in enumerate(levels):
        dash, symbol = _LOOKS[number % len(_LOOKS)]
        colour = palette.series[(2, 0, 1)[number % 3]]
        x = level.intensity(problem)
        if level.ceiling:
            ridge = top / level.ceiling
            name = f"{level.name}: {level.ceiling / 1e12:,.1f} TB/s"
            line = {
                "x": [low, ridge],
                "y": [low * level.ceiling / 1e12, top / 1e12],
                "mode": "lines",
                "name": name,
            }
            figure.add_trace(
                go.Scatter(**line, line={"color": colour, "dash": dash, "width": 2}, hoverinfo="skip")
            )
            bottom = min(bottom, x * level.ceiling)
        if reached:
            bottom = min(bottom, reached)
            hover = f"{level.name}: %{{x:,.3g}} FLOP per byte, %{{y:,.1f}} TFLOP/s<extra></extra>"
            mark = {
                "symbol": symbol,
                "size": 12,
                "color": colour,
                "line": {"width": 1.5, "color": palette.background},
            }
            point = {"x": [x], "y": [reached / 1e12], "mode": "markers+text", "text": [level.name]}
            point |= {
                "name": f"measured, {level.name}",
                "textposition": f"{'top' if number == 2 else 'bottom'} center",
            }
            figure.add_trace(go.Scatter(**point, marker=mark, hovertemplate=hover, showlegend=False))
    ridge = min(ridges, default=low)
    roof = {
        "x": [ridge, high],
        "y": [top / 1e12] * 2,
        "mode": "lines",
        "name": f"products: {top / 1e12:,.0f} TFLOP/s",
    }
    figure.add_trace(go.Scatter(**roof, line={"color": palette.text, "width": 2}, hoverinfo="skip"))
    figure.update_xaxes(
        title_text="useful FLOP per byte that the level moves", **theme.logarithmic(low, high, short=True)
    )
    figure.update_yaxes(title_text="TFLOP/s (useful)", **theme.logarithmic(bottom / 3e12, 1.6 * top / 1e12))
    figure.update_layout(legend={"y": -0.28, "yanchor": "top"})
    return figure
