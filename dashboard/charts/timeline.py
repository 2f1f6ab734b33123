"""When each thread block ran, one row per place on an SM."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.launch import KEYS, WHOLE_HEAD, Blocks, Timeline
from cufa.dashboard.theme import Palette

BARS = 400
"""Up to this many blocks, each is a bar (0.2 ms in a browser); beyond, time is cut into bins."""
_MOST_BINS = 600
_CELLS = 64_000
"""Places × bins."""


def timeline_figure(timeline: Timeline, palette: Palette, height: int = 420) -> go.Figure:
    """Thread blocks over time, coloured by the tiles they visit; the end of the run as a line."""
    figure = theme.new_figure(palette, height, bargap=0, barmode="overlay")
    figure.add_trace(blocks_trace(timeline))
    unit = "tile times, predicted" if timeline.unit == "tiles" else "µs since the first block started"
    figure.update_xaxes(title_text=f"time ({unit})", range=[0, timeline.span * 1.01], zeroline=False)
    figure.update_yaxes(sm_axis(timeline))
    figure.update_layout(shapes=background(timeline, palette))
    bar = {"title": {"text": "tiles", "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.9}
    most = max(1, int(timeline.blocks.tiles.max(initial=1)))
    figure.update_layout(
        coloraxis={"colorscale": theme.colour_scale(palette), "cmin": 0, "cmax": most, "colorbar": bar}
    )
    theme.fixed_margins(figure, left=54, top=12, right=74)
    return figure


def blocks_trace(timeline: Timeline) -> go.Bar | go.Heatmap:
    """Few blocks as bars, many as a heatmap."""
    return _bars(timeline) if len(timeline.blocks) <= BARS else _bins(timeline)


def sm_axis(timeline: Timeline, ticks: int = 12) -> dict[str, object]:
    """The axis of the SMs, the first on top."""
    return {
        "title": {"text": "SM"},
        "range": [timeline.num_sms - 0.5, -0.5],
        "tickvals": np.arange(0, timeline.num_sms, max(1, timeline.num_sms // ticks)),
        "showgrid": False,
        "zeroline": False,
    }


def describe_timeline(timeline: Timeline) -> str:
    """The timeline in words."""
    what = "Measured" if timeline.unit == "µs" else "Predicted"
    first, last = timeline.sm_end.min(), timeline.span
    return (
        f"{what} timeline of {len(timeline.blocks):,} thread blocks on {timeline.num_sms} SMs with up to "
        f"{timeline.slots_per_sm} blocks each; one row per place on an SM, time from left to right. "
        f"{timeline.busy_sms} SMs have work. The first SM is done at {first:,.1f}, the last at {last:,.1f} "
        f"{timeline.unit}; {timeline.tail:.1%} of SM time is idle at the end, and "
        f"{timeline.idle_places:.1%} of the places' time is empty."
    )


def sm_finish(timelines: dict[str, Timeline], palette: Palette) -> go.Figure:
    """When each SM finished, as share of the run, SMs sorted: the area above a line is the tail."""
    figure = theme.new_figure(palette, 260, hovermode="x unified")
    lowest = 1.0
    for number, (name, timeline) in enumerate(timelines.items()):
        share = np.sort(timeline.sm_end) / timeline.span if timeline.span else timeline.sm_end
        lowest = min(lowest, float(share.min()))
        colour, dash = (palette.measured, "solid") if number else (palette.predicted, "dash")
        figure.add_scatter(
            x=np.arange(1, len(share) + 1),
            y=share,
            name=name,
            mode="lines",
            line={"color": colour, "dash": dash, "width": 2.5, "shape": "hv"},
            hovertemplate="%{y:.1%} of the run<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="SMs, first to finish on the left")
    span = [max(0.0, lowest - 0.1), 1.02]
    return figure.update_yaxes(title_text="finished at (share of the run)", tickformat=".0%", range=span)


def background(timeline: Timeline, palette: Palette, axis: str = "") -> list[dict[str, object]]:
    """Idle time as a filled background, the end of the run as a line. ``axis``: number of the axes of a subplot."""
    rows = {"xref": f"x{axis}", "yref": f"y{axis}", "y0": -0.5, "y1": timeline.num_sms - 0.5}
    rows["x1"] = timeline.span
    end = {"color": palette.text, "width": 1.5, "dash": "dot"}
    return [
        {**rows, "type": "rect", "x0": 0, "fillcolor": palette.idle, "line": {"width": 0}, "layer": "below"},
        {**rows, "type": "line", "x0": timeline.span, "line": end},
    ]


def _places(timeline: Timeline) -> np.ndarray:
    """Vertical position of each block: the number of its SM, with the SM's places side by side around it."""
    return timeline.sm + (timeline.slot + 0.5) / timeline.slots_per_sm - 0.5


