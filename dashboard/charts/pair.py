"""Two tilings and two launches on one axis."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cufa.dashboard import theme
from cufa.dashboard.charts import tile_grid
from cufa.dashboard.charts.timeline import background, blocks_trace, sm_axis
from cufa.dashboard.charts.work import si
from cufa.dashboard.model.launch import Timeline
from cufa.dashboard.model.pair import FLOP
from cufa.dashboard.theme import Palette
from cufa.schedule.schedule import Schedule, Tile


def grids(names: Sequence[str], schedules: Sequence[Schedule], palette: Palette) -> go.Figure:
    """The score matrices of one head side by side, on axes of queries and keys."""
    titles = [name.replace(", ", "<br>", 1) for name in names]  # two lines, in a narrow window
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
    classes = [palette.tiles[t] for t in (Tile.FULL, Tile.PARTIAL, Tile.PADDED, Tile.SKIPPED)]
    images = []
    for column, schedule in enumerate(schedules, 1):
        images.append(tile_grid.image_in_scores(schedule, palette, "" if column == 1 else str(column)))
        figure.add_trace(tile_grid.hover_in_scores(schedule), 1, column)
    for style in classes:  # the legend: images have none
        marker = {**theme.bar_pattern(style, palette), "line": {"width": 0}}
        figure.add_trace(go.Bar(x=[None], y=[None], name=style.label, marker=marker), 1, 1)
    theme.style(
        figure, palette, 430, images=images, dragmode="zoom",
        legend={"itemclick": False, "itemdoubleclick": False, "y": 1.13},
    )  # fmt: skip
    keys = max(s.num_kv_blocks * s.block_kv for s in schedules)
    queries = max(s.num_q_blocks * s.block_q for s in schedules)
    figure.update_xaxes(title_text="key", range=[0, keys], showgrid=False, zeroline=False, matches="x")
    figure.update_yaxes(range=[queries, 0], showgrid=False, zeroline=False)
    figure.update_yaxes(title_text="query", row=1, col=1)
    figure.update_annotations(font_size=13)
    theme.fixed_margins(figure, top=84)
    return figure


def timelines(names: Sequence[str], lines: Sequence[Timeline], palette: Palette) -> go.Figure:
    """One launch above the other on one axis of time; a dotted line is the end of each."""
    titles = [f"{name}: {_end(timeline)}" for name, timeline in zip(names, lines, strict=True)]
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=titles)
    theme.style(figure, palette, 520, bargap=0, barmode="overlay")
    shapes = []
    for row, timeline in enumerate(lines, 1):
        axis = "" if row == 1 else str(row)
        trace = blocks_trace(timeline)
        colours = {"colorscale": theme.colour_scale(palette), "cmin": 0, "showscale": False}
        colours["cmax"] = max(1, int(timeline.blocks.tiles.max(initial=1)))
        figure.update_layout({f"coloraxis{axis}": colours})
        trace.update({"marker_coloraxis" if isinstance(trace, go.Bar) else "coloraxis": f"coloraxis{axis}"})
        figure.add_trace(trace, row, 1)
        figure.update_yaxes(sm_axis(timeline, 6), row=row, col=1)
        shapes += background(timeline, palette, axis)
    longest = max(timeline.span for timeline in lines)
    figure.update_xaxes(range=[0, longest * 1.01], zeroline=False)
    is_predicted = lines[0].unit == FLOP
    title = "FLOP that one SM could have done (predicted)" if is_predicted else "µs since the first block"
    figure.update_xaxes(title_text=title, row=2, col=1)
    if is_predicted:
        figure.update_xaxes(exponentformat="SI")
    figure.update_layout(shapes=shapes)
    theme.fixed_margins(figure, left=54, top=30)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def _end(timeline: Timeline) -> str:
    return f"ends at {si(timeline.span, FLOP) if timeline.unit == FLOP else f'{timeline.span:,.0f} µs'}"
