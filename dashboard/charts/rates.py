"""Memory-bound operations: rates beside a plain streaming read."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.theme import Palette
from cufa.measure.decode_cases import OURS


def rates_figure(rows: Sequence[Measurement], palette: Palette) -> go.Figure:
    """Rate of each contender of each case, as a share of a plain streaming read of the same bytes."""
    labels = list(dict.fromkeys(r.label for r in rows))
    grouped = len(labels) <= len(palette.series) and any(r.row.is_peer for r in rows)
    series = {"ours": list(rows)}
    if grouped:
        series = {label: [r for r in rows if r.label == label] for label in labels}
    names = list(dict.fromkeys(_row_name(r, grouped) for r in rows))
    height = 120 + (22 * len(series) + 12) * len(names)
    figure = theme.new_figure(palette, height, barmode="group", showlegend=grouped)
    for number, (label, mine) in enumerate(series.items()):
        figure.add_bar(
            x=[(r.of_read or 0.0) for r in mine],
            y=[_row_name(r, grouped) for r in mine],
            name=label,
            orientation="h",
            marker={"color": palette.series[number], "pattern": {"shape": ("", "/", "x")[number % 3]}},
            offsetgroup=label,
            customdata=[(1e6 * r.seconds, r.label, _split_words(r), str(r.problem)) for r in mine],
            hovertemplate="<b>%{customdata[1]}</b>: %{customdata[0]:,.1f} µs, %{x:.0%} of a plain "
            "read<br>%{customdata[3]}<br>%{customdata[2]}<extra></extra>",
        )
        figure.add_trace(_rates_beside(mine, [_row_name(r, grouped) for r in mine], label, palette))
    figure.add_vline(1.0, line={"color": palette.text, "width": 1.5, "dash": "dot"})
    shares = [tick / 5 for tick in range(6)]
    figure.update_xaxes(
        title_text="share of a plain streaming read", tickformat=".0%", tickvals=shares, range=[0, 1.2]
    )
    figure.update_yaxes(theme.PLAIN, autorange="reversed", categoryarray=names)
    return figure.update_layout(margin={"r": 30})  # rates are wider than their column in a narrow window


def _rates_beside(rows: Sequence[Measurement], names: Sequence[str], lane: str, palette: Palette) -> go.Bar:
    """The rate of each bar, in a column right of the line at 100%."""
    return go.Bar(
        base=[max(1.0, (r.of_read or 0.0)) for r in rows],
        x=[0.2] * len(rows),
        y=list(names),
        text=[r.speed for r in rows],
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": palette.text},
        constraintext="none",
        textangle=0,
        orientation="h",
        offsetgroup=lane,
        marker={"color": "rgba(0,0,0,0)"},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _row_name(row: Measurement, grouped: bool) -> str:
    return row.case if grouped or row.label == OURS else f"{row.case}:<br>{row.label}"


def _split_words(row: Measurement) -> str:
    if row.split is None:
        return "another library's kernel"
    cut = {"fixed": "splits of each sequence", "balanced": "shares of all tiles"}[row.split.kind]
    return f"{row.split.count:,} {cut}"
