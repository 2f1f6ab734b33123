"""The page Doctor."""

from __future__ import annotations

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.model import doctor
from cufa.dashboard.state import Controls
from cufa.doctor import Check, Status

_SIGNS = {Status.PROBLEM: ":red[✗ problem]", Status.ABSENT: "– not here", Status.OK: ":green[✓ ok]"}
"""Labels by status, in the order of the table."""


_SPINNER = "Checking driver, CuPy, NVRTC and caches, and making one call…"
_examine = st.cache_data(ttl=600, show_spinner=_SPINNER)(doctor.examine)


def show(controls: Controls) -> None:
    """Each check with its fix; problems first."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom"):
        shown = controls.choice(
            "show", "Show", {"all": "everything", "open": "only what is missing or wrong"}, segmented=True
        )
        st.button("Check again", icon=":material/refresh:", on_click=_examine.clear)
    checks = _examine()
    page.verdict(*_verdict(checks))
    rows = sorted(checks, key=lambda c: list(_SIGNS).index(c.status))
    rows = [c for c in rows if shown == "all" or c.status is not Status.OK]
    if rows:
        page.table(
            [{"": _SIGNS[c.status], "check": f"**{c.name}**", "result": c.detail, "fix": c.fix} for c in rows]
        )
    with st.expander("As text, for a bug report", icon=":material/content_copy:"):
        st.code(doctor.as_text(checks), language=None)


def _verdict(checks: list[Check]) -> tuple[str, str]:
    names = {status: ", ".join(c.name for c in checks if c.status is status) for status in Status}
    if names[Status.PROBLEM]:
        return f"{sum(c.status is Status.PROBLEM for c in checks)} to fix: {names[Status.PROBLEM]}.", "alarm"
    if names[Status.ABSENT]:
        return f"No problem. Not installed here, and not needed for the rest: {names[Status.ABSENT]}.", "good"
    return "All checks pass.", "good"
