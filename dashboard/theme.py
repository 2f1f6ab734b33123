"""Colours, patterns and the Plotly template, light and dark.

No meaning rests on colour alone: tile classes also differ by pattern, series by dash and marker. Class colours stay
distinct under the common colour-vision deficiencies (blue, amber, purple, near-background).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from cufa.schedule.schedule import Tile

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "hexagon", "cross")
"""Markers of series, in order."""
PLAIN = {"showgrid": False, "zeroline": False, "ticks": ""}
"""An axis of names: no grid, no ticks."""


@dataclasses.dataclass(frozen=True)
class TileStyle:
    """How a class of tiles is drawn. ``pattern`` is Plotly's name; rasters draw the same one."""

    label: str
    meaning: str
    pattern: str
    fill: str
    ink: str


@dataclasses.dataclass(frozen=True)
class Palette:
    """Every colour a figure uses."""

    name: str
    series: tuple[str, ...]
    scale: tuple[str, ...]
    """Sequential, from little to much."""
    tiles: dict[Tile, TileStyle]
    background: str
    panel: str
    text: str
    muted: str
    grid: str
    accent: str
    predicted: str
    measured: str
    warn: str
    alarm: str
    idle: str


_COLOURS = {
    "background": ("#FCFBF9", "#12161D"),
    "panel": ("#F1F0EB", "#1B212B"),
    "text": ("#1B2330", "#E4E8EF"),
    "muted": ("#5C6675", "#9AA5B5"),
    "grid": ("#E4E2DB", "#29313D"),
    "accent": ("#2B59C3", "#7EA4FF"),
    "predicted": ("#2B59C3", "#7EA4FF"),
    "measured": ("#0B7A66", "#45C9AC"),
    "warn": ("#9A5B00", "#F0B254"),
    "alarm": ("#B3261E", "#FF8A80"),
    "idle": ("#E9E7E0", "#232A35"),
}
"""Light, dark."""
_SERIES = (
    ("#2B59C3", "#C2570C", "#0B7A66", "#8A3E93", "#5C6675", "#9A7400"),
    ("#7EA4FF", "#FF9F5A", "#45C9AC", "#D391DB", "#9AA5B5", "#E3C04F"),
)
_SCALE = (
    ("#DCE6FA", "#9DB9F0", "#5F8BE0", "#2B59C3", "#12307D"),
    ("#2B427C", "#3558A6", "#4A7BDB", "#7EA4FF", "#C9DAFF"),
)
_TILES = {
    Tile.FULL: (("full", "every score is visible: no masking", ""), ("#4A7BDB", "#2B59C3"), ("#5286E8", "#7EA4FF")),
    Tile.PARTIAL: (("partial", "a mask boundary cuts the tile", "/"), ("#F0B254", "#A05E00"), ("#E5A544", "#6E4200")),
    Tile.PADDED: (("padded", "past the last query or key", "x"), ("#BF82C6", "#7A3583"), ("#B878C2", "#5A2063")),
    Tile.SKIPPED: (("skipped", "not loaded: no visible score", "."), ("#DEDBD1", "#8F8B80"), ("#2A333F", "#6E7988")),
}  # fmt: skip
"""Label, meaning and pattern; fill and ink, light and dark."""


def _palette(name: str, i: int) -> Palette:
    tiles = {tile: TileStyle(*words, *inks[i]) for tile, (words, *inks) in _TILES.items()}
    return Palette(name, _SERIES[i], _SCALE[i], tiles, **{k: both[i] for k, both in _COLOURS.items()})


LIGHT, DARK = _palette("light", 0), _palette("dark", 1)
PALETTES = {"light": LIGHT, "dark": DARK}


