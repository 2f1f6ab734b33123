"""The pages Run and History: a download that repeats measurements, as `cufa repro` writes it."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands import repro
from cufa.dashboard import page
from cufa.dashboard.model.measurements import Measurement


def show(measured: Sequence[Measurement], name: str) -> None:
    """Measurements of one run and regime. ``name``: "run", or the letter of a measurement on History."""
    try:
        text = repro.program([m.row for m in measured], measured[0].environment)
    except (KeyError, TypeError, ValueError) as error:
        st.caption(f"No Python file repeats {measured[0].label}: {error}")
        return
    what = "this shape" if name == "run" else name
    file = f"cufa-{measured[0].id.replace('@', '-').replace(':', '')}.py"
    page.download(
        f"Python file that repeats {what}", text, file, "text/x-python", f"repro.{name}", "replay", type="tertiary",
        help="Runs with cufa and CuPy, or with NumPy (`--cpu`); `--once LABEL` launches once, for a profiler.",
    )  # fmt: skip