def _hover(blocks: Blocks) -> str:
    """Hover text of a block, from the columns of :func:`_columns`."""
    kind = int(blocks.q_block[0]) if len(blocks) else 0
    place = {
        WHOLE_HEAD: "head %{customdata[2]}, batch %{customdata[3]}: all of it",
        KEYS: "sequence %{customdata[3]}, K/V head %{customdata[2]}",
    }.get(kind, "query block %{customdata[1]}, head %{customdata[2]}, batch %{customdata[3]}")
    return "SM %{y:.0f} · thread block %{customdata[0]:,}<br>" + place


def _columns(timeline: Timeline) -> np.ndarray:
    """Number, query block, head and batch of each block, in the smallest integer type: most bytes of the page."""
    blocks = timeline.blocks
    number = np.arange(len(blocks)) if blocks.thread_block is None else blocks.thread_block
    columns = np.column_stack([number, np.maximum(blocks.q_block, 0), blocks.head, blocks.batch])
    return columns.astype(np.min_scalar_type(int(columns.max(initial=0))))


def _bars(timeline: Timeline) -> go.Bar:
    return go.Bar(
        base=timeline.start,
        x=timeline.end - timeline.start,
        y=_places(timeline),
        orientation="h",
        width=(0.86 if timeline.num_sms * timeline.slots_per_sm <= 140 else 1) / timeline.slots_per_sm,
        marker={"color": timeline.blocks.tiles, "coloraxis": "coloraxis", "line": {"width": 0}},
        customdata=np.column_stack([_columns(timeline), timeline.blocks.tiles]),
        hovertemplate=_hover(timeline.blocks)
        + "<br>%{customdata[4]:,} tiles, %{base:,.1f} → %{value:,.1f}<extra></extra>",
        showlegend=False,
    )


def _bins(timeline: Timeline) -> go.Heatmap:
    """The block that occupies each place in the middle of each time bin; NaN where the place is empty."""
    places = timeline.num_sms * timeline.slots_per_sm
    bins = min(_MOST_BINS, max(60, _CELLS // places))
    width = (timeline.span or 1.0) / bins  # span 0: no block has a tile
    first = np.clip(np.ceil(timeline.start / width - 0.5), 0, bins).astype(np.int64)
    last = np.clip(np.ceil(timeline.end / width - 0.5), 0, bins).astype(np.int64)  # exclusive
    lengths = last - first
    block = np.repeat(np.arange(len(timeline.blocks)), lengths)
    column = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths - first, lengths)
    cells = np.repeat(timeline.sm * timeline.slots_per_sm + timeline.slot, lengths), column
    tiles = np.full((places, bins), np.nan, np.float32)
    tiles[cells] = timeline.blocks.tiles[block]
    columns = _columns(timeline)
    contents = np.zeros((places, bins, columns.shape[1]), columns.dtype)
    contents[cells] = columns[block]
    return go.Heatmap(
        z=tiles,
        customdata=contents,
        x0=width / 2,
        dx=width,
        y0=0.5 / timeline.slots_per_sm - 0.5,
        dy=1 / timeline.slots_per_sm,
        coloraxis="coloraxis",
        hoverongaps=False,
        hovertemplate=_hover(timeline.blocks) + "<br>%{z:,.0f} tiles, at %{x:,.1f}<extra></extra>",
    )