@functools.cache
def template(palette_name: str) -> go.layout.Template:
    """The look of every figure."""
    p = PALETTES[palette_name]
    axis = {
        "gridcolor": p.grid,
        "linecolor": p.muted,
        "zerolinecolor": p.grid,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": p.muted,
        "title": {"font": {"size": 13, "color": p.muted}, "standoff": 10},
        "automargin": True,
        "ticklabeloverflow": "allow",  # otherwise Plotly measures each label, which lays the whole page out again
    }
    ink = {"size": 13, "color": p.text}
    layout = go.Layout(
        font={"family": '"Source Sans", "Source Sans Pro", system-ui, sans-serif', **ink},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=p.series,
        colorscale={"sequential": colour_scale(p)},
        hoverlabel={"bgcolor": p.panel, "bordercolor": p.grid, "font": ink, "align": "left"},
        margin={"l": 8, "r": 8, "t": 28, "b": 8},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "font": {"color": p.text}},
        xaxis=axis,
        yaxis=axis,
        bargap=0.15,
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": p.muted, "activecolor": p.text},
        annotationdefaults={"font": {"color": p.muted, "size": 12}, "showarrow": False},
    )
    return go.layout.Template(layout=layout)


def colour_scale(palette: Palette) -> list[list[object]]:
    """Sequential colours as Plotly takes them."""
    return [[i / (len(palette.scale) - 1), colour] for i, colour in enumerate(palette.scale)]


def new_figure(palette: Palette, height: int, **layout: object) -> go.Figure:
    """An empty figure in the house style."""
    return style(go.Figure(), palette, height, **layout)


def style(figure: go.Figure, palette: Palette, height: int, **layout: object) -> go.Figure:
    """Give a figure (subplots, for example) the house style."""
    return figure.update_layout(template=template(palette.name), height=height, **layout)


def fixed_margins(figure: go.Figure, left: int = 62, top: int = 36, right: int = 10) -> None:
    """Margins in pixels, for figures that take long to draw and whose labels fit: automatic margins draw a figure
    twice."""
    figure.update_layout(margin={"l": left, "r": right, "t": top, "b": 52, "autoexpand": False})
    figure.update_xaxes(automargin=False)
    figure.update_yaxes(automargin=False)


def intervals(
    values: Sequence[float], low: Sequence[float], high: Sequence[float], **look: object
) -> dict[str, Any]:
    """Error bars from ``low`` to ``high`` around ``values``."""
    above = [top - value for value, top in zip(values, high, strict=True)]
    below = [value - bottom for value, bottom in zip(values, low, strict=True)]
    bars = {"array": above, "arrayminus": below, "thickness": 1.2, "width": 4}
    return {"type": "data", "symmetric": False} | bars | look


def reference_line(figure: go.Figure, palette: Palette, y: float, text: str, *, is_log: bool) -> None:
    """A dotted horizontal line with its label at the left."""
    figure.add_hline(y, line={"color": palette.muted, "dash": "dot", "width": 1.5})
    place = math.log10(y) if is_log else y
    figure.add_annotation(xref="paper", x=0.01, xanchor="left", y=place, yanchor="bottom", text=text)


def bar_pattern(tile_style: TileStyle, palette: Palette) -> dict[str, Any]:
    """``marker`` of a bar in a tile class's colour and pattern."""
    marker: dict[str, Any] = {"color": tile_style.fill, "line": {"color": palette.background, "width": 0.5}}
    if tile_style.pattern:
        colours = {"fgcolor": tile_style.ink, "bgcolor": tile_style.fill, "fillmode": "overlay"}
        marker["pattern"] = {"shape": tile_style.pattern, **colours, "size": 6, "solidity": 0.35}
    return marker


def logarithmic(low: float, high: float, suffix: str = "", *, short: bool = False) -> dict[str, Any]:
    """A logarithmic axis with labels at 1, 2 and 5: Plotly's labels are too few over one or two decades. ``short``:
    thousands as 1k, for a narrow window."""
    ticks = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    span = [math.log10(low), math.log10(high)]
    words = [f"{t / 1000:,g}k" if short and t >= 1000 else f"{t:,g}" for t in ticks]
    return {"type": "log", "range": span, "tickvals": ticks, "ticktext": [f"{w}{suffix}" for w in words]}
