"""The page Roofline."""

from __future__ import annotations

import streamlit as st

from cufa.bench.suites import SUITES
from cufa.commands.common import seconds_text
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import roofline as charts
from cufa.dashboard.model import evidence, work
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import mask_control


def show(controls: Controls, palette: Palette) -> None:
    """The whole page; where there is no evidence, what would make some."""
    found = _load()
    if not found:
        return
    by_name = {e.name: e for e in found}
    with page.control_box():
        left, middle, right = page.fields(1.8, 2.2, 1.6)
        with left:
            words = {e.name: e.where for e in found}
            chosen = by_name[controls.choice("machine", "Measured on", words, local=True)]
        suites = dict.fromkeys(r.suite for r in chosen.rows)
        with middle:
            words = {name: SUITES[name].title if name in SUITES else name for name in suites}
            suite = controls.choice("suite", "Shapes", words, local=True)
        rows = [r for r in chosen.rows if r.suite == suite]
        regimes = list(dict.fromkeys(str(r.regime) for r in rows))
        with right:
            regime = controls.choice("regime", "Regime", regimes, segmented=True, local=True)
        rows = [r for r in rows if r.regime == regime]
        mask = mask_control.choose_among(controls, (r.problem for r in rows))
        rows = [r for r in rows if mask in ("", r.mask)]
        labels = list(dict.fromkeys(r.label for r in rows))
        shown = controls.several("show", "Kernels", labels, labels, local=True)
    rows = [r for r in rows if r.label in shown]
    if not rows:
        page.verdict("Nothing is left to draw: choose at least one kernel.", "warn")
        return
    _show_roofline(chosen, rows, palette)
    _show_needs(controls, rows, palette)


def _load() -> list[Evidence]:
    """Evidence with ceilings; says so when there is none."""
    try:
        found = [e for e in evidence.load() if e.limits is not None and e.rows]
    except ValueError as error:
        page.verdict("The recorded evidence cannot be read.", "alarm")
        st.error(str(error), icon=":material/broken_image:")
        return []
    if not found:
        page.verdict("No GPU evidence is recorded in this version yet.", "warn")
        st.markdown(
            "A roofline needs ceilings and times from one machine. On a machine with a GPU, from a "
            "checkout:\n\n```\nmake gpu-evidence\n```\n\n"
            "It measures the ceilings (memory, tensor cores, exponentials) and every kernel, and writes "
            "`cufa/records/<gpu>.json`, which this page draws, here and everywhere else."
        )
    return found


def _show_roofline(chosen: Evidence, rows: list[Measurement], palette: Palette) -> None:
    assert chosen.limits is not None
    best = charts.closest([r for r in rows if r.kernel] or rows)
    page.verdict(
        f"{best.label} comes closest: {best.speed}, {best.of_ceiling:.0%} of what "
        f"{best.limit_allows} ({best.problem}; {best.regime}).",
        "",
        "recorded",
    )
    kinds = list(chosen.limits.flops)
    products = [p for p in kinds if any(_product(r) == p for r in rows)] or kinds[:1]
    lines = [
        f"{r.label}, {r.problem}: {r.speed}, {r.of_ceiling:.0%} of the limit by {r.ceiling}" for r in rows
    ]
    alt = f"Roofline of {chosen.where}, {len(rows)} points. " + "; ".join(lines[:40]) + "."
    roofline = charts.roofline(rows, chosen.limits, products, palette, read_bytes=chosen.read_bytes)
    page.figure(roofline, "roofline", alt)
    counted = {work.flops_per_score(r.problem) // r.problem.head_dim for r in rows}
    st.caption(
        f"Recorded on **{chosen.where}**, {rows[0].regime}: {rows[0].how} "
        "Ceilings were measured there in the same run: a large copy, or for what only reads the fastest reading, "
        "products from registers, exponentials. Traffic is every operand once; FLOP are "
        f"{sentences.listed([str(n) for n in sorted(counted)])} · head dim for each score that the mask lets through."
        + (" Open marks are masked." if len({r.problem.mask_kind == "full" for r in rows}) > 1 else "")
    )
    stale = [k for k in chosen.stale if any(r.kernel == k for r in rows)]
    if stale:
        text = f"Sources have changed since this was recorded: {', '.join(stale)}."
        st.warning(text, icon=":material/history:")


def _show_needs(controls: Controls, rows: list[Measurement], palette: Palette) -> None:
    """What limits one shape, resource by resource, where that was derived with the measurement."""
    found = {f"{r.label}, {r.problem}": r for r in rows if r.needs}
    if not found:
        return
    page.header("What limits it")
    default = max(found, key=lambda name: (found[name].problem.mask_kind != "full", found[name].tflops))
    row = found[controls.choice("shape", "Kernel and shape", list(found), default, local=True)]
    page.verdict(_needs_verdict(row), tag="recorded", small=True)
    alt = f"Bars of the time that each resource needs, against {seconds_text(row.seconds)} measured: "
    alt += ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in row.needs.items()) + "."
    page.figure(charts.needs_figure(row, palette), "roofline.needs", alt)
    st.caption(
        "Each bar: what the tiles ask of one resource, over its measured ceiling, were it the only one. "
        "**Busiest block**: the longest of them times the imbalance between SMs. **No overlap**: products, "
        "then exponentials. The prediction is made of these alone."
    )


_NEEDS = {
    "products": "products alone need",
    "power": "products at the clock that power leaves need",
    "exponentials": "exponentials alone need",
    "shared memory": "shared memory alone needs",
    "memory": "memory alone needs",
}


def _needs_verdict(row: Measurement) -> str:
    limit = max((name for name in row.needs if name in _NEEDS), key=lambda name: row.needs[name])
    least = row.needs[limit]
    text = f"{row.label} takes {seconds_text(row.seconds)}; {_NEEDS[limit]} {seconds_text(least)}"
    busiest = row.needs.get("busiest block", 0.0)
    uneven = (
        f"; waiting for the busiest SM makes it {seconds_text(busiest)}" if busiest > 1.02 * least else ""
    )
    return f"{text}, {least / row.seconds:.0%} of it{uneven}."


def _product(row: Measurement) -> str:
    return row.problem.dtype if row.problem.dtype in ("float16", "bfloat16") else "tf32"
