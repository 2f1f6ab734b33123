"""Kernels against sequence length, and measured figures beside published ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.theme import Palette

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_APART = 1.014
_FAR = 8.0
"""Ratios that differ by more than this factor get a logarithmic axis."""
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "hexagon", "cross")


@dataclasses.dataclass(frozen=True)
class Point:
    """A value at a sequence length, with an interval where there is one."""

    length: int
    value: float
    low: float
    high: float
    text: str
    """For the hover."""


def by_length(
    series: Mapping[str, Sequence[Point]],
    palette: Palette,
    title: str,
    *,
    reference: tuple[float, str] | None = None,
    limit: tuple[float, str] | None = None,
    published: str = "",
    ratio: bool = False,
    names: Sequence[str] = (),
    height: int = 430,
) -> go.Figure:
    """A line a series over the length of keys (powers of two), error bars where intervals are known.

    ``reference`` and ``limit`` are horizontal lines with a label; the series named ``published`` is muted.
    The axis of a ``ratio`` is logarithmic when values are far apart. ``names`` are those of all series on the
    page, so that one has the same looks in all figures.
    """
    figure = theme.new_figure(palette, height, hovermode="closest")
    order = [*dict.fromkeys([*names, *series])]
    for place, (name, points) in enumerate(series.items()):
        points = sorted(points, key=lambda p: p.length)
        number = order.index(name)
        colour = palette.muted if name == published else palette.series[number % len(palette.series)]
        apart = _APART ** (place - (len(series) - 1) / 2)  # error bars at one length stay apart
        figure.add_trace(
            go.Scatter(
                x=[p.length * apart for p in points],
                y=[p.value for p in points],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [p.high - p.value for p in points],
                    "arrayminus": [p.value - p.low for p in points],
                    "thickness": 1.2,
                    "width": 4,
                },
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": _DASHES[number % len(_DASHES)]},
                marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 9, "color": colour},
                customdata=[p.text for p in points],
                hovertemplate=f"<b>{name}</b><br>%{{customdata}}<extra></extra>",
            )
        )
    lengths = sorted({p.length for points in series.values() for p in points})
    figure.update_xaxes(
        type="log",
        range=[math.log10(lengths[0] / 1.25), math.log10(1.25 * lengths[-1])],
        title_text="keys (sequence length)",
        tickvals=lengths,
        ticktext=[f"{n:,}" for n in lengths],
    )
    values = [p.value for points in series.values() for p in points]
    is_log = ratio and max(values) > _FAR * min(values)
    figure.update_yaxes(title_text=title, rangemode="tozero", ticksuffix="×" if ratio else "")
    if is_log:
        figure.update_yaxes(theme.logarithmic(min(1.0, *values) / 1.2, 1.25 * max(values), "×"))
    for y, text in filter(None, (reference, limit)):
        figure.add_hline(y, line={"color": palette.muted, "dash": "dot", "width": 1.5})
        place = math.log10(y) if is_log else y
        figure.add_annotation(xref="paper", x=0.01, xanchor="left", y=place, yanchor="bottom", text=text)
    return figure


def bars(
    groups: Mapping[str, Mapping[str, float]],
    palette: Palette,
    title: str,
    *,
    marked: str = "",
    published: str = "",
    suffix: str = "",
) -> go.Figure:
    """Horizontal bars: ``groups`` is {series: {row: value}}; the row named ``marked`` is emphasised, the
    series named ``published`` is muted and hatched."""
    rows = list(dict.fromkeys(row for values in groups.values() for row in values))
    figure = theme.new_figure(palette, 110 + (26 * len(groups) + 14) * len(rows), barmode="group")
    for number, (name, values) in enumerate(groups.items()):
        is_published = name == published
        colours = [
            palette.muted if is_published else palette.measured if row == marked else palette.series[number]
            for row in values
        ]
        pattern = {"shape": "/" if is_published else "", "size": 6, "solidity": 0.3, "fillmode": "replace"}
        figure.add_trace(
            go.Bar(
                x=list(values.values()),
                y=list(values),
                name=name,
                orientation="h",
                marker={"color": colours, "pattern": pattern if is_published else None},
                text=[f"{v:,.3g}{suffix}" for v in values.values()],
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"<b>{name}</b><br>%{{y}}: %{{x:,.3g}}{suffix}<extra></extra>",
            )
        )
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticks="", categoryorder="array", categoryarray=rows
    )
    figure.update_xaxes(title_text=title, rangemode="tozero")
    figure.update_layout(showlegend=len(groups) > 1, margin={"r": 70})
    return figure
