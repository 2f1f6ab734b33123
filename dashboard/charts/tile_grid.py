"""The score matrix in tiles: classes as colour and pattern, and the work of each query block beside the matrix, or of
each key block below it.

The tiles are one raster image. Its patterns are drawn in screen pixels: hatching looks alike at 4 × 4 and 256 × 256
tiles. A transparent layer on top answers the mouse: points for few tiles, which can be clicked, otherwise a heatmap,
whose clicks do not reach Streamlit.
"""

from __future__ import annotations

import base64
import functools
import html
import io

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from PIL import Image
from plotly.subplots import make_subplots

from cufa.dashboard import theme
from cufa.dashboard.model import work
from cufa.dashboard.theme import Palette
from cufa.problem.mask import Mask
from cufa.schedule.schedule import Schedule, Tile

Cells = npt.NDArray[np.uint8]

PICKABLE = 64 * 64
"""Up to this many tiles, each can be clicked."""
_RASTER = 1024, 660
"""Width and height of the raster in pixels. Its aspect ratio is close to the drawn grid's, so that patterns are not
distorted."""
_ROW_HEIGHT = 56
"""Pixels of a query block, if the grid has few."""
_WORK_BELOW = 130
"""Pixels of the bars of key blocks, below the grid."""
_HOVER_CELLS = 256
"""Longest side of the heatmap that answers the mouse."""
_BARS = 64
"""Up to this many query blocks, the work beside the grid is drawn as bars; areas draw faster."""
_MARGINS, _MOST_HEIGHT = 120, 440
"""Pixels around the grid (legend, ticks, titles), and of the grid at most."""
_FEW = 12
"""Up to this many blocks, each has its number on the axis."""
_BORDER = 8  # index of the colour between tiles, after two (fill, ink) per class


def tile_grid(schedule: Schedule, palette: Palette, selected: tuple[int, int] | None = None) -> go.Figure:
    """Query block × key block in classes. Beside the grid: the tiles that each query block visits; for a schedule by
    keys, below the grid: the tiles that each key block visits.

    ``selected`` (query block, key block) is framed; for a schedule by keys, its whole column. In a pickable grid, each
    point of trace 0 is a tile: x its key block, y its query block.
    """
    by_keys, rows, columns = schedule.by_keys, schedule.num_q_blocks, schedule.num_kv_blocks
    if by_keys:
        figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.76, 0.24], vertical_spacing=0.03)
    else:
        figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.76, 0.24], horizontal_spacing=0.025)
    theme.style(
        figure,
        palette,
        _MARGINS + _grid_height(rows) + by_keys * _WORK_BELOW,
        barmode="stack",
        hovermode="closest",
        clickmode="event+select",
        dragmode="zoom",
        bargap=0.08 if schedule.num_blocks <= 64 else 0,
        legend={"traceorder": "normal", "itemclick": False, "itemdoubleclick": False},
        images=[_image(schedule, palette)],
        shapes=_outline(schedule, palette, selected),
        hoverdistance=-1,  # the nearest tile answers: points without a marker have no size
    )
    figure.add_trace(_pick(schedule) if rows * columns <= PICKABLE else _hover(schedule), 1, 1)
    figure.add_traces(_block_work(schedule, palette), rows=1 + by_keys, cols=2 - by_keys)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(range=[-0.5, columns - 0.5], row=1, col=1)
    figure.update_xaxes(title_text=f"key block ({schedule.block_kv} keys each)", row=1 + by_keys, col=1)
    figure.update_yaxes(
        title_text=f"query block ({schedule.block_q} queries each)", range=[rows - 0.5, -0.5], row=1, col=1
    )
    if by_keys:
        figure.update_yaxes(title_text="tiles", range=[0, rows], row=2, col=1)
    else:
        figure.update_xaxes(title_text="tiles", range=[0, columns], row=1, col=2)
    if rows <= _FEW:
        figure.update_yaxes(tickvals=list(range(rows)), row=1, col=1)
    if rows == 1:
        figure.update_yaxes(title_text="query block", row=1, col=1)
    if columns <= _FEW:
        figure.update_xaxes(tickvals=list(range(columns)), row=1 + by_keys, col=1)
    theme.fixed_margins(figure, top=58)  # in a narrow window the legend has two lines
    return figure


def _grid_height(rows: int) -> int:
    """Pixels of the grid; few query blocks are not stretched."""
    return min(_MOST_HEIGHT, max(2, rows) * _ROW_HEIGHT)


