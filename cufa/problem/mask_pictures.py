"""Pictures of masks: which query sees which key."""

from __future__ import annotations

import html as markup
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import Columns
from .mask import Mask

#: Length of a picture for masks without numbers per key.
_LENGTH = 64
#: Most cells along a side: in pictures of longer masks a cell is several rows and keys.
_CELLS = 96
_PIXELS = 288

_SEEN, _SOME, _HIDDEN = "#1f6f8b", "#8fc1d0", "#eef1f3"
_NAMES = ("hidden", "partly seen", "seen")


def lengths(mask: Mask, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
    """(seqlen_q, seqlen_k) of a picture: the given lengths, else those of the mask's own arrays, else 64."""
    band = mask.band if isinstance(mask, Columns) else mask
    if band.matrix:
        return seqlen_q or band.matrix[0], seqlen_k or band.matrix[1]
    own = mask.intervals.shape[-1] if isinstance(mask, Columns) else _LENGTH
    seqlen_k = seqlen_k or (seqlen_q if seqlen_q and not isinstance(mask, Columns) else own)
    return seqlen_q or seqlen_k, seqlen_k


def cells(mask: Mask, seqlen_q: int, seqlen_k: int, batch: int, head: int) -> npt.NDArray[np.uint8]:
    """0 hidden, 1 partly seen, 2 seen, for each cell: a score, or a square of scores of a long mask. Counted per key,
    so that time is linear in the keys."""
    one, step = mask.at(batch, head), -(-max(seqlen_q, seqlen_k) // _CELLS)
    shown = np.empty((-(-seqlen_q // step), -(-seqlen_k // step)), np.uint8)
    first = np.arange(0, seqlen_k, step)
    widths = np.diff(first, append=seqlen_k)
    for i in range(len(shown)):
        top, end = i * step, min((i + 1) * step, seqlen_q)
        count = np.add.reduceat(one.visible_per_key(seqlen_q, seqlen_k, top, end), first)
        shown[i] = (count > 0).astype(np.uint8) + (count == (end - top) * widths)
    return shown


def figure(mask: Mask, seqlen_q: int | None, seqlen_k: int | None, batch: int, head: int) -> Any:
    """A Plotly figure."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError(
            "Mask.figure() draws with Plotly, which is not installed: pip install plotly. Mask.dense() is the matrix, "
            "and notebooks show a mask without Plotly"
        ) from error
    lengths_ = lengths(mask, seqlen_q, seqlen_k)
    if 0 in (*lengths_, *mask.spread):
        nothing = "no keys" if 0 in lengths_ else "no sequences"
        raise ValueError(f"{mask} has {nothing} to draw: make it for at least one")
    shown = cells(mask, *lengths_, batch, head)
    colours = [(n / 2, colour) for n, colour in enumerate((_HIDDEN, _SOME, _SEEN))]
    query, key = (np.arange(n) * -(-max(lengths_) // _CELLS) for n in shown.shape)
    picture = graph_objects.Heatmap(
        z=shown, x=key, y=query, zmin=0, zmax=2, colorscale=colours, showscale=False,
        text=np.array(_NAMES)[shown], hovertemplate="query %{y}, key %{x}: %{text}<extra></extra>",
        xgap=shown.size < 4096, ygap=shown.size < 4096,
    )  # fmt: skip
    layout = {
        "title": str(mask),
        "xaxis": {"title": "key", "side": "top", "constrain": "domain"},
        "yaxis": {"title": "query", "autorange": "reversed", "scaleanchor": "x"},
    }
    return graph_objects.Figure(picture, layout)


def html(mask: Mask) -> str:
    """An SVG picture with a caption."""
    caption = markup.escape(str(mask))
    if not mask.known:
        return f"<p>{caption}: its numbers are not on the host, so that there is no picture.</p>"
    seqlen_q, seqlen_k = lengths(mask, None, None)
    if not seqlen_k or 0 in mask.spread:
        return f"<p>{caption}: of no {'sequences' if seqlen_k else 'keys'}.</p>"
    shown = cells(mask, seqlen_q, seqlen_k, 0, 0)
    height, width = shown.shape
    runs = [run for row, values in enumerate(shown) for run in _runs(row, values)]
    spread = "" if mask.spread == (1, 1) else ", of sequence 0 and head 0"
    scale = _PIXELS // max(height, width) or 1
    return (
        f'<figure style="margin:0"><svg role="img" aria-label="{caption}" width="{width * scale}" '
        f'height="{height * scale}" viewBox="0 0 {width} {height}" shape-rendering="crispEdges">'
        f'<rect width="{width}" height="{height}" fill="{_HIDDEN}"/>{"".join(runs)}</svg>'
        f"<figcaption>{caption}: {seqlen_q:,} queries × {seqlen_k:,} keys{spread}</figcaption></figure>"
    )


def _runs(row: int, values: npt.NDArray[np.uint8]) -> list[str]:
    """One SVG rectangle for each run of cells of one colour."""
    starts = np.flatnonzero(np.diff(values, prepend=255))
    ends = np.append(starts[1:], len(values))
    fill = ("", _SOME, _SEEN)
    return [
        f'<rect x="{start}" y="{row}" width="{end - start}" height="1" fill="{fill[values[start]]}"/>'
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if values[start]
    ]
