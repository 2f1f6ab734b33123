"""The ranks of a parallel call: their steps over time, where their time goes, which scores they compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from cufa.commands.common import bytes_text
from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.parallel import Prediction
from cufa.parallel.placement import Range, Segment
from cufa.parallel.schedule import Schedule

Cells = npt.NDArray[np.int64]

_MS = 1e3
_CELLS = 64
"""Blocks of tokens on each side of the map."""


def timeline(result: Prediction, palette: Palette) -> go.Figure:
    """Kernels and copies of each rank over time."""
    ranks = result.schedule.ranks
    figure = theme.new_figure(palette, 120 + 34 * ranks, barmode="overlay", bargap=0.25)
    for name, colour in (("kernels", palette.predicted), ("copies for a step", palette.series[1])):
        rows = [x for x in result.steps if name == "kernels" or x.transfer]
        copies = name != "kernels"
        width = [x.transfer if copies else x.compute for x in rows]
        base = [x.arrived - x.transfer if copies else x.begin for x in rows]
        figure.add_bar(
            name=name, orientation="h", marker_color=colour,
            y=[f"rank {x.rank}{' copies' if copies else ''}" for x in rows],
            x=[w * _MS for w in width], base=[b * _MS for b in base],
            customdata=[(x.step, w * _MS, bytes_text(x.bytes)) for x, w in zip(rows, width, strict=True)],
            hovertemplate="step %{customdata[0]}: %{customdata[1]:.3f} ms, %{customdata[2]} received<extra></extra>",
        )  # fmt: skip
    order = [f"rank {rank}{kind}" for rank in range(ranks) for kind in ("", " copies")]
    drawn = {x for trace in figure.data for x in trace.y or ()}
    figure.update_yaxes(
        categoryorder="array", categoryarray=[x for x in order if x in drawn][::-1], showgrid=False
    )
    return figure.update_xaxes(title_text="time (ms, predicted)", range=[0, result.seconds * _MS * 1.02])


def describe_timeline(result: Prediction) -> str:
    """The timeline in words."""
    exposed = max((result.split(rank)["exposed"] for rank in range(result.schedule.ranks)), default=0.0)
    return (
        f"Predicted timeline of {result.schedule.ranks} ranks: one bar for the kernels of each step, and below it the "
        f"copies that the step needs, which run under earlier steps. The last rank is done after "
        f"{result.seconds * _MS:.3f} ms; a rank waits at most {exposed * _MS:.3f} ms for copies."
    )


def split(result: Prediction, palette: Palette) -> go.Figure:
    """Compute, exposed communication and idle time of each rank; overlapped communication beside it."""
    ranks = range(result.schedule.ranks)
    figure = theme.new_figure(palette, 110 + 26 * len(ranks), barmode="stack", bargap=0.3)
    looks = {"compute": palette.predicted, "exposed": palette.alarm, "idle": palette.idle}
    for name, colour in looks.items():
        figure.add_bar(
            name={"exposed": "exposed communication"}.get(name, name), orientation="h", marker_color=colour,
            y=[f"rank {r}" for r in ranks], x=[result.split(r)[name] * _MS for r in ranks],
            customdata=[result.split(r)["overlapped"] * _MS for r in ranks],
            hovertemplate="%{x:.3f} ms; %{customdata:.3f} ms of copies overlapped<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_xaxes(title_text="time (ms, predicted)")


def describe_split(result: Prediction) -> str:
    """The shares in words."""
    rows = [result.split(rank) for rank in range(result.schedule.ranks)]
    worst = max(rows, key=lambda x: x["exposed"] + x["idle"])
    return (
        f"Each rank's {result.seconds * _MS:.3f} ms: compute, exposed communication and idle time. The rank that waits "
        f"longest waits {worst['exposed'] * _MS:.3f} ms for copies and is idle for {worst['idle'] * _MS:.3f} ms; "
        f"{worst['overlapped'] * _MS:.3f} ms of its copies run under its kernels."
    )


def owners(result: Prediction, palette: Palette) -> go.Figure:
    """Blocks of queries and keys, coloured by the rank that computes their scores; text: the step."""
    schedule = result.schedule
    owner, step, middles = _owners(schedule)
    figure = theme.new_figure(palette, 430)
    values = np.where(owner < 0, np.nan, owner)
    names = np.where(owner < 0, "hidden", np.char.add("rank ", owner.astype(str)))
    figure.add_heatmap(
        z=values, customdata=np.dstack([names, step]), zmin=0, zmax=max(schedule.ranks - 1, 1),
        colorscale=theme.colour_scale(palette),
        colorbar={"title": {"text": "rank"}, "thickness": 10, "dtick": -(-schedule.ranks // 16)},
        hovertemplate="queries %{y}, keys %{x}: %{customdata[0]}, step %{customdata[1]}<extra></extra>",
        x=middles[1], y=middles[0],
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", title_text="queries", showgrid=False)
    return figure.update_xaxes(title_text="keys", showgrid=False)


def describe_owners(result: Prediction) -> str:
    """The map in words."""
    schedule = result.schedule
    shares = [schedule.scores(rank) for rank in range(schedule.ranks)]
    total = max(sum(shares), 1)
    percent = ", ".join(f"rank {rank} {share / total:.1%}" for rank, share in enumerate(shares))
    by_heads = len({work.heads for works in schedule.works for work in works}) > 1
    note = " Ranks divide the heads: the map shows the ranks of the first head." if by_heads else ""
    return f"Blocks of queries by blocks of keys, coloured by the rank that computes them. Shares: {percent}.{note}"


def _owners(schedule: Schedule) -> tuple[Cells, Cells, list[Cells]]:
    """Rank and step of the middle of each block, for the first head; -1: hidden. And the blocks' middle tokens."""
    middles = [
        np.unique((2 * np.arange(_CELLS) + 1) * n // (2 * _CELLS))
        for n in (schedule.queries.seqlen, schedule.keys.seqlen)
    ]
    owner, steps = (np.full([len(x) for x in middles], -1) for _ in range(2))
    for rank in range(schedule.ranks):
        for place, work, step in schedule.steps(rank):
            for call in step.calls if work.heads[0] == 0 else ():
                rows = _places(work.queries, call.rows, middles[0])
                keys = _places(step.keys, call.keys, middles[1])
                sizes = (x[1] - x[0] for x in (call.rows, call.keys))
                visible = call.mask.visible(rows, keys, *sizes) & (rows >= 0)[:, None] & (keys >= 0)
                owner[visible], steps[visible] = rank, place
    return owner, steps, middles


def _places(segments: Sequence[Segment], rows: Range, tokens: Cells) -> Cells:
    """The tokens' rows, counted from the first of ``rows``; -1: not among them."""
    places, position = np.full(len(tokens), -1), -rows[0]
    for x in segments:
        inside = (tokens >= x.token) & (tokens < x.end)
        place = tokens - x.token + position
        places = np.where(inside & (place >= 0) & (place < rows[1] - rows[0]), place, places)
        position += x.length
    return places
