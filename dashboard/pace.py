"""Pauses of a page that let the browser draw the first elements.

Streamlit's client renders all received elements in one pass, and Plotly draws its figures within that pass: a sentence
that arrives with a figure becomes visible after the figure, the first figure after the last one. Therefore a page
pauses after its first sentence, and a visitor's first page pauses after its first figure.
"""

from __future__ import annotations

import time

import streamlit as st

SENTENCE, FIGURE, DESCRIPTION = "sentence", "figure", "description"

_LASTING = {SENTENCE: 0.05, FIGURE: 0.35, DESCRIPTION: 0.2}
"""Seconds until a browser starts to draw; it then stays busy, so a pause costs nothing.

For 0.3 s after loading the figure's script, the client shows the figure only when another element arrives: the figure's
description.
"""
_NEXT = {FIGURE: DESCRIPTION}
_DUE, _VISITED = "pace.due", "pace.visited"

_is_served = False


def begin() -> None:
    """Pages are served to browsers from now on. Pages that run elsewhere do not pause."""
    global _is_served
    _is_served = True


def begin_page() -> None:
    """A page starts to run."""
    st.session_state[_DUE] = SENTENCE if _VISITED in st.session_state else FIGURE
    st.session_state[_VISITED] = True


def sent(kind: str) -> None:
    """The page has sent an element of this kind: pause if it is the first one."""
    if _is_served and st.session_state.get(_DUE) == kind:
        st.session_state[_DUE] = _NEXT.get(kind)
        time.sleep(_LASTING[kind])
