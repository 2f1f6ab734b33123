"""The page Roofline: the time that each resource needs for one shape."""

from __future__ import annotations

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import roofline as charts
from cufa.dashboard.charts.work import si
from cufa.dashboard.model import needs
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.measure import additions
from cufa.measure.costs import Cost

_BINDING = {
    "products": "products alone need",
    "power": "products at the recorded clock, which power limits, need",
    "exponentials": "exponentials alone need",
    "shared memory": "shared memory alone needs",
    "memory": "memory alone needs",
    "L2 additions": "additions in the L2 cache, at a rate measured by hand, alone need",
}
_WAITS = 1.02


def show(
    controls: Controls, rows: list[Measurement], asked: Subject | None, chosen: Evidence, palette: Palette
) -> Measurement:
    """Time needed by each resource, and the kernel's counters, for a chosen row. Returns the row."""
    derived = [m for m in (needs.with_needs(r, chosen) for r in rows) if m.needs]
    by_name = {f"{r.label}, {r.problem}": r for r in derived}
    if not by_name:
        return max(rows, key=lambda r: r.kernel is not None)
    page.header("Limits")

    def interest(name: str) -> tuple[bool, bool, bool, float]:
        m, of = by_name[name], asked or Subject(by_name[name].problem)
        return m.problem == of.problem, m.kernel == of.kernel, m.problem.mask_kind != "full", m.tflops

    default = max(by_name, key=interest)
    row = by_name[controls.choice("shape", "Kernel and shape", list(by_name), default, local=True)]
    text, tag = _verdict(row), page.origin_tag(row.origin)
    page.verdict(text, tag="" if "by hand" in text else tag, small=True)
    alt = f"Bars of the time that each resource needs, against {seconds_text(row.seconds)} {tag}: "
    alt += ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in row.needs.items()) + "."
    page.figure(charts.needs_figure(row, palette, tag), "roofline.needs", alt)
    st.caption(_caption(row, chosen))
    cost = needs.cost_of(row, chosen)
    if cost is not None:
        _show_cost(cost, row, chosen)
    return row


def _verdict(row: Measurement) -> str:
    limit = max((name for name in row.needs if name in _BINDING), key=lambda name: row.needs[name])
    least = row.needs[limit]
    text = f"{row.label} takes {seconds_text(row.seconds)}; {_BINDING[limit]} {seconds_text(least)}"
    busiest = row.needs.get("busiest block", 0.0)
    waits = busiest > _WAITS * least
    uneven = f"; waiting for the busiest SM adds up to {seconds_text(busiest)}" if waits else ""
    return f"{text}, {least / row.seconds:.0%} of it{uneven}."


def _caption(row: Measurement, chosen: Evidence) -> str:
    text = (
        "Each bar: the kernel's counter of one resource ÷ its ceiling; **products** counts whole tiles, "
        "while the limit above counts visible scores only. **Busiest block**: the longest bar times the "
        "imbalance between SMs. **No overlap**: products, then exponentials, then the threads' own accesses to shared "
        "memory. Ceiling of shared memory: the recorded rate of reads, else 128 bytes per clock and SM."
    )
    if row.predicted is not None:
        text += " The prediction uses the same counters."
    if "passes" in row.needs:
        text += " **Passes**: the launches before and after, which only move device memory."
    if row.operation.name != "backward":
        return text
    rate = additions.of_card(chosen.device)
    if rate is None:
        return (
            f"{text} The rate of additions in the L2 cache of {chosen.device} is not measured: dQ has no bar."
        )
    return f"{text} **L2 additions**: float32 additions to dQ, at {rate}, if the active dQ stays in the L2 cache."


def _show_cost(cost: Cost, row: Measurement, chosen: Evidence) -> None:
    assert chosen.limits is not None
    balance = needs.shared_rate(chosen) / (chosen.limits.flops[row.problem.dtype] / 2)
    each = cost.shared / cost.products
    page.verdict(
        f"Shared memory moves {each:.4f} bytes per product, {'more' if each > balance else 'fewer'} than the "
        f"{balance:.4f} at which both take equal time at their ceilings.",
        tag="predicted",
        small=True,
    )
    lines: list[tuple[str, int, str]] = [
        ("multiply-adds", cost.products, ""),
        ("exponentials and reciprocals", cost.exponentials, ""),
        ("shared memory, by tensor cores and copy engine", cost.shared - cost.own_shared, "B"),
        ("shared memory, by threads", cost.own_shared, "B"),
        ("read from the L2 cache", cost.read, "B"),
        ("written to the L2 cache", cost.written, "B"),
        ("of these, launches before and after", cost.passes, "B"),
        ("added in the L2 cache, float32", cost.added, "B"),
    ]
    table = [
        {"counted": name, "of the call": si(count, unit), "per product": f"{count / cost.products:.4f}"}
        for name, count, unit in lines
        if count
    ]
    st.dataframe(table, hide_index=True, height="content")
