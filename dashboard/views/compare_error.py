"""The page Compare: the error of 8 bits against time, from the suite fp8."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import error as charts
from cufa.dashboard.model.many import grouped
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.measure.distributions import DISTRIBUTIONS

_KEY = "compare.error"


def show(controls: Controls, measured: Sequence[Measurement], palette: Palette) -> None:
    """The newest run of a machine, one distribution of the inputs."""
    page.header("Error against time in 8 bits")
    described = [m for m in measured if m.row.json.get("accuracy")]
    if not described:
        text = "No error of 8 bits is measured yet: start the suite fp8 on the page Run."
        page.verdict(text, "warn", small=True)
        return
    left, right = page.fields(2, 3)
    machines = grouped(described, lambda m: m.machine + " (CPU)" * (not m.is_gpu))
    where = controls.choice("error_of", "Measured on", list(machines), local=True, at=left)
    by_name = grouped(machines[where], lambda m: str(m.row.json["accuracy"]["distribution"]))
    words = {name: f"{name}: {DISTRIBUTIONS[name][0]}" for name in DISTRIBUTIONS if name in by_name}
    name = controls.choice("inputs", "Inputs", words, at=right)
    newest = max(m.recorded for m in by_name[name])
    rows = list({m.label: m for m in by_name[name] if m.recorded == newest}.values())
    page.verdict(f"On {where}: {_verdict(rows)}", "", page.origin_tag(rows[0].origin), small=True)
    texts = "; ".join(_words(m) for m in rows)
    figure, alt = charts.against_time(rows, palette), f"Error against time. {texts}."
    event = page.figure(figure, _KEY, alt, on_select="rerun", selection_mode="points")
    points = event["selection"]["points"] if event else []
    picked = rows[points[0]["curve_number"]] if points else rows[-1]
    shown = {m.label: m.row.json["accuracy"]["quantiles"] for m in (rows[0], picked)}
    halves = (f"{label}: half below {q['0.5']:.1e}, all below {q['1']:.1e}" for label, q in shown.items())
    ends = "; ".join(halves)
    figure = charts.distribution(shown, palette)
    page.figure(figure, "compare.error.distribution", f"Distribution of errors. {ends}.")
    on_cpu = "" if picked.is_gpu else " Times are NumPy's; errors are e4m3's, with float32 sums."
    st.caption(f"{picked.case}. {ends}. Click a point above for its distribution of errors.{on_cpu}")


def _words(m: Measurement) -> str:
    accuracy = m.row.json["accuracy"]
    return f"{m.label}: {seconds_text(m.seconds)}, RMSE {accuracy['rmse']:.1e}, Σ|o| {accuracy['bias']:+.2%}"


def _verdict(rows: Sequence[Measurement]) -> str:
    """The smallest error in 8 bits beside the error in 16 bits."""
    plain = [m for m in rows if not m.problem.scales]
    scaled = (m for m in rows if m.problem.scales)
    best = min(scaled, key=lambda m: m.row.json["accuracy"]["rmse"], default=None)
    if best is None or not plain:
        return f"{len(rows)} precisions are measured."
    ours, theirs = (m.row.json["accuracy"] for m in (best, plain[0]))
    needles = ""
    if ours["found"] is not None:
        needles = f" It finds {ours['found']:.0%} of the needles, {plain[0].label} {theirs['found']:.0%}."
    return (
        f"{best.label} has the smallest error in 8 bits: RMSE {ours['rmse']:.1e}, {plain[0].label} "
        f"{theirs['rmse']:.1e}; it takes {best.seconds / plain[0].seconds:.2f}× the time.{needles}"
    )
