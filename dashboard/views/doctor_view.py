"""The page Doctor."""

from __future__ import annotations

import html

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.model import doctor
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.doctor import Check, Status

_SIGNS = {Status.OK: "✓", Status.ABSENT: "–", Status.PROBLEM: "✗"}
_WORDS = {Status.OK: "ok", Status.ABSENT: "not here", Status.PROBLEM: "problem"}

_STYLE = """
<style>
.cufa-checks {{ display: grid; grid-template-columns: 2.2rem max-content 1fr; }}
.cufa-checks > div {{ padding: .5rem .8rem .5rem 0; border-top: 1px solid {grid}; overflow-wrap: anywhere; }}
.cufa-checks .sign {{ font-weight: 700; text-align: center; }}
.cufa-checks .name {{ font-weight: 600; }}
.cufa-checks .ok {{ color: {measured}; }} .cufa-checks .absent {{ color: {muted}; }}
.cufa-checks .problem {{ color: {alarm}; }}
.cufa-checks .fix {{ color: {muted}; display: block; }}
.cufa-checks .fix b {{ color: {text}; }}
</style>
"""


@st.cache_data(ttl=600, show_spinner="Looking at driver, CuPy, NVRTC, caches, and making one call…")
def _examine() -> list[Check]:
    return doctor.examine()


def show(controls: Controls, palette: Palette) -> None:
    """Every check with its fix; problems first."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom"):
        shown = controls.choice(
            "show", "Show", {"all": "everything", "open": "only what is missing or wrong"}, segmented=True
        )
        st.button("Look again", icon=":material/refresh:", on_click=_examine.clear)
    checks = _examine()
    page.verdict(*_verdict(checks))
    order = [Status.PROBLEM, Status.ABSENT, Status.OK]
    kept = [c for c in checks if shown == "all" or c.status is not Status.OK]
    lines = "".join(_line(c) for c in sorted(kept, key=lambda c: order.index(c.status)))
    st.html(_STYLE.format(**vars(palette)) + f'<div class="cufa-checks">{lines}</div>')
    with st.expander("As text, for a bug report", icon=":material/content_copy:"):
        st.code(doctor.as_text(checks), language=None)


def _verdict(checks: list[Check]) -> tuple[str, str]:
    number = doctor.counts(checks)
    if number[Status.PROBLEM]:
        names = ", ".join(c.name for c in checks if c.status is Status.PROBLEM)
        return f"{number[Status.PROBLEM]} to fix: {names}.", "alarm"
    if number[Status.ABSENT]:
        names = ", ".join(c.name for c in checks if c.status is Status.ABSENT)
        return f"No problem. Not here, and not needed for the rest: {names}.", "good"
    return "All is well.", "good"


def _line(check: Check) -> str:
    words = "Fix" if check.status is Status.PROBLEM else "To have it"
    fix = f'<span class="fix"><b>{words}:</b> {_code(check.fix)}</span>' if check.fix else ""
    return (
        f'<div class="sign {check.status}" role="img" aria-label="{_WORDS[check.status]}">'
        f"{_SIGNS[check.status]}</div>"
        f'<div class="name">{html.escape(check.name)}</div>'
        f"<div>{_code(check.detail)}{fix}</div>"
    )


def _code(text: str) -> str:
    """`Backticks` become code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
