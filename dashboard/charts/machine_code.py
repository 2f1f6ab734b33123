"""Instructions by kind, and registers along a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from cufa.build.machine_code import KINDS, Code
from cufa.dashboard import theme
from cufa.dashboard.theme import Palette

_PATTERNS = ("", "/", "x", ".", "-", "+", "|", "\\", "", "/")


def mix_figure(parts: Mapping[str, Mapping[str, int]], palette: Palette) -> go.Figure:
    """A bar for each part of a kernel: its instructions by kind."""
    figure = theme.new_figure(
        palette, 120 + 46 * len(parts), barmode="stack", hovermode="closest", bargap=0.3
    )
    colours = (*palette.series, palette.warn, palette.accent, palette.muted, palette.grid)
    for kind, colour, pattern in zip(KINDS, colours, _PATTERNS, strict=True):
        counts = [part.get(kind, 0) for part in parts.values()]
        if not any(counts):
            continue
        marker: dict[str, object] = {"color": colour, "line": {"color": palette.background, "width": 0.5}}
        if pattern:
            look = {"fgcolor": palette.background, "bgcolor": colour, "fillmode": "overlay"}
            marker["pattern"] = {"shape": pattern, "size": 6, "solidity": 0.25, **look}
        shares = [
            count / max(1, sum(part.values())) for count, part in zip(counts, parts.values(), strict=True)
        ]
        figure.add_trace(
            go.Bar(
                x=counts,
                y=list(parts),
                orientation="h",
                name=kind,
                marker=marker,
                customdata=shares,
                hovertemplate="%{x:,} %{fullData.name}, %{customdata:.0%}<extra>%{y}</extra>",
            )
        )
    figure.update_xaxes(title_text="instructions of one warp")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def live_figure(code: Code, given: int | None, file: str, palette: Palette) -> go.Figure:
    """Registers that hold something at each instruction, in program order; loops over tiles are shaded. ``given``: what
    a thread has."""
    figure = theme.new_figure(palette, 260, hovermode="closest")
    live = np.array([i.live or 0 for i in code.instructions], np.int16)
    lines = [i.line_in(file) or 0 for i in code.instructions]
    figure.add_trace(
        go.Scatter(
            y=live,
            mode="lines",
            line={"color": palette.accent, "width": 1.5, "shape": "hv"},
            customdata=np.array(lines, np.int32),
            hovertemplate="instruction %{x:,}: %{y} registers live<br>"
            + f"{file}:%{{customdata}}<extra></extra>",
            showlegend=False,
        )
    )
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": first, "x1": last, "y0": 0, "y1": 1,
         "fillcolor": palette.idle, "line": {"width": 0}, "layer": "below"}
        for loop in code.product_loops
        for first, last in loop.parts
    ]  # fmt: skip
    if given is not None:
        figure.add_hline(given, line={"color": palette.muted, "dash": "dash", "width": 1.5})
        text = f"a thread has {given}"
        figure.add_annotation(xref="paper", x=0.99, xanchor="right", y=given, yanchor="bottom", text=text)
    figure.update_layout(shapes=[*figure.layout.shapes, *shapes])
    figure.update_xaxes(title_text="instruction, in program order")
    figure.update_yaxes(title_text="live registers", rangemode="tozero")
    return figure
