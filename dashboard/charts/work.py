"""Arithmetic done, useful and dense; gain of skipping; softmax state of a tile's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cufa.dashboard import theme
from cufa.dashboard.model.published import VERSIONS
from cufa.dashboard.model.softmax_steps import Step
from cufa.dashboard.model.work import Work
from cufa.dashboard.theme import Palette
from cufa.schedule.schedule import Tile

_FAR = 8.0
"""Ratios above this value get a logarithmic axis."""


def si(value: float, unit: str) -> str:
    """1.23 TFLOP and the like."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def flops_figure(work: Work, palette: Palette, operation: str = "forward") -> go.Figure:
    """Useful, done and dense floating-point operations of an operation, one bar each."""
    figure = theme.new_figure(palette, 210, barmode="stack", bargap=0.35, showlegend=False)
    full, partial, skipped = (palette.tiles[t] for t in (Tile.FULL, Tile.PARTIAL, Tile.SKIPPED))
    for name, row, value, style in (
        ("useful", "useful", work.useful, full),
        ("useful part", "done", work.useful, full),
        ("wasted", "done", work.waste, partial),
        ("dense", "no mask", work.dense, skipped),
    ):
        look, hover = theme.bar_pattern(style, palette), f"{name}: {si(value, 'FLOP')}<extra></extra>"
        figure.add_bar(x=[value], y=[row], orientation="h", name=name, marker=look, hovertemplate=hover)
    for row, value in (("useful", work.useful), ("done", work.done), ("no mask", work.dense)):
        ink = {"color": palette.text}
        figure.add_annotation(x=value, y=row, text=si(value, "FLOP"), xanchor="left", xshift=6, font=ink)
    title = f"floating-point operations of the {operation} pass"
    limit = 1.28 * max(work.dense, work.done, 1)
    figure.update_xaxes(title_text=title, exponentformat="SI", range=[0, limit])
    return figure.update_yaxes(autorange="reversed", showgrid=False)


def speedup_figure(
    from_launch: tuple[Sequence[int], Sequence[float]], from_tiles: tuple[Sequence[int], Sequence[float]],
    here: tuple[int, float], measured: Mapping[str, Mapping[int, float]], palette: Palette, *,
    limit: float = 2.0, with_published: bool = True,
) -> go.Figure:  # fmt: skip
    """Speed-up by skipping over length: predicted from tile counts and from simulated launches (lengths and ratios),
    the limit of tile counts, and measured series. Large ratios get a logarithmic axis."""
    figure = theme.new_figure(palette, 380)

    def add(name: str, xy: tuple[Sequence[float], Sequence[float]], **looks: object) -> None:
        hover = "length %{x:,}: %{y:.3f}×<extra>%{fullData.name}</extra>"
        figure.add_scatter(x=list(xy[0]), y=list(xy[1]), name=name, hovertemplate=hover, **looks)

    dashed = {"color": palette.predicted, "dash": "dash", "width": 2.5}
    add("predicted: tiles alone", from_tiles, mode="lines", line=dashed)
    dotted = {"color": palette.series[3], "dash": "dot", "width": 1.5}
    ring = {"symbol": "circle-open", "size": 7}
    add("predicted: on this card's SMs", from_launch, mode="lines+markers", line=dotted, marker=ring)
    symbols = ("diamond", "square", "triangle-up", "star")
    for number, (name, values) in enumerate(measured.items()):
        colour = (palette.measured, palette.series[5], palette.series[1], palette.series[4])[number % 4]
        looks = {"line": {"color": colour, "width": 2}, "marker": {"symbol": symbols[number % 4], "size": 10}}
        add(name, (tuple(values), tuple(values.values())), mode="lines+markers", **looks)
    if with_published:
        cross = {"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": palette.muted}}
        published = [x.seqlen for x in VERSIONS], [x.fa1_ms / x.fa2_ms for x in VERSIONS]
        add("published FA1→FA2, A10G", published, mode="markers", marker=cross)
    dot = {"size": 13, "color": palette.accent, "line": {"width": 2, "color": palette.background}}
    add("this view", ((here[0],), (here[1],)), mode="markers", marker=dot)
    top = max(*from_tiles[1], *from_launch[1], *(v for values in measured.values() for v in values.values()))
    is_log = top > _FAR
    if limit < float("inf"):
        top = max(top, 1.05 * limit)
        theme.reference_line(figure, palette, limit, f"{limit:g}×: limit of the tile counts", is_log=is_log)
    powers = list(from_tiles[0])
    names = [f"{n // 1024}k" if n >= 1024 else str(n) for n in powers]
    figure.update_xaxes(
        title_text="sequence length (queries = keys)", type="log", tickvals=powers, ticktext=names
    )
    figure.update_yaxes(title_text="time without skipping ÷ time with it", ticksuffix="×")
    return figure.update_yaxes(
        theme.logarithmic(0.9, 1.2 * top, "×") if is_log else {"range": [0.9, top * 1.05]}
    )


def softmax_figure(step: Step, palette: Palette) -> go.Figure:
    """Running maximum m and sum l of each row, before and after one key block."""
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.08)
    theme.style(figure, palette, 380, hovermode="x unified")
    rows = np.arange(len(step.m_after))
    state = (("m", step.m_before, step.m_after), ("l", step.l_before, step.l_after))
    for panel, (symbol, before, after) in enumerate(state, 1):
        for name, values, colour, dash, mark in (
            ("before", before, palette.muted, "dot", "circle-open"),
            ("after", after, palette.accent, "solid", "circle"),
        ):
            figure.add_scatter(
                x=rows,
                y=np.where(np.isfinite(values), values, np.nan),
                name=f"{name} the tile",
                legendgroup=name,
                showlegend=panel == 1,
                hovertemplate=f"{symbol} {name}: %{{y:.4f}}<extra></extra>",
                mode="lines" if len(rows) > 1 else "markers",
                line={"color": colour, "dash": dash, "width": 2, "shape": "hvh"},
                marker={"color": colour, "size": 10, "symbol": mark},
                row=panel,
                col=1,
            )
    figure.update_yaxes(title_text="m: running maximum", row=1, col=1)
    figure.update_yaxes(title_text="l: running sum", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="row of the query block", row=2, col=1)
    if len(rows) <= 12:
        figure.update_xaxes(tickvals=rows, range=[-0.5, len(rows) - 0.5])
    return figure
