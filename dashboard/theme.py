"""Colours, patterns and the one Plotly template, light and dark.

No meaning rests on colour alone: tile classes differ by pattern, series by dash and marker too. Class
colours keep apart under the common colour-vision deficiencies (blue, amber, purple, near-background).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import plotly.graph_objects as go

from cufa.schedule.schedule import Tile


@dataclasses.dataclass(frozen=True)
class TileStyle:
    """How a class of tiles is drawn. ``pattern`` is Plotly's name; rasters draw the same one."""

    label: str
    meaning: str
    fill: str
    ink: str
    pattern: str


@dataclasses.dataclass(frozen=True)
class Palette:
    """Every colour a figure uses."""

    name: str
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
    series: tuple[str, ...]
    scale: tuple[str, ...]
    """Sequential, from little to much."""
    tiles: dict[Tile, TileStyle]


def _tiles(
    full: str, partial: str, padded: str, skipped: str, inks: tuple[str, str, str, str]
) -> dict[Tile, TileStyle]:
    return {
        Tile.FULL: TileStyle("full", "every score is visible: no mask", full, inks[0], ""),
        Tile.PARTIAL: TileStyle("partial", "cut by a boundary of the mask", partial, inks[1], "/"),
        Tile.PADDED: TileStyle("padded", "it hangs over the end of queries or keys", padded, inks[2], "x"),
        Tile.SKIPPED: TileStyle("skipped", "nothing visible: not loaded or computed", skipped, inks[3], "."),
    }  # fmt: skip


LIGHT = Palette(
    name="light",
    background="#FCFBF9",
    panel="#F1F0EB",
    text="#1B2330",
    muted="#5C6675",
    grid="#E4E2DB",
    accent="#2B59C3",
    predicted="#2B59C3",
    measured="#0B7A66",
    warn="#9A5B00",
    alarm="#B3261E",
    idle="#E9E7E0",
    series=("#2B59C3", "#C2570C", "#0B7A66", "#8A3E93", "#5C6675", "#9A7400"),
    scale=("#DCE6FA", "#9DB9F0", "#5F8BE0", "#2B59C3", "#12307D"),
    tiles=_tiles("#4A7BDB", "#F0B254", "#BF82C6", "#EFEDE7", ("#2B59C3", "#A05E00", "#7A3583", "#CFCCC2")),
)
DARK = Palette(
    name="dark",
    background="#12161D",
    panel="#1B212B",
    text="#E4E8EF",
    muted="#9AA5B5",
    grid="#29313D",
    accent="#7EA4FF",
    predicted="#7EA4FF",
    measured="#45C9AC",
    warn="#F0B254",
    alarm="#FF8A80",
    idle="#232A35",
    series=("#7EA4FF", "#FF9F5A", "#45C9AC", "#D391DB", "#9AA5B5", "#E3C04F"),
    scale=("#2B427C", "#3558A6", "#4A7BDB", "#7EA4FF", "#C9DAFF"),
    tiles=_tiles("#5286E8", "#E5A544", "#B878C2", "#1C232D", ("#7EA4FF", "#6E4200", "#5A2063", "#3A4452")),
)
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
        "ticklabeloverflow": "allow",  # else every label is measured, which lays the whole page out each time
    }
    layout = go.Layout(
        font={
            "family": '"Source Sans", "Source Sans Pro", system-ui, sans-serif',
            "size": 13,
            "color": p.text,
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=p.series,
        colorscale={"sequential": [[i / (len(p.scale) - 1), c] for i, c in enumerate(p.scale)]},
        hoverlabel={
            "bgcolor": p.panel,
            "bordercolor": p.grid,
            "font": {"color": p.text, "size": 13},
            "align": "left",
        },
        margin={"l": 8, "r": 8, "t": 28, "b": 8},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "font": {"color": p.text}},
        xaxis=axis,
        yaxis=axis,
        bargap=0.15,
        annotationdefaults={"font": {"color": p.muted, "size": 12}, "showarrow": False},
    )
    return go.layout.Template(layout=layout)


def new_figure(palette: Palette, height: int, **layout: object) -> go.Figure:
    """An empty figure in the house style."""
    return style(go.Figure(), palette, height, **layout)


def style(figure: go.Figure, palette: Palette, height: int, **layout: object) -> go.Figure:
    """Give a figure (subplots, say) the house style."""
    return figure.update_layout(template=template(palette.name), height=height, **layout)


def fixed_margins(
    figure: go.Figure, left: int = 62, bottom: int = 52, top: int = 36, right: int = 10
) -> None:
    """Margins, in pixels, that Plotly does not have to find by drawing twice: for figures that take long to
    draw, and whose labels are known to fit."""
    figure.update_layout(margin={"l": left, "r": right, "t": top, "b": bottom, "autoexpand": False})
    figure.update_xaxes(automargin=False)
    figure.update_yaxes(automargin=False)


def bar_pattern(tile_style: TileStyle, palette: Palette) -> dict[str, object]:
    """``marker`` of a bar in a tile class's colour and pattern."""
    marker: dict[str, object] = {
        "color": tile_style.fill,
        "line": {"color": palette.background, "width": 0.5},
    }
    if tile_style.pattern:
        marker["pattern"] = {
            "shape": tile_style.pattern,
            "fgcolor": tile_style.ink,
            "bgcolor": tile_style.fill,
            "size": 6,
            "solidity": 0.35,
            "fillmode": "overlay",
        }
    return marker


def logarithmic(low: float, high: float, suffix: str = "", *, short: bool = False) -> dict[str, object]:
    """A logarithmic axis with labels at 1, 2 and 5: Plotly's own skip too much over one or two decades. ``short``:
    thousands as 1k, along an axis that a narrow window has little room for."""
    ticks = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    span = [math.log10(low), math.log10(high)]
    words = [f"{t / 1000:,g}k" if short and t >= 1000 else f"{t:,g}" for t in ticks]
    return {"type": "log", "range": span, "tickvals": ticks, "ticktext": [f"{w}{suffix}" for w in words]}
