"""Activity of each warp of one SM over time: a lane per warp, products in flight as a thin bar below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from cufa.build.phases import PHASES, PRODUCTS, WAITS, WORDS
from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Intervals, Lane, about

MOST_BARS = 4000
"""Limit for a browser that draws and zooms without delay."""
MOST_LANES = 24

KINDS: dict[str, tuple[tuple[str, ...], Callable[[Palette], str], str]] = {
    "products": ((*PRODUCTS, "ISSUE"), lambda p: p.accent, ""),
    "softmax": (("SOFTMAX",), lambda p: p.series[1], "x"),
    "products and softmax": (("TILE",), lambda p: p.accent, "x"),
    "copies": (("COPY",), lambda p: p.series[2], "|"),
    "stores": (("STORE", "ADD", "MERGE"), lambda p: p.muted, "-"),
    "waits for data or space": (("WAIT_DATA", "WAIT_SPACE", "WAIT_ITEM"), lambda p: p.alarm, "/"),
    "waits for its ping-pong slot": (("WAIT_TURN",), lambda p: p.warn, "/"),
    "waits for products": (("WAIT_PRODUCTS",), lambda p: p.muted, "/"),
}
"""Phases that share a look; its colour and pattern. Slanted lines on the background: a wait."""

_THIN = "products in flight (thin)"
_ANGLES = {"": (), "x": (45, 135), "|": (90,), "-": (0,)}
"""Angles of the lines of each pattern, in degrees."""


def drawn(times: Intervals, first: float, last: float) -> Intervals:
    """Intervals that overlap a span of time."""
    return times[(times["end"] >= first) & (times["begin"] <= last)]


def inside_figure(trace: InsideTrace, times: Intervals, lanes: list[Lane], palette: Palette) -> go.Figure:
    """The intervals of ``lanes``, on the clock of the trace."""
    rows = {lane.log: row for row, lane in enumerate(lanes)}
    times = times[np.isin(times["log"], list(rows))]
    figure = theme.new_figure(palette, 106 + 34 * len(lanes), barmode="overlay", bargap=0)
    for kind, (phases, colour, pattern) in KINDS.items():
        numbers = [PHASES.index(name) for name in phases]
        same_kind = times[np.isin(times["phase"], numbers)]
        states, flights = same_kind[~same_kind["flight"]], same_kind[same_kind["flight"]]
        if len(states):
            figure.add_trace(_bars(trace, states, rows, kind, colour(palette), pattern, palette))
        if len(flights):
            figure.add_trace(_bars(trace, flights, rows, _THIN, palette.accent, "", palette))
    unit = "µs since the SM's first stamp" if trace.is_time else "order: primitives executed, not time"
    figure.update_xaxes(title_text=unit, zeroline=False)
    places, names = list(range(len(lanes))), [str(lane) for lane in lanes]
    look = {"showgrid": False, "zeroline": False, "fixedrange": True}
    figure.update_yaxes(look, tickvals=places, ticktext=names, range=[len(lanes) - 0.4, -0.6])
    figure.update_layout(dragmode="zoom")
    theme.fixed_margins(figure, left=150, top=12, right=16)
    figure.update_layout(showlegend=False)
    return figure


def _bars(
    trace: InsideTrace,
    times: Any,
    rows: dict[int, int],
    name: str,
    colour: str,
    pattern: str,
    palette: Palette,
) -> go.Bar:
    thin = name == _THIN
    ground = (
        {"bgcolor": palette.panel} if pattern == "/" else {"bgcolor": colour, "fgcolor": palette.background}
    )
    marks = {"shape": pattern, "size": 6, "solidity": 0.3, "fgcolor": colour, **ground}
    places = np.array([rows[int(log)] for log in times["log"]], np.float64)
    unit = "µs" if trace.is_time else "executed"
    return go.Bar(
        base=times["begin"],
        x=times["end"] - times["begin"],
        y=places + (0.36 if thin else -0.04),
        width=0.14 if thin else 0.6,
        orientation="h",
        name=name,
        marker={"color": colour, "line": {"width": 0}, "pattern": marks},
        customdata=[about(trace, x) for x in times],
        hovertemplate=f"%{{customdata}}<br>%{{base:,.2f}} → %{{value:,.2f}} {unit}<extra></extra>",
    )


def legend(figure: go.Figure) -> str:
    """Series of the figure as HTML, which wraps in a window of any width; Plotly's legend scrolls in a narrow one."""
    entries = []
    for name, marker in {trace.name: trace.marker for trace in figure.data}.items():
        mark, ground = marker.pattern.fgcolor, marker.pattern.bgcolor
        width, angles = (
            (2, (135,)) if marker.pattern.shape == "/" else (1, _ANGLES[marker.pattern.shape or ""])
        )
        layers = [f"repeating-linear-gradient({x}deg, {mark} 0 {width}px, transparent 0 5px)" for x in angles]
        layers.append(f"linear-gradient({ground} 0 0)")
        box = "display: inline-block; width: 1.2rem; height: .8rem; margin-right: .4rem"
        look = f'<span style="{box}; background: {", ".join(layers)}"></span>'
        entries.append(f'<span style="white-space: nowrap; margin-right: 1.2rem">{look}{name}</span>')
    return f"<p>{' '.join(entries)}</p>"


def describe(trace: InsideTrace, lanes: list[Lane]) -> str:
    """The figure in words."""
    origin = "Measured on one SM" if trace.is_time else "Executed on a CPU: order, not time"
    kinds = ", ".join(WORDS[name] for name in (*WAITS[1:4], "SOFTMAX"))
    return (
        f"{origin}: phases of {len(lanes)} warps of {trace.kernel}, a row per warp, from left to right. "
        f"Colours and patterns tell products, softmax, copies, stores and waits (slanted lines) apart ({kinds}); a "
        "thin bar under a row is products in flight, for which the warp does not wait."
    )
