"""Measured points under measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from cufa.bench.limits import Limits
from cufa.dashboard import theme
from cufa.dashboard.model.evidence import Measured
from cufa.dashboard.theme import Palette

_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "hexagon", "cross")


def intensity(row: Measured) -> float:
    """Useful FLOP a byte of compulsory traffic."""
    return row.problem.flops / row.problem.io_bytes


def exponential_ceiling(limits: Limits, head_dim: int) -> float:
    """FLOP/s at which the exponentials alone keep the GPU busy: one of them for every 4 · head_dim FLOP."""
    return limits.exponentials * 4 * head_dim


def roofline(
    rows: Sequence[Measured], limits: Limits, products: Sequence[str], palette: Palette, height: int = 560
) -> go.Figure:
    """TFLOP/s against FLOP a byte, both logarithmic; ``products`` are the kinds that get a roof."""
    figure = theme.new_figure(palette, height, hovermode="closest")
    x = np.array([intensity(r) for r in rows])
    low, high = 10 ** np.floor(np.log10(x.min()) - 0.3), 10 ** np.ceil(np.log10(x.max()) + 0.1)
    roof = max(limits.flops[p] for p in products)
    ridge = roof / limits.copy_bytes
    low = min(low, ridge / 4)
    slope = [low * limits.copy_bytes, roof]
    _line(
        figure,
        [low, ridge],
        slope,
        f"memory: {limits.copy_bytes / 1e12:.2f} TB/s",
        "solid",
        palette.series[2],
    )
    for number, product in enumerate(products):
        top = limits.flops[product]
        name = f"{product} products: {top / 1e12:,.0f} TFLOP/s"
        _line(
            figure,
            [top / limits.copy_bytes, high],
            [top, top],
            name,
            ("solid", "dashdot")[number % 2],
            palette.text,
        )
    for number, head_dim in enumerate(sorted({r.problem.head_dim for r in rows})):
        top = exponential_ceiling(limits, head_dim)
        name = f"exponentials at head dim {head_dim}: {top / 1e12:,.0f} TFLOP/s"
        dash = ("dash", "dot", "longdash")[number % 3]
        _line(figure, [max(low, top / limits.copy_bytes), high], [top, top], name, dash, palette.series[3])
    for number, label in enumerate(dict.fromkeys(r.label for r in rows)):
        mine = [r for r in rows if r.label == label]
        figure.add_trace(
            go.Scatter(
                x=[intensity(r) for r in mine],
                y=[r.tflops for r in mine],
                name=label,
                mode="markers",
                marker={
                    "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                    "size": 11,
                    "color": palette.series[number % len(palette.series)],
                    "line": {"width": 1, "color": palette.background},
                },
                customdata=[(str(r.problem), r.of_ceiling, r.ceiling, r.seconds * 1e6) for r in mine],
                hovertemplate=f"<b>{label}</b><br>%{{customdata[0]}}<br>%{{y:,.1f}} TFLOP/s at %{{x:,.0f}} "
                "FLOP a byte<br>%{customdata[3]:,.1f} µs: %{customdata[1]:.0%} of the limit by "
                "%{customdata[2]}<extra></extra>",
            )
        )
    minor = {"ticks": "outside", "ticklen": 2}
    span = [float(np.log10(low)), float(np.log10(high))]
    title = "useful FLOP a byte of compulsory traffic"
    figure.update_xaxes(title_text=title, type="log", range=span, dtick=1, minor=minor)
    floor = min(min(r.tflops for r in rows), low * limits.copy_bytes / 1e12)
    span = [float(np.log10(floor)) - 0.1, float(np.log10(2 * roof / 1e12))]
    figure.update_yaxes(title_text="TFLOP/s (useful)", type="log", range=span, dtick=1, minor=minor)
    figure.update_layout(legend={"y": -0.16, "yanchor": "top"})
    return figure


def _line(figure: go.Figure, x: list[float], y: list[float], name: str, dash: str, colour: str) -> None:
    figure.add_trace(
        go.Scatter(
            x=x,
            y=[v / 1e12 for v in y],
            name=name,
            mode="lines",
            line={"color": colour, "dash": dash, "width": 2},
            hovertemplate=f"{name}<extra></extra>",
        )
    )


def closest(rows: Sequence[Measured]) -> Measured:
    """The row nearest to its own ceiling."""
    return max(rows, key=lambda r: r.of_ceiling)
