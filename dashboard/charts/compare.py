"""Kernels against sequence length, and measured figures beside published ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import SYMBOLS, Palette

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_APART = 1.014
_FAR = 8.0
"""Ratios that differ by more than this factor get a logarithmic axis."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A value at a sequence length, with its interval."""

    length: int
    value: float
    low: float
    high: float
    text: str
    """Text of the hover label."""


def rate_point(m: Measurement) -> Point:
    """Useful TFLOP/s, or TB/s of a memory-bound operation, with p10 to p90."""
    value = m.gbytes / 1e3 if m.operation.memory_bound else m.tflops
    low, high = (value * m.timing.p50 / t for t in (m.timing.p90, m.timing.p10))
    return Point(m.problem.seqlen_k, value, low, high, f"{m.case}<br>{m.speed}")


def by_length(
    series: Mapping[str, Sequence[Point]], palette: Palette, title: str, *, line: tuple[float, str] | None = None,
    published: str = "", ratio: bool = False, names: Sequence[str] = (),
) -> go.Figure:  # fmt: skip
    """A curve per series over the number of keys (powers of two), with error bars.

    ``line`` is a horizontal line with a label; the series named ``published`` is muted. The axis of a ``ratio`` is
    logarithmic when values are far apart. ``names`` are all series of the page: a series looks alike in all figures.
    """
    figure = theme.new_figure(palette, 430)
    order = [*dict.fromkeys([*names, *series])]
    for place, (name, points) in enumerate(series.items()):
        points = sorted(points, key=lambda p: p.length)
        number = order.index(name)
        colour = palette.muted if name == published else palette.series[number % len(palette.series)]
        apart = _APART ** (place - (len(series) - 1) / 2)  # error bars at one length must not overlap
        values = [p.value for p in points]
        figure.add_scatter(
            x=[p.length * apart for p in points],
            y=values,
            error_y=theme.intervals(values, [p.low for p in points], [p.high for p in points]),
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": _DASHES[number % len(_DASHES)]},
            marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9, "color": colour},
            customdata=[p.text for p in points],
            hovertemplate=f"<b>{name}</b><br>%{{customdata}}<extra></extra>",
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
    if line is not None:
        theme.reference_line(figure, palette, *line, is_log=is_log)
    return figure


def bars(
    groups: Mapping[str, Mapping[str, float]], palette: Palette, title: str, *, marked: str = "", published: str = ""
) -> go.Figure:  # fmt: skip
    """Horizontal bars of {series: {row: value}}: the row ``marked`` is emphasised, the series ``published`` hatched."""
    rows = list(dict.fromkeys(row for values in groups.values() for row in values))
    figure = theme.new_figure(palette, 110 + (26 * len(groups) + 14) * len(rows), barmode="group")
    for number, (name, values) in enumerate(groups.items()):
        colours = [palette.measured if row == marked else palette.series[number] for row in values]
        marker: dict[str, object] = {"color": colours}
        if name == published:
            pattern = {"shape": "/", "size": 6, "solidity": 0.3, "fillmode": "replace"}
            marker = {"color": palette.muted, "pattern": pattern}
        figure.add_bar(
            x=list(values.values()),
            y=list(values),
            name=name,
            orientation="h",
            marker=marker,
            text=[f"{v:,.3g}" for v in values.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"<b>{name}</b><br>%{{y}}: %{{x:,.3g}}<extra></extra>",
        )
    figure.update_yaxes(theme.PLAIN, autorange="reversed", categoryorder="array", categoryarray=rows)
    figure.update_xaxes(title_text=title, rangemode="tozero")
    return figure.update_layout(showlegend=len(groups) > 1, margin={"r": 70})
