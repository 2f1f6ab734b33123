"""Small matrices as tables of coloured cells in the page's text. (Streamlit removes SVG from HTML.)"""

from __future__ import annotations

import html
from collections.abc import Sequence

from cufa.dashboard.theme import Palette

Cell = tuple[str, str]
"""Colour, and text."""


def picture(
    cells: Sequence[Sequence[Cell]], alt: str, palette: Palette, size: int,
    rows: Sequence[str] = (), columns: Sequence[str] = (),
) -> str:  # fmt: skip
    """HTML of cells of ``size`` pixels, with names of the rows and columns."""
    plain = f"border:0;padding:0 4px;color:{palette.muted};text-align:center"
    box = f"border:1px solid {palette.background};padding:0;height:{size}px;min-width:{size}px;text-align:center"
    lines = [["", *columns]] if columns else []
    top = "".join(
        f"<tr>{''.join(f'<td style={plain!r}>{html.escape(x)}</td>' for x in line)}</tr>" for line in lines
    )
    body = ""
    for i, row in enumerate(cells):
        head = f"<td style={plain!r}>{html.escape(rows[i])}</td>" if rows else ""
        inner = "".join(f"<td style='{box};background:{colour}'>{html.escape(x)}</td>" for colour, x in row)
        body += f"<tr>{head}{inner}</tr>"
    style = "border-collapse:collapse;font-size:12px;line-height:1;width:auto"
    return f'<table role="img" aria-label="{html.escape(alt)}" style="{style}">{top}{body}</table>'
