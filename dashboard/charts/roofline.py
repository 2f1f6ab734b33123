"""Measured points under measured ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.work import flops_per_score
from cufa.dashboard.theme import Palette
from cufa.measure.limits import Limits
from cufa.problem.problem import Problem

_FAR_AWAY = 3.0
"""Ceilings this many times over the roof are not drawn."""
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "hexagon", "cross")


@dataclasses.dataclass(frozen=True)
class Here:
    """A shape under the roof."""

    intensity: float
    """Useful FLOP per byte of compulsory traffic."""
    tflops: float
    """At the roof."""


def intensity(row: Measurement) -> float:
    """Useful FLOP per byte of compulsory traffic."""
    return float(row.row.json["flops"] / row.row.json["io_bytes"])


def _is_masked(row: Measurement) -> bool:
    return row.problem.mask_kind != "full"


def exponential_ceiling(limits: Limits, problem: Problem) -> float:
    """FLOP/s at which the exponentials alone keep the GPU busy: one of them for the FLOP of each score."""
    return limits.exponentials * flops_per_score(problem)


def roofline(
    rows: Sequence[Measurement], limits: Limits, products: Sequence[str], palette: Palette, height: int = 560,
    *, read_bytes: float = 0.0, here: Here | None = None,
) -> go.Figure:  # fmt: skip
    """TFLOP/s against FLOP per byte, both logarithmic; ``products`` are the kinds that get a roof. Where masked and
    unmasked rows are shown, the marks of the masked ones are open. ``read_bytes``: the fastest reading, which is the
    roof of what only reads."""
    figure = theme.new_figure(palette, height, hovermode="closest")
    x = np.array([intensity(r) for r in rows])
    roof = max(limits.flops[p] for p in products)
    memory, moving = limits.copy_bytes, "copying"
    if read_bytes and all(r.operation.memory_bound for r in rows):
        memory, moving = read_bytes, "reading"
    ridge = roof / memory
    if here is not None:
        x = np.append(x, here.intensity)
    low, high = min(float(x.min()) / 2, ridge / 4), 2 * float(x.max())
    slope = [low * memory, roof]
    _line(
        figure,
        [low, ridge],
        slope,
        f"memory, {moving}: {memory / 1e12:.2f} TB/s",
        "solid",
        palette.series[2],
    )
    for number, product in enumerate(products):
        top = limits.flops[product]
        name = f"{product} products: {top / 1e12:,.0f} TFLOP/s"
        _line(
            figure,
            [top / memory, high],
            [top, top],
            name,
            ("solid", "dashdot")[number % 2],
            palette.text,
        )
    highest = roof
    ceilings = {(r.problem.head_dim, exponential_ceiling(limits, r.problem)) for r in rows}
    for number, (head_dim, top) in enumerate(sorted(ceilings)):
        if top > _FAR_AWAY * roof:
            continue  # so high that it limits nothing
        highest = max(highest, top)
        name = f"exponentials at head dim {head_dim}: {top / 1e12:,.0f} TFLOP/s"
        dash = ("dash", "dot", "longdash")[number % 3]
        _line(figure, [max(low, top / memory), high], [top, top], name, dash, palette.series[3])
    both = len({_is_masked(r) for r in rows}) > 1
    for number, label in enumerate(dict.fromkeys(r.label for r in rows)):
        mine = [r for r in rows if r.label == label]
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        figure.add_trace(
            go.Scatter(
                x=[intensity(r) for r in mine],
                y=[r.tflops for r in mine],
                name=label,
                mode="markers",
                marker={
                    "symbol": [f"{symbol}-open" if both and _is_masked(r) else symbol for r in mine],
                    "size": 11,
                    "color": palette.series[number % len(palette.series)],
                    "line": {"width": 1.5, "color": palette.series[number % len(palette.series)]},
                },
                customdata=[(str(r.problem), r.of_ceiling, r.ceiling, r.seconds * 1e6) for r in mine],
                hovertemplate=f"<b>{label}</b><br>%{{customdata[0]}}<br>%{{y:,.1f}} TFLOP/s at %{{x:,.0f}} "
                "FLOP per byte<br>%{customdata[3]:,.1f} µs: %{customdata[1]:.0%} of the limit by "
                "%{customdata[2]}<extra></extra>",
            )
        )
    if here is not None:
        star = {"symbol": "star", "size": 16, "color": palette.predicted}
        star["line"] = {"width": 1.5, "color": palette.background}
        hover = "the most for this shape: %{y:,.1f} TFLOP/s at %{x:,.0f} FLOP per byte<extra></extra>"
        place = {"x": [here.intensity], "y": [here.tflops], "hovertemplate": hover}
        figure.add_trace(go.Scatter(**place, name="this shape, at the roof", mode="markers", marker=star))
    title = "useful FLOP per byte of compulsory traffic"
    figure.update_xaxes(title_text=title, **theme.logarithmic(low, high, short=True))
    lowest = min(*(r.tflops for r in rows), low * memory / 1e12)
    figure.update_yaxes(
        title_text="TFLOP/s (useful)", **theme.logarithmic(lowest / 1.3, 1.4 * highest / 1e12)
    )
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


def needs_figure(row: Measurement, palette: Palette, tag: str = "measured", height: int = 340) -> go.Figure:
    """Time that each resource would need alone, at its ceiling; lines at the predicted time and at the one that is
    ``tag``, measured or recorded."""
    factor, unit = unit_for(row.seconds)
    shares = [f"{seconds / row.seconds:.0%}" for seconds in row.needs.values()]
    figure = theme.new_figure(palette, height, bargap=0.35, hovermode="closest")
    figure.add_trace(
        go.Bar(
            x=[factor * seconds for seconds in row.needs.values()],
            y=list(row.needs),
            orientation="h",
            marker={
                "color": palette.predicted,
                "line": {"color": palette.predicted, "width": 1},
                "pattern": {"shape": "/", "size": 5, "solidity": 0.25},
            },
            customdata=shares,
            hovertemplate=f"%{{y}}: %{{x:,.4g}} {unit}, %{{customdata}} of the measured time<extra></extra>",
            showlegend=False,
        )
    )
    # Away from each other: the lines may be close.
    earlier = row.predicted is None or row.predicted <= row.seconds
    anchors = {tag: "left" if earlier else "right", "predicted": "right" if earlier else "left"}
    for seconds, text, dash, colour in (
        (row.seconds, tag, "solid", palette.measured),
        (row.predicted, "predicted", "dash", palette.predicted),
    ):
        if seconds is None:
            continue
        figure.add_vline(
            factor * seconds, line={"color": colour, "width": 2, "dash": dash}, annotation_text=text,
            annotation={"y": 1, "yanchor": "bottom", "xanchor": anchors[text]},
        )  # fmt: skip
    figure.update_xaxes(title_text=f"time ({unit})", rangemode="tozero")
    # Beside the names: at the ends of the bars, lines would cross them.
    names = [f"{name}  <b>{share}</b>" for name, share in zip(row.needs, shares, strict=True)]
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticks="", tickvals=list(range(len(names))), ticktext=names
    )
    figure.update_layout(margin={"r": 70})
    return figure


def closest(rows: Sequence[Measurement]) -> Measurement:
    """The row nearest to its own ceiling."""
    return max(rows, key=lambda r: r.of_ceiling)
