"""The page Roofline: why a measured kernel is not faster, and what to try."""

from __future__ import annotations

import streamlit as st

from cufa.build.variants import Variant
from cufa.dashboard import page
from cufa.dashboard.model import needs, why
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.sentences import share
from cufa.dashboard.views.occupancy_view import compiler


def show(row: Measurement, chosen: Evidence) -> None:
    """Advice for one row of the machine, the largest gain first."""
    if row.kernel is None:
        return
    page.header("Why, and what to try")
    variant = _variant(row, chosen)
    built = None if variant is None else compiler().known(variant)
    entries = {x.name: x for x in built.entries} if built else {}
    entry = entries.get(variant.spec.entry) if variant else None
    advice = why.advice(why.facts_of(row, chosen, entry))
    where = f"{row.label}, {row.problem}; {row.regime} on {row.machine}, {row.recorded[:10]}"
    if not advice:
        page.verdict(f"No rule finds a cause that costs 1% or more: {where}.", small=True)
    else:
        first = advice[0]
        gain = "" if first.gain is None else f", at most {share(first.gain)} of the time"
        page.verdict(f"{first.cause}{gain}: {first.attempt}", "", first.origin, small=True)
        gains = ["not known" if x.gain is None else share(x.gain) for x in advice]
        lines = zip(advice, gains, strict=True)
        page.table(
            [
                {"cause": x.cause, "at most": n, "from": f"{x.figure} ({x.origin})", "try": x.attempt}
                for x, n in lines
            ]
        )
    st.caption(
        f"{where}. **At most**: the share of the measured time that is saved if the cause disappears and nothing takes "
        "its place; the shares do not add up."
    )
    if variant is not None and built is None and compiler().missing is None:
        _offer(variant)


def _variant(row: Measurement, chosen: Evidence) -> Variant | None:
    """The build of the row; None if this version has no such tiles, or on a CPU."""
    device, subject = needs.device_of(chosen), row.subject
    if device is None or subject.spec is None or subject.config is None or not subject.config.num_warps:
        return None
    return Variant(subject.spec, subject.config, row.problem, device.arch)


def _offer(variant: Variant) -> None:
    help_text = "Occupancy and spills follow from the compiled kernel: some seconds, without a GPU."
    label = "Compile it: registers and spills"
    if st.button(label, key="roofline.why", icon=":material/build:", help=help_text):
        with st.spinner("Compiling the kernel…"):
            compiler().get(variant)
        st.rerun()
