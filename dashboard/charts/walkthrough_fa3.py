"""Data of FA3's timeline for the walkthrough's player."""

from __future__ import annotations

from typing import Any

from cufa.dashboard.charts.walkthrough import colours
from cufa.dashboard.model import walkthrough_fa3 as fa3
from cufa.dashboard.theme import Palette


def data(stages: int, palette: Palette) -> dict[str, Any]:
    """Bars by row, and for each unit of time what each warpgroup does."""
    events = fa3.pipeline(stages)
    names = fa3.rows(stages)
    bars = [
        [
            names.index(e.row),
            f"{e.name.replace(' ', '')} {e.tile}" if e.tile >= 0 else e.name,
            e.tile,
            e.start,
            e.end,
        ]
        for e in events
    ]
    units = range(fa3.busy(events)[1])
    return {
        "case": f"fa3 {stages}",
        "palette": colours(palette),
        "timeline": {"rows": names, "bars": bars},
        "steps": [{"phases": [list(x) for x in fa3.words(events, stages, time)]} for time in units],
    }
