"""The difference between measurements, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.measure.timing import Ratio

_LEAST_SPAN = 1.15


def ratio_figure(ratios: Sequence[tuple[str, Ratio]], palette: Palette) -> go.Figure:
    """Time of A over time of B for each pair: right of 1, B is faster. Bars are 95% intervals."""
    figure = theme.new_figure(palette, 110 + 46 * len(ratios), showlegend=False, hovermode="closest")
    span = max([_LEAST_SPAN, *(max(r.high, 1 / r.low) for _, r in ratios)]) ** 1.08
    for number, (name, ratio) in enumerate(ratios):
        tone = palette.measured if ratio.low > 1 else palette.alarm if ratio.high < 1 else palette.muted
        figure.add_trace(
            go.Scatter(
                x=[ratio.value],
                y=[-number],
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [ratio.high - ratio.value],
                    "arrayminus": [ratio.value - ratio.low],
                    "thickness": 3,
                    "width": 8,
                    "color": tone,
                },
                mode="markers+text",
                text=[f"{ratio.value:.2f}×"],
                textposition="top center",
                marker={"size": 12, "color": tone, "symbol": verdict_symbol(ratio)},
                hovertemplate=f"<b>{name}</b><br>A takes {ratio} the time of B<extra></extra>",
                cliponaxis=False,
            )
        )
    figure.add_vline(1, line={"color": palette.text, "width": 1.5, "dash": "dot"})
    ticks = [t for t in _ticks(span) if 1 / span <= t <= span]
    figure.update_xaxes(
        type="log",
        range=[-math.log10(span), math.log10(span)],
        tickvals=ticks,
        ticktext=[f"{t:g}×" for t in ticks],
        title_text="time of A ÷ time of B (left: A is faster, right: B is faster)",
    )
    figure.update_yaxes(
        tickvals=[-n for n in range(len(ratios))],
        ticktext=[name for name, _ in ratios],
        range=[-len(ratios) + 0.4, 0.8],
        showgrid=False,
        zeroline=False,
        ticks="",
    )
    return figure


def _ticks(span: float) -> tuple[float, ...]:
    """Round ratios, fewer the wider the axis: about as many on each side of 1."""
    if span > 4:
        return (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    return (0.3, 0.5, 0.7, 1, 1.5, 2, 3) if span > 1.5 else (0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4)


def verdict_symbol(ratio: Ratio) -> str:
    """Not by colour alone: towards the faster one, or a circle when neither is."""
    return "triangle-right" if ratio.low > 1 else "triangle-left" if ratio.high < 1 else "circle"


def in_words(ratio: Ratio, a: str = "A", b: str = "B") -> tuple[str, str]:
    """(sentence, tone) of one difference."""
    if ratio.low > 1:
        return f"{b} is {ratio} faster than {a}.", "good"
    if ratio.high < 1:
        other = Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
        return f"{b} is {other} slower than {a}.", "warn"
    return f"No difference that these samples can show: {a} takes {ratio} the time of {b}.", ""
