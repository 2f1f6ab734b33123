"""The banks of shared memory that one access touches, a row for each wavefront."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from cufa.dashboard import theme
from cufa.dashboard.model.banks import Wavefront
from cufa.dashboard.theme import Palette
from cufa.run.emulate.shared_accesses import BANKS

MOST_WAVES = 32


def banks_figure(waves: Sequence[Wavefront], who: str, palette: Palette) -> go.Figure:
    """Columns are banks. A cell has the lane (or row of the operand: ``who``) whose word the bank serves."""
    shown = waves[:MOST_WAVES]
    figure = theme.new_figure(palette, 120 + 22 * len(shown), showlegend=False)
    cells = [[None if x is None else x[1] for x in wave.words] for wave in shown]
    offsets = [
        [None if x is None else f"bytes {4 * x[0]:,} to {4 * x[0] + 3:,}" for x in wave.words]
        for wave in shown
    ]
    low, high = palette.scale[0], palette.scale[-2]
    figure.add_heatmap(
        z=cells,
        text=[_texts(row) for row in cells],
        texttemplate="%{text}",
        textfont={"size": 11},
        customdata=offsets,
        colorscale=[[0, low], [1, high]],
        showscale=False,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        hovertemplate=f"bank %{{x}}, {who} %{{z}}<br>%{{customdata}}<extra>%{{y}}</extra>",
    )
    count: dict[int, int] = {}
    names = []
    for wave in shown:
        count[wave.pass_number] = count.get(wave.pass_number, 0) + 1
        names.append(f"{wave.pass_number}.{count[wave.pass_number]}")
    figure.update_xaxes(
        title_text="bank (4 bytes)", tickvals=list(range(0, BANKS, 4)), range=[-0.5, BANKS - 0.5]
    )
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, autorange="reversed", showgrid=False
    )
    theme.fixed_margins(figure, left=70, top=16, right=16)
    return figure


def _texts(lanes: Sequence[int | None]) -> list[str]:
    """One number per run of banks that serve one lane: a number in each cell would overlap in a narrow window."""
    return ["" if x is None or (n and lanes[n - 1] == x) else str(x) for n, x in enumerate(lanes)]
