"""Error against time of one attention in several precisions, and how the errors of one result are distributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import SYMBOLS, Palette


def against_time(rows: Sequence[Measurement], palette: Palette) -> go.Figure:
    """A point for each contender: median time, and RMSE on a logarithmic axis. Left and low is better."""
    figure = theme.new_figure(palette, 400)
    factor, unit = unit_for(max(m.seconds for m in rows))
    for number, m in enumerate(rows):
        accuracy = m.row.json["accuracy"]
        figure.add_scatter(
            x=[factor * m.seconds],
            y=[accuracy["rmse"]],
            name=m.label,
            mode="markers",
            marker={
                "size": 13,
                "symbol": SYMBOLS[number % len(SYMBOLS)],
                "color": palette.series[number % len(palette.series)],
            },
            hovertemplate=f"<b>{m.label}</b><br>%{{x:.4g}} {unit}<br>RMSE %{{y:.2e}}<br>largest "
            f"{accuracy['largest']:.1e}<extra></extra>",
        )
    figure.update_xaxes(title_text=f"median time ({unit})", rangemode="tozero")
    errors = [m.row.json["accuracy"]["rmse"] for m in rows]
    return figure.update_yaxes(title_text="RMSE against float64", **_decades(errors))


def distribution(quantiles: Mapping[str, Mapping[str, float]], palette: Palette) -> go.Figure:
    """For each contender the share of results whose error is below a value, on a logarithmic axis."""
    figure = theme.new_figure(palette, 320)
    for number, (name, errors) in enumerate(quantiles.items()):
        figure.add_scatter(
            x=list(errors.values()),
            y=[float(share) for share in errors],
            name=name,
            mode="lines+markers",
            line={"color": palette.series[number % len(palette.series)], "width": 2},
            marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
            hovertemplate=f"<b>{name}</b><br>%{{y:.1%}} of the numbers are off by at most %{{x:.2e}}<extra></extra>",
        )
    figure.update_xaxes(
        title_text="absolute error", **_decades(x for y in quantiles.values() for x in y.values())
    )
    return figure.update_yaxes(title_text="share below", tickformat=".0%", range=[0, 1.04])


def _decades(values: Iterable[float]) -> dict[str, object]:
    positive = [x for x in values if x > 0] or [1.0]
    ends = [math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))]
    return {"type": "log", "range": ends, "dtick": 1, "exponentformat": "power"}