def describe(schedule: Schedule, counts: dict[Tile, int]) -> str:
    """The grid in words."""
    parts = ", ".join(
        f"{counts[t]:,} {theme.LIGHT.tiles[t].label}" for t in (Tile.FULL, Tile.PARTIAL, Tile.PADDED)
    )
    who, whom = ("key", "query") if schedule.by_keys else ("query", "key")
    per_row = f"A {who} block visits {schedule.visits.min():,} to {schedule.visits.max():,} {whom} blocks."
    return (
        f"Grid of {schedule.num_q_blocks:,} query blocks (top to bottom) by {schedule.num_kv_blocks:,} key "
        f"blocks (left to right) for {schedule.seqlen_q:,} queries and {schedule.seqlen_k:,} keys "
        f"under the mask {schedule.mask}: {parts} and {counts[Tile.SKIPPED]:,} skipped tiles. "
        f"{per_row} Full tiles are plain blue, partial tiles amber with diagonal lines, "
        "padded tiles purple with crosses, skipped tiles dotted."
    )


def raster(tiles: Cells, palette: Palette, size: tuple[int, int] = _RASTER) -> Image.Image:
    """Classes as an image of about this size, with a palette of nine colours."""
    tiles = reduce_tiles(tiles, max(size))
    wide, high = (max(1, pixels // cells) for pixels, cells in zip(size, tiles.shape[::-1], strict=True))
    cells = np.repeat(np.repeat(tiles, high, 0), wide, 1)
    y, x = np.ogrid[: cells.shape[0], : cells.shape[1]]
    inked = {
        Tile.PARTIAL: (x + y) % 9 < 3,
        Tile.PADDED: ((x + y) % 12 < 2) | ((x - y) % 12 < 2),
        Tile.SKIPPED: (x % 10 < 2) & (y % 10 < 2),
    }
    index = (cells * 2).astype(np.uint8)
    for tile, where in inked.items():
        index += (cells == tile) & where
    for place, cell in ((y, high), (x, wide)):
        if cell >= 6:
            index[np.broadcast_to(place % cell < (2 if cell >= 16 else 1), index.shape)] = _BORDER
    image = Image.fromarray(index, "P")
    colours = [c for tile in Tile for c in (palette.tiles[tile].fill, palette.tiles[tile].ink)]
    image.putpalette([v for c in (*colours, palette.background) for v in bytes.fromhex(c[1:])])
    return image


def reduce_tiles(tiles: Cells, longest: int) -> Cells:
    """At most ``longest`` cells per side. A cell of several tiles shows the first class of padded, partial, full,
    skipped."""
    step = -(-max(tiles.shape) // longest)
    if step <= 1:
        return tiles
    rows, columns = (-(-n // step) * step for n in tiles.shape)
    padded = np.zeros((rows, columns), np.uint8)
    padded[: tiles.shape[0], : tiles.shape[1]] = tiles
    reduced: Cells = padded.reshape(rows // step, step, columns // step, step).max(axis=(1, 3))
    return reduced


def _image(schedule: Schedule, palette: Palette) -> dict[str, object]:
    """An entry of ``layout.images``, in tile coordinates."""
    size = {"sizex": schedule.num_kv_blocks, "sizey": schedule.num_q_blocks, "sizing": "stretch"}
    place = {"xref": "x", "yref": "y", "x": -0.5, "y": -0.5, "layer": "below"}
    return {"source": _png(schedule, palette.name), **place, **size}


def image_in_scores(schedule: Schedule, palette: Palette, axis: str = "") -> dict[str, object]:
    """An entry of ``layout.images`` for axes that count queries and keys; ``axis``: number of the axes."""
    return {
        **_image(schedule, palette),
        "xref": f"x{axis}",
        "yref": f"y{axis}",
        "x": 0,
        "y": 0,
        "sizex": schedule.num_kv_blocks * schedule.block_kv,
        "sizey": schedule.num_q_blocks * schedule.block_q,
    }


def hover_in_scores(schedule: Schedule) -> go.Heatmap:
    """The layer that answers the mouse over :func:`image_in_scores`."""
    trace = _hover(schedule)
    height, width = schedule.block_q * trace.dy, schedule.block_kv * trace.dx
    return trace.update(
        x0=width / 2,
        dx=width,
        y0=height / 2,
        dy=height,
        hovertemplate=f"tiles of {schedule.block_q} × {schedule.block_kv}, around query %{{y:,.0f}} and key "
        "%{x:,.0f}<br><b>%{z}% of the scores here are visible</b><extra></extra>",
    )


@functools.lru_cache(64)
def preview(mask: Mask, seqlen_q: int, seqlen_k: int, palette_name: str, side: int, alt: str) -> str:
    """A mask as an HTML image of at most ``side`` pixels per side, in up to ``side`` / 4 cells."""
    step = -(-max(seqlen_q, seqlen_k) // (side // 4))
    tiles = Schedule(seqlen_q, seqlen_k, step, step, mask).tiles
    tiles = np.where(tiles == Tile.PADDED, Tile.FULL, tiles)
    height, width = (max(1, side * n // max(tiles.shape)) for n in tiles.shape)
    source = _uri(raster(tiles, theme.PALETTES[palette_name], (width, height)))
    return f'<img src="{source}" alt="{html.escape(alt)}" style="flex:none">'


@functools.lru_cache(32)  # the selected tile is not part of the image
def _png(schedule: Schedule, palette_name: str) -> str:
    """The raster as a data URI."""
    width, height = _RASTER
    high = max(1, height * _grid_height(schedule.num_q_blocks) // _MOST_HEIGHT)
    return _uri(raster(schedule.tiles, theme.PALETTES[palette_name], (width, high)))


def _uri(image: Image.Image) -> str:
    """An image as a data URI, lightly compressed: long runs of nine colours are small in any case."""
    buffer = io.BytesIO()
    image.save(buffer, "png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _outline(
    schedule: Schedule, palette: Palette, selected: tuple[int, int] | None
) -> list[dict[str, object]]:
    """Two frames around the selected tile, visible on every fill."""
    if selected is None:
        return []
    row, column = selected
    # At least 1% of the side: a smaller frame is invisible in a large grid.
    dy, dx = (max(0.5, 0.006 * n) for n in (schedule.num_q_blocks, schedule.num_kv_blocks))
    middle: float = row
    if schedule.by_keys:
        middle, dy = (schedule.num_q_blocks - 1) / 2, schedule.num_q_blocks / 2
    box = {"type": "rect", "x0": column - dx, "x1": column + dx, "y0": middle - dy, "y1": middle + dy}
    return [
        {**box, "line": {"color": palette.background, "width": 6}},
        {**box, "line": {"color": palette.text, "width": 3}},
    ]


def _pick(schedule: Schedule) -> go.Scatter:
    """A clickable point per tile; invisible, as drawing thousands of elements takes a browser 0.2 s."""
    tiles = schedule.tiles
    row, column = (x.ravel() for x in np.indices(tiles.shape))
    last_row = np.minimum((row + 1) * schedule.block_q, schedule.seqlen_q) - 1
    last_column = np.minimum((column + 1) * schedule.block_kv, schedule.seqlen_k) - 1
    labels = np.array([theme.LIGHT.tiles[t].label for t in Tile])
    span = np.column_stack([row * schedule.block_q, last_row, column * schedule.block_kv, last_column])
    return go.Scatter(
        x=column,
        y=row,
        text=labels[tiles.ravel()],
        customdata=span,
        mode="markers",
        marker={"opacity": 0, "maxdisplayed": 1},
        hovertemplate="query block %{y}, key block %{x}<br>queries %{customdata[0]:,}–%{customdata[1]:,}<br>"
        "keys %{customdata[2]:,}–%{customdata[3]:,}<br><b>%{text}</b><extra></extra>",
        showlegend=False,
        name="tiles",
    )


def _hover(schedule: Schedule) -> go.Heatmap:
    """A transparent heatmap of the share of visible scores, in percent: one byte per cell."""
    step = -(-max(schedule.tiles.shape) // _HOVER_CELLS)
    area = schedule.block_q * schedule.block_kv * step * step
    wanted = work.wanted_scores(schedule, step)
    percent = np.where(wanted > 0, np.clip(np.rint(100 * wanted / area), 1, 99), 0)
    percent[wanted == area] = 100
    clear = "rgba(0,0,0,0)"
    block = "block" if step == 1 else f"blocks from (each cell is {step} × {step} tiles)"
    return go.Heatmap(
        z=percent.astype(np.uint8),
        x0=(step - 1) / 2,
        dx=step,
        y0=(step - 1) / 2,
        dy=step,
        colorscale=[[0, clear], [1, clear]],
        showscale=False,
        zsmooth="fast",
        hovertemplate=f"query {block} %{{y:.0f}}, key block %{{x:.0f}}<br>"
        "<b>%{z}% of its scores are visible</b><extra></extra>",
        name="tiles",
    )


def _block_work(schedule: Schedule, palette: Palette) -> list[go.Bar] | list[go.Scatter]:
    """Tiles of each block by class: of query blocks to the right, of key blocks upwards."""
    by_keys, blocks = schedule.by_keys, np.arange(schedule.num_blocks)
    block, count = ("x", "y") if by_keys else ("y", "x")
    who, orientation = ("key", "v") if by_keys else ("query", "h")
    traces = []
    for tile in (Tile.FULL, Tile.PARTIAL, Tile.PADDED, Tile.SKIPPED):
        style, counts = palette.tiles[tile], (schedule.tiles == tile).sum(axis=0 if by_keys else 1)
        hover = f"{who} block %{{{block}}}: %{{{count}:,}} {style.label}<extra></extra>"
        common = {block: blocks, count: counts, "orientation": orientation, "showlegend": True}
        common |= {"name": style.label, "hovertemplate": hover}
        if len(blocks) <= _BARS:
            traces.append(go.Bar(**common, marker=theme.bar_pattern(style, palette)))
        else:
            line = {"width": 0, "shape": "hv" if by_keys else "vh"}
            fill = {"fillcolor": style.fill, "line": line, "mode": "lines", "stackgroup": "tiles"}
            pattern = {"fillpattern": theme.bar_pattern(style, palette)["pattern"]} if style.pattern else {}
            traces.append(go.Scatter(**common, **fill, **pattern))
    return traces
