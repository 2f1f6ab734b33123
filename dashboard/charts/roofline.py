"""Measured points under measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from cufa.bench.limits import Limits
from cufa.dashboard import theme
from cufa.dashboard.model.evidence import Measured
from cufa.dashboard.theme import Palette

_FAR_AWAY = 3.0
"""Ceilings this many times over the roof are not drawn."""
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
    roof = max(limits.flops[p] for p in products)
    ridge = roof / limits.copy_bytes
    low, high = min(float(x.min()) / 2, ridge / 4), 2 * float(x.max())
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
    highest = roof
    for number, head_dim in enumerate(sorted({r.problem.head_dim for r in rows})):
        top = exponential_ceiling(limits, head_dim)
        if top > _FAR_AWAY * roof:
            continue  # so high that it limits nothing
        highest = max(highest, top)
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
    title = "useful FLOP a byte of compulsory traffic"
    figure.update_xaxes(title_text=title, **_logarithmic(low, high))
    lowest = min(min(r.tflops for r in rows), low * limits.copy_bytes / 1e12)
    figure.update_yaxes(title_text="TFLOP/s (useful)", **_logarithmic(lowest / 1.3, 1.4 * highest / 1e12))
    figure.update_layout(legend={"y": -0.16, "yanchor": "top"})
    return figure


def _logarithmic(low: float, high: float) -> dict[str, object]:
    """A logarithmic axis with labels at 1, 2 and 5: Plotly's own skip too much over one or two decades."""
    ticks = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    span = [float(np.log10(low)), float(np.log10(high))]
    return {"type": "log", "range": span, "tickvals": ticks, "ticktext": [f"{t:,g}" for t in ticks]}


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
