"""What each warp of one SM does when: a lane per warp, products in flight as a thin bar beneath it."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from cufa.build.phases import PHASES, PRODUCTS, WAITS, WORDS
from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Intervals, Lane, about

MOST_BARS = 4000
"""That a browser draws and zooms without waiting."""
MOST_LANES = 24

#: Phases by what they are, drawn in one colour each.
KINDS: dict[str, tuple[str, ...]] = {
    "products": (*PRODUCTS, "ISSUE"),
    "softmax": ("SOFTMAX",),
    "products and softmax": ("TILE",),
    "copies": ("COPY",),
    "stores": ("STORE", "ADD", "MERGE"),
    "waits for data or space": ("WAIT_DATA", "WAIT_SPACE", "WAIT_ITEM"),
    "waits for its turn": ("WAIT_TURN",),
    "waits for products": ("WAIT_PRODUCTS",),
}


def drawn(found: Intervals, first: float, last: float) -> Intervals:
    """Those that touch a stretch of time."""
    return found[(found["end"] >= first) & (found["begin"] <= last)]


def inside_figure(
    trace: InsideTrace, found: Intervals, lanes: list[Lane], palette: Palette, height: int | None = None
) -> go.Figure:
    """``found`` are the intervals to draw, of ``lanes``; the axis is the trace's own clock."""
    rows = {lane.log: row for row, lane in enumerate(lanes)}
    found = found[np.isin(found["log"], list(rows))]
    figure = theme.new_figure(
        palette, height or 150 + 34 * len(lanes), hovermode="closest", barmode="overlay", bargap=0
    )
    for kind, names in KINDS.items():
        numbers = [PHASES.index(name) for name in names]
        mine = found[np.isin(found["phase"], numbers)]
        states, flights = mine[~mine["flight"]], mine[mine["flight"]]
        if len(states):
            figure.add_trace(_bars(trace, states, rows, kind, _colour(kind, palette), thin=False))
        if len(flights):
            figure.add_trace(_bars(trace, flights, rows, "products in flight", palette.accent, thin=True))
    unit = "µs since the SM's first stamp" if trace.is_time else "order: primitives executed, not time"
    figure.update_xaxes(title_text=unit, zeroline=False)
    figure.update_yaxes(
        tickvals=list(range(len(lanes))),
        ticktext=[str(lane) for lane in lanes],
        range=[len(lanes) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    figure.update_layout(dragmode="zoom", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    theme.fixed_margins(figure, left=150, top=56, right=16)
    return figure


def _colour(kind: str, palette: Palette) -> str:
    s = palette.series
    colours = {
        "products": palette.accent,
        "softmax": s[1],
        "products and softmax": palette.accent,
        "copies": s[2],
        "stores": palette.muted,
        "waits for data or space": palette.alarm,
        "waits for its turn": palette.warn,
        "waits for products": palette.grid,
    }
    return colours[kind]


def _bars(trace: InsideTrace, found: Any, rows: dict[int, int], name: str, colour: str, thin: bool) -> go.Bar:
    places = np.array([rows[int(log)] for log in found["log"]], np.float64)
    unit = "µs" if trace.is_time else "executed"
    return go.Bar(
        base=found["begin"],
        x=found["end"] - found["begin"],
        y=places + (0.36 if thin else -0.04),
        width=0.14 if thin else 0.6,
        orientation="h",
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        customdata=[about(trace, x) for x in found],
        hovertemplate=f"%{{customdata}}<br>%{{base:,.2f}} → %{{value:,.2f}} {unit}<extra></extra>",
    )


def describe(trace: InsideTrace, lanes: list[Lane]) -> str:
    """The figure in words."""
    what = "Measured on one SM" if trace.is_time else "Executed on a CPU, in order and not in time"
    kinds = ", ".join(WORDS[name] for name in (*WAITS[1:4], "SOFTMAX"))
    return (
        f"{what}: what {len(lanes)} warps of {trace.kernel} do, a row per warp, from left to right. "
        f"Colours tell products, softmax, copies, stores and waits apart ({kinds}); a thin bar under a row is "
        "products in flight, which the warp does not wait for."
    )
