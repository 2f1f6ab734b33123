"""The query parameters of a page: read when the page opens, written when the page is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

NONE = "none"
_UNKNOWN = "the link has {names}, but this page has no such control; the page ignores it."


def said(value: Any) -> str:
    """A control's value in a link."""
    return NONE if value is None else str(value)


def several(values: Iterable[str]) -> str:
    """Several values in a link. A comma separates values: commas of names become semicolons."""
    return ",".join(x.replace(",", ";") for x in values)


def distinct(options: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Words by value. A browser identifies an option by its words: equal words (two runs of one second) get numbers,
    the newer run, which comes first, the higher number."""
    words = dict(options) if isinstance(options, Mapping) else {x: x for x in options}
    count: dict[str, int] = {}
    for value, words_of in reversed(words.items()):
        count[words_of] = count.get(words_of, 0) + 1
        if count[words_of] > 1:
            words[value] = f"{words_of} ({count[words_of]})"
    return words


class Link:
    """Query parameters by name, in the order in which controls were created."""

    def __init__(self, page: str) -> None:
        self._written = f"link.{page}"
        self.notices: list[str] = []
        """Impossible parameters, and the values shown instead."""
        self._names: set[str] = set()
        self._shown: dict[str, str] = {}
        self._finished = False

    def add(self, name: str) -> str | None:
        """Register a control; returns its parameter. None: not in the link, or a rerun of a fragment, whose link the
        page itself has written."""
        is_new = name not in self._names
        self._names.add(name)
        return st.query_params.get(name) if is_new else None

    def hold(self, name: str) -> None:
        """Keep the parameter of a control that a later run creates."""
        if name in st.query_params:
            self._names.add(name)
            self._shown[name] = st.query_params[name]

    def show(self, name: str, value: str | None) -> None:
        """Set the parameter of a control; None removes it."""
        self._shown.pop(name, None)
        if value is not None:
            self._shown[name] = value

    def finish(self) -> None:
        """All controls exist."""
        own = {
            *self._names,
            *st.session_state.get(self._written, ()),
        }  # a control that went leaves its parameter
        unknown = [name for name in st.query_params if name not in own]
        if unknown:
            self.notices.append(_UNKNOWN.format(names=", ".join(repr(name) for name in unknown)))
        self._finished = True

    def write(self) -> None:
        """Write the parameters to the address bar, once all controls exist."""
        if self._finished and st.query_params.to_dict() != self._shown:
            st.query_params.from_dict(self._shown)
        if self._finished:
            st.session_state[self._written] = list(self._shown)
