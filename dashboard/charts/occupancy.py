"""Theoretical occupancy: curves around one kernel, and a table of all its builds."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.theme import Palette
from cufa.gpu.architectures import Architecture
from cufa.gpu.occupancy import Occupancy, Resource, occupancy

_NAME_WIDTH = 30
"""Characters of a row's name on one line."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Resources of one block."""

    registers: int
    threads: int
    shared_memory: int
    barriers: int = 1

    def on(self, arch: Architecture) -> Occupancy:
        return occupancy(arch, **dataclasses.asdict(self))


def verdict(o: Occupancy) -> str:
    """The limiting resource, and the change that would add a block, in one sentence."""
    if not o.blocks:
        return f"The kernel cannot run on {o.arch.name}: one block exceeds the limit of {_names(o)}."
    plural = "block" if o.blocks == 1 else "blocks"
    text = f"Limited by {_names(o)}: {o.blocks} {plural}, {o.warps} of {o.arch.max_warps} warps per SM"
    needs = o.one_more_block
    if needs is None:
        return f"{text}; fewer registers or bytes would not add a block."
    parts = []
    if needs.registers is not None:
        parts.append(f"{o.registers - needs.registers} fewer registers per thread")
    if needs.shared_memory is not None:
        parts.append(f"{(o.shared_memory - needs.shared_memory) / 1024:.3g} KiB less shared memory per block")
    return f"{text}; {' and '.join(parts)} would allow {needs.blocks}."


def _names(o: Occupancy) -> str:
    words = {Resource.WARPS: "warps per SM", Resource.BLOCKS: "blocks per SM"}
    return " and ".join(words.get(r, str(r)) for r in o.limiters)


#: Field of :class:`Point`, axis title, and unit of the axis.
SWEEPS = (
    ("registers", "registers per thread", 1),
    ("shared_memory", "shared memory per block (KiB)", 1024),
    ("threads", "threads per block", 1),
)


def curve(arch: Architecture, field: str, kernel: Point, what_if: Point, palette: Palette) -> go.Figure:
    """Occupancy against one field of :data:`SWEEPS`, the others as in ``what_if``; both points marked."""
    _, title, unit = next(sweep for sweep in SWEEPS if sweep[0] == field)
    values = _values(arch, field)
    results = [dataclasses.replace(what_if, **{field: v}).on(arch) for v in values]
    figure = theme.new_figure(palette, 300)
    figure.add_scatter(
        x=[v / unit for v in values],
        y=[o.fraction for o in results],
        customdata=[(o.blocks, o.warps, " and ".join(o.limiters)) for o in results],
        mode="lines",
        line={"color": palette.accent, "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor=_faint(palette.accent),
        hovertemplate="%{x:,.0f}: %{y:.0%}, %{customdata[0]} blocks, %{customdata[1]} warps<br>"
        "limited by %{customdata[2]}<extra></extra>",
        showlegend=False,
    )
    for name, point, symbol, colour in (
        ("as compiled", kernel, "diamond", palette.measured),
        ("what if", what_if, "circle-open", palette.series[1]),
    ):
        figure.add_scatter(
            x=[getattr(point, field) / unit],
            y=[point.on(arch).fraction],
            name=name,
            mode="markers",
            marker={"symbol": symbol, "size": 12, "color": colour, "line": {"width": 3, "color": colour}},
            hovertemplate=f"{name}: %{{x:,.1f}}, occupancy %{{y:.1%}}<extra></extra>",
        )
    figure.update_xaxes(title_text=title, rangemode="tozero")
    most = max(0.2, kernel.on(arch).fraction, *(o.fraction for o in results))
    return figure.update_yaxes(title_text="occupancy", tickformat=".0%", range=[0, min(1.05, 1.25 * most)])


def _values(arch: Architecture, field: str) -> range:
    return {
        "registers": range(16, arch.max_registers_per_thread + 1),
        "shared_memory": range(0, arch.shared_memory_per_block + 1, 1024),
        "threads": range(32, arch.max_threads_per_block + 1, 32),
    }[field]


def table(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[Occupancy | str]],
    palette: Palette,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """Tiles × architecture: blocks, warps and registers in each cell, or the reason for an empty cell."""
    names = [textwrap.wrap(row, _NAME_WIDTH) for row in rows]
    height = 24 + 16 * max(2, *map(len, names)) if rows else 54
    figure = theme.new_figure(palette, 96 + height * max(1, len(rows)))
    z = [[None if isinstance(o, str) else o.fraction for o in line] for line in cells]
    text = [[o if isinstance(o, str) else _cell(o) for o in line] for line in cells]
    hover = [
        [f"<b>{row} · {column}</b><br>{o if isinstance(o, str) else verdict(o)}" for column, o in places]
        for row, line in zip(rows, cells, strict=True)
        for places in [zip((c.replace("<br>", " ") for c in columns), line, strict=True)]
    ]
    # Faint fills keep the contrast of the text.
    scale = [[0, palette.panel], [1, _faint(palette.accent, 0.55)]]
    figure.add_heatmap(
        z=z, text=text, customdata=hover, texttemplate="%{text}", xgap=3, ygap=3, zmin=0, zmax=1, colorscale=scale,
        showscale=False, textfont={"color": palette.text, "size": 12}, hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
    )  # fmt: skip
    if selected is not None:
        row, column = selected
        box = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        figure.add_shape(type="rect", **box, line={"color": palette.text, "width": 2})
    lines = ["<br>".join(name) for name in names]
    figure.update_yaxes(theme.PLAIN, autorange="reversed", tickvals=list(range(len(rows))), ticktext=lines)
    places = list(range(len(columns)))
    return figure.update_xaxes(theme.PLAIN, side="top", tickvals=places, ticktext=list(columns))


def _cell(o: Occupancy) -> str:
    return f"<b>{o.blocks}</b> × {o.warps_per_block} warps<br>{o.registers} regs, {o.fraction:.0%}"


def _faint(colour: str, alpha: float = 0.14) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},{alpha})"
