"""Pauses of a page, in which the browser draws what it has been sent.

Streamlit's client puts whatever has reached it on the screen in one go, and Plotly draws a figure before that go is
over: a sentence that arrives together with a figure is seen when the figure is drawn, and the first figure when all
are. So a page waits a moment after its first sentence; and a visitor's first page after its first figure, while the
browser still runs the script that draws it.
"""

from __future__ import annotations

import time

import streamlit as st

SENTENCE, FIGURE, DESCRIPTION = "sentence", "figure", "description"

_LASTING = {SENTENCE: 0.05, FIGURE: 0.35, DESCRIPTION: 0.2}
"""Seconds: what a browser needs to begin with what it has got. It is busy for longer, so that nothing is lost.

The client knows that the figure's script is there when it has drawn something in its place; for the next 0.3 s it puts
the figure there only together with something else that arrives, which is the figure's description.
"""
_NEXT = {FIGURE: DESCRIPTION}
_DUE, _VISITED = "pace.due", "pace.visited"

_is_served = False


def begin() -> None:
    """Pages are served to browsers from now on; anyone else who runs them does not wait."""
    global _is_served
    _is_served = True


def begin_page() -> None:
    """A page starts to run."""
    st.session_state[_DUE] = SENTENCE if _VISITED in st.session_state else FIGURE
    st.session_state[_VISITED] = True


def sent(what: str) -> None:
    """The page has sent a part of this kind: let the first be drawn that a visitor waits for."""
    if _is_served and st.session_state.get(_DUE) == what:
        st.session_state[_DUE] = _NEXT.get(what)
        time.sleep(_LASTING[what])
