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
    figure = theme.new_figure(palette, 120 + 46 * len(parts), barmode="stack", bargap=0.3)
    colours = (*palette.series, palette.warn, palette.accent, palette.muted, palette.grid)
    for kind, colour, pattern in zip(KINDS, colours, _PATTERNS, strict=True):
        counts = [part.get(kind, 0) for part in parts.values()]
        if not any(counts):
            continue
        edge = {"color": palette.background, "width": 0.5}
        look = {"fgcolor": palette.background, "bgcolor": colour, "fillmode": "overlay", "size": 6}
        figure.add_bar(
            x=counts,
            y=list(parts),
            orientation="h",
            name=kind,
            marker={"color": colour, "line": edge, "pattern": {"shape": pattern, "solidity": 0.25, **look}},
            customdata=[
                n / max(1, sum(part.values())) for n, part in zip(counts, parts.values(), strict=True)
            ],
            hovertemplate="%{x:,} %{fullData.name}, %{customdata:.0%}<extra>%{y}</extra>",
        )
    figure.update_xaxes(title_text="instructions of one warp")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_layout(legend={"traceorder": "normal"})


def live_figure(code: Code, file: str, palette: Palette) -> go.Figure:
    """Live registers at each instruction, in program order; loops over tiles are shaded."""
    figure = theme.new_figure(palette, 260)
    figure.add_scatter(
        y=np.array([i.live or 0 for i in code.instructions], np.int16),
        mode="lines",
        line={"color": palette.accent, "width": 1.5, "shape": "hv"},
        customdata=np.array([i.line_in(file) or 0 for i in code.instructions], np.int32),
        hovertemplate=f"instruction %{{x:,}}: %{{y}} registers live<br>{file}:%{{customdata}}<extra></extra>",
        showlegend=False,
    )
    for first, last in (part for loop in code.product_loops for part in loop.parts):
        figure.add_vrect(first, last, fillcolor=palette.idle, line_width=0, layer="below")
    figure.update_xaxes(title_text="instruction, in program order")
    return figure.update_yaxes(title_text="live registers", rangemode="tozero")
