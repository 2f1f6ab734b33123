"""Measured points under measured ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.levels import Level
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.work import flops_per_score
from cufa.dashboard.theme import SYMBOLS, Palette
from cufa.measure.limits import Limits
from cufa.problem.problem import Problem

_FAR_AWAY = 3.0
"""Ceilings above this multiple of the roof are not drawn."""


@dataclasses.dataclass(frozen=True)
class Here:
    """The page's shape, drawn at the roof."""

    intensity: float
    """Useful FLOP per byte of compulsory traffic."""
    tflops: float


def intensity(row: Measurement) -> float:
    """Useful FLOP per byte of compulsory traffic."""
    return float(row.row.json["flops"] / row.row.json["io_bytes"])


def _is_masked(row: Measurement) -> bool:
    return row.problem.mask_kind != "full"


def exponential_ceiling(limits: Limits, problem: Problem) -> float:
    """FLOP/s at which the exponentials alone keep the GPU busy: one exponential per score."""
    return limits.exponentials * flops_per_score(problem)


def roofline(
    rows: Sequence[Measurement], limits: Limits, products: Sequence[str], palette: Palette, *,
    here: Here | None = None, names: Sequence[str] = (),
) -> go.Figure:  # fmt: skip
    """TFLOP/s against FLOP per byte, both logarithmic, with a roof for each of ``products``. Masked rows get open marks
    where unmasked rows are shown too. ``names`` are all kernels of the suite: a kernel looks alike in all regimes."""
    figure = theme.new_figure(palette, 560)

    def line(x: list[float], y: float | list[float], name: str, dash: str, colour: str) -> None:
        ends = [v / 1e12 for v in (y if isinstance(y, list) else [y, y])]
        look = {"color": colour, "dash": dash, "width": 2}
        figure.add_scatter(
            x=x, y=ends, name=name, mode="lines", line=look, hovertemplate=f"{name}<extra></extra>"
        )

    intensities = [intensity(r) for r in rows] + ([here.intensity] if here else [])
    roof = max(limits.flops[p] for p in products)
    memory = max(limits.copy_bytes, limits.read_bytes)
    ridge = roof / memory
    low, high = min(min(intensities) / 2, ridge / 4), 2 * max(intensities)
    name = f"memory: {memory / 1e12:.2f} TB/s"
    line([low, ridge], [low * memory, roof], name, "solid", palette.series[2])
    for number, product in enumerate(products):
        top = limits.flops[product]
        name = f"{product} products: {top / 1e12:,.0f} TFLOP/s"
        line([top / memory, high], top, name, ("solid", "dashdot")[number % 2], palette.text)
    highest = roof
    ceilings = {
        (r.problem.head_dim, r.problem.dims_text, exponential_ceiling(limits, r.problem)) for r in rows
    }
    for number, (_, head_dim, top) in enumerate(sorted(ceilings)):
        if top <= _FAR_AWAY * roof:
            highest = max(highest, top)
            name = f"exponentials at head dim {head_dim}: {top / 1e12:,.0f} TFLOP/s"
            dash = ("dash", "dot", "longdash")[number % 3]
            line([max(low, top / memory), high], top, name, dash, palette.series[3])
    both = len({_is_masked(r) for r in rows}) > 1
    for number, label in enumerate(dict.fromkeys([*names, *(r.label for r in rows)])):
        points = [r for r in rows if r.label == label]
        if not points:
            continue
        symbol, colour = SYMBOLS[number % len(SYMBOLS)], palette.series[number % len(palette.series)]
        symbols = [f"{symbol}-open" if both and _is_masked(r) else symbol for r in points]
        figure.add_scatter(
            x=[intensity(r) for r in points],
            y=[r.tflops for r in points],
            name=label,
            mode="markers",
            marker={"symbol": symbols, "size": 11, "color": colour, "line": {"width": 1.5, "color": colour}},
            customdata=[(str(r.problem), r.of_ceiling, r.ceiling, r.seconds * 1e6) for r in points],
            hovertemplate=f"<b>{label}</b><br>%{{customdata[0]}}<br>%{{y:,.1f}} TFLOP/s at %{{x:,.0f}} "
            "FLOP per byte<br>%{customdata[3]:,.1f} µs: %{customdata[1]:.0%} of the limit by "
            "%{customdata[2]}<extra></extra>",
        )
    if here is not None:
        look = {"symbol": "star", "size": 16, "color": palette.predicted}
        figure.add_scatter(
            x=[here.intensity],
            y=[here.tflops],
            name="this shape, at the roof",
            mode="markers",
            marker=look | {"line": {"width": 1.5, "color": palette.background}},
            hovertemplate="maximum of this shape: %{y:,.1f} TFLOP/s at %{x:,.0f} FLOP per byte<extra></extra>",
        )
    axis = theme.logarithmic(low, high, short=True)
    figure.update_xaxes(axis, title_text="useful FLOP per byte of compulsory traffic")
    lowest = min(*(r.tflops for r in rows), low * memory / 1e12)
    figure.update_yaxes(theme.logarithmic(lowest / 1.3, 1.4 * highest / 1e12), title_text="TFLOP/s (useful)")
    return figure.update_layout(legend={"y": -0.16, "yanchor": "top"})


