"""The page Compare: one kernel on two cards, or on two days, in one figure."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.dashboard import engine, page
from cufa.dashboard.charts import compare as charts
from cufa.dashboard.model.asked import figures
from cufa.dashboard.model.many import grouped
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.measure.measured import geometric_mean


def _day(m: Measurement) -> str:
    return f"{m.machine} · {m.recorded[:10]}".replace(",", "")  # a comma separates values in links


def show(controls: Controls, measured: Sequence[Measurement], palette: Palette) -> None:
    """Rates by length, a curve for each card and day; regimes are never mixed."""
    page.header("Two cards, or two days")
    rows = [*engine.past(), *measured]
    series = grouped((m for m in rows if m.is_gpu), lambda m: f"{m.label} · {m.family} · {m.regime}")
    several = {name: grouped(x, _day) for name, x in series.items()}
    several = {name: days for name, days in several.items() if len(days) > 1}
    if not several:
        page.verdict("No kernel was measured on two cards or days.", small=True)
        return

    def interest(name: str) -> tuple[bool, int, bool, float]:
        rows = [m for x in several[name].values() for m in x]
        machines, lengths = {m.machine for m in rows}, {m.problem.seqlen_k for m in rows}
        return rows[0].kernel is not None, len(machines), len(lengths) > 2, max(m.tflops for m in rows)

    ranked = sorted(several, key=interest, reverse=True)
    name = controls.choice("both", "Kernel, shapes and regime", ranked, local=True)
    days = dict(sorted(several[name].items(), key=lambda x: max(m.recorded for m in x[1]), reverse=True))
    first = next(iter(days))
    other = next((x for x in days if days[x][0].machine != days[first][0].machine), list(days)[1])
    shown = controls.several("days", "Cards and days", list(days), [first, other], local=True)
    curves = {x: figures(days[x]) for x in shown}
    if not curves:
        page.verdict("No card is chosen: choose at least one.", "warn", small=True)
        return
    bound = next(iter(curves.values()))[0].operation.memory_bound
    title = "TB/s" if bound else "TFLOP/s (useful)"
    points = {day: [charts.rate_point(m) for m in x] for day, x in curves.items()}
    page.verdict(_verdict(curves), "", page.origin_tag(next(iter(curves.values()))[0].origin), small=True)
    texts = "; ".join(f"{day}: {p.text.replace('<br>', ', ')}" for day, x in points.items() for p in x)
    page.figure(charts.by_length(points, palette, title), "compare.two", f"{title} by keys. {texts}."[:4000])
    st.caption(
        f"{name}. Bars are p10 to p90. Clocks, drivers and the kernel's source may differ between days."
    )


def _verdict(curves: dict[str, list[Measurement]]) -> str:
    """The second card or day against the first, over the problems that both have."""
    (first, rows), *others = curves.items()
    if not others:
        return f"{first}: {len(rows)} lengths."
    seconds = {m.key: m.seconds for m in rows}
    parts = []
    for day, theirs in others:
        if ratios := [m.seconds / seconds[m.key] for m in theirs if m.key in seconds]:
            times, problems = f"{geometric_mean(ratios):.2f}×", f"{len(ratios)} common problems"
            parts.append(f"{day} takes {times} the time of {first} over {problems}")
    return f"{'; '.join(parts) or 'No problem in common'}."
