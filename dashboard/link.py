"""The address of a page: what it says when the page is opened, and what it is made to say when the page is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

NONE = "none"
_UNKNOWN = "the link has {names}, which is no control of this page; it is left out."


def said(value: Any) -> str:
    """A control's value as a link has it."""
    return NONE if value is None else str(value)


def distinct(options: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Words by value. A browser tells an option by its words: two runs of one second are numbered, the newer
    one, which stands before the other, with the higher number."""
    words = dict(options) if isinstance(options, Mapping) else {x: x for x in options}
    count: dict[str, int] = {}
    for value, words_of in reversed(words.items()):
        count[words_of] = count.get(words_of, 0) + 1
        if count[words_of] > 1:
            words[value] = f"{words_of} ({count[words_of]})"
    return words


class Link:
    """Query parameters by name, in the order in which controls were created."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What it asked for and could not have, and what is shown instead."""
        self._names: set[str] = set()
        self._shown: dict[str, str] = {}
        self._finished = False

    def add(self, name: str) -> str | None:
        """A control of the page: what the link says of it. None: nothing, or it is a fragment that runs again, whose
        link is the page's own."""
        is_new = name not in self._names
        self._names.add(name)
        return st.query_params.get(name) if is_new else None

    def hold(self, name: str) -> None:
        """Keep what it says of a control that comes later."""
        if name in st.query_params:
            self._names.add(name)
            self._shown[name] = st.query_params[name]

    def show(self, name: str, value: str | None) -> None:
        """Let it say this of a control; None: nothing."""
        self._shown.pop(name, None)
        if value is not None:
            self._shown[name] = value

    def finish(self) -> None:
        """All controls exist."""
        unknown = [name for name in st.query_params if name not in self._names]
        if unknown:
            self.notices.append(_UNKNOWN.format(names=", ".join(repr(name) for name in unknown)))
        self._finished = True

    def write(self) -> None:
        """To the address bar, once all controls exist."""
        if self._finished and st.query_params.to_dict() != self._shown:
            st.query_params.from_dict(self._shown)