def needs_figure(row: Measurement, palette: Palette, tag: str) -> go.Figure:
    """Time that each resource alone would need at its ceiling; lines at the predicted time and at the row's own time,
    whose label is ``tag``, measured or recorded."""
    factor, unit = unit_for(row.seconds)
    shares = [f"{seconds / row.seconds:.0%}" for seconds in row.needs.values()]
    figure = theme.new_figure(palette, 340, bargap=0.35)
    figure.add_bar(
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
    # The labels point away from each other, as the lines may be close.
    earlier = row.predicted is None or row.predicted <= row.seconds
    anchors = {tag: "left" if earlier else "right", "predicted": "right" if earlier else "left"}
    for seconds, text, dash, colour in (
        (row.seconds, tag, "solid", palette.measured),
        (row.predicted, "predicted", "dash", palette.predicted),
    ):
        if seconds is not None:
            figure.add_vline(
                factor * seconds, line={"color": colour, "width": 2, "dash": dash}, annotation_text=text,
                annotation={"y": 1, "yanchor": "bottom", "xanchor": anchors[text]},
            )  # fmt: skip
    figure.update_xaxes(title_text=f"time ({unit})", rangemode="tozero")
    # The shares stand beside the names: the lines would cross them at the ends of the bars.
    names = [f"{name}  <b>{share}</b>" for name, share in zip(row.needs, shares, strict=True)]
    figure.update_yaxes(theme.PLAIN, autorange="reversed", tickvals=list(range(len(names))), ticktext=names)
    return figure.update_layout(margin={"r": 70})


def closest(rows: Sequence[Measurement]) -> Measurement:
    """The row nearest to its own ceiling."""
    return max(rows, key=lambda r: r.of_ceiling)


_LOOKS = (("solid", "circle", 2), ("dash", "diamond", 0), ("dot", "square", 1))
"""Dash, marker, and number of the series' colour."""


def levels_figure(
    problem: Problem, levels: Sequence[Level], top: float, reached: float | None, palette: Palette
) -> go.Figure:
    """FLOP/s against useful FLOP per byte of each level. ``top`` is the ceiling of products, ``reached`` the measured
    rate. A mark on a slope: the level limits the kernel."""
    figure = theme.new_figure(palette, 420)
    ridges = [top / level.ceiling for level in levels if level.ceiling]
    intensities = [level.intensity(problem) for level in levels]
    low, high = min(*intensities, *ridges) / 3, 3 * max(*intensities, *ridges)
    bottom = min(top, reached or top)
    for number, (level, x) in enumerate(zip(levels, intensities, strict=True)):
        dash, symbol, series = _LOOKS[number % len(_LOOKS)]
        colour, edge = palette.series[series], {"width": 1.5, "color": palette.background}
        if level.ceiling:
            figure.add_scatter(
                x=[low, top / level.ceiling],
                y=[low * level.ceiling / 1e12, top / 1e12],
                mode="lines",
                name=f"{level.name}: {level.ceiling / 1e12:,.1f} TB/s",
                line={"color": colour, "dash": dash, "width": 2},
                hoverinfo="skip",
            )
            bottom = min(bottom, x * level.ceiling)
        if reached:
            figure.add_scatter(
                x=[x],
                y=[reached / 1e12],
                mode="markers+text",
                text=[level.name],
                textposition=f"{'top' if number == 2 else 'bottom'} center",
                name=f"measured, {level.name}",
                marker={"symbol": symbol, "size": 12, "color": colour, "line": edge},
                hovertemplate=f"{level.name}: %{{x:,.3g}} FLOP per byte, %{{y:,.1f}} TFLOP/s<extra></extra>",
                showlegend=False,
            )
    figure.add_scatter(
        x=[min(ridges, default=low), high],
        y=[top / 1e12] * 2,
        mode="lines",
        name=f"products: {top / 1e12:,.0f} TFLOP/s",
        line={"color": palette.text, "width": 2},
        hoverinfo="skip",
    )
    axis = theme.logarithmic(low, high, short=True)
    figure.update_xaxes(axis, title_text="useful FLOP per byte that the level moves")
    figure.update_yaxes(theme.logarithmic(bottom / 3e12, 1.6 * top / 1e12), title_text="TFLOP/s (useful)")
    return figure.update_layout(legend={"y": -0.28, "yanchor": "top"})
