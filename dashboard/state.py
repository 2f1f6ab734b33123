"""Controls that live in the address bar: a view is shared by copying its link.

Each control of a page is mirrored in one query parameter. The link omits a control at its default, unless the default
depends on this machine (``local``): a link shows the same view on every machine. If a link asks for an impossible
value, the control falls back to its default and the page says so.

Streamlit keeps the values (``persist_state``) but does not write the links. With ``bind="query-params"`` a link would
carry the words of an option instead of its name and omit local defaults, and pages would share widget keys.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa.dashboard.link import NONE, Link, distinct, said, several

__all__ = ["Controls", "Place", "said"]

Number = TypeVar("Number", int, float)
Read = TypeVar("Read")
Place: TypeAlias = DeltaGenerator | None
"""The container of a control; None: the current one."""

_SAME = object()
_ANY = "any"
_KEPT: Any = {"persist_state": "session"}
"""A page that is left and visited again, or a control that comes back, keeps its values."""
_PAGE = "state.page"
_MOST_NAMED = 40
"""Options that a refusal lists; recorded rows alone are thousands."""


class Controls:
    """The controls of one page. Create this object first, then each control in page order, then call
    :meth:`finish`."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._link = Link(page)
        self.refused: list[str] = []
        """Invalid values of fields, in words; the page shows the nearest valid value."""
        self._prefix = ""
        self._entered = st.session_state.get(_PAGE) != page
        st.session_state[_PAGE] = page
        self._box = st.container()

    def second(self, prefix: str) -> Controls:
        """The same controls for a second subject on the page; their names in links begin with ``prefix``."""
        controls = copy.copy(self)
        controls._prefix = self._prefix + prefix
        return controls

    def integer(
        self, name: str, label: str, default: int, low: int, high: int, *,
        at: Place = None, step: int = 1, slider: bool = False, help: str | None = None,
    ) -> int:  # fmt: skip
        """A whole number from low to high, as a field or a ``slider``."""
        parse, wanted = _whole(low, high, step if slider else 1)
        default = min(max(default, low), high)
        key = self._settle(name, default, parse, wanted)
        options: Any = {"step": step, "help": help, "key": key, **_KEPT}
        with _inside(at):
            if slider:
                # The bounds may have moved since the last run.
                st.session_state[key] = min(max(int(st.session_state[key]), low), high)
                got = int(st.slider(label, low, high, **options))
            else:
                typed = int(st.number_input(label, value=default, **options))
                got = self._within(label, typed, low, high, wanted)
        self._show(name, got, default)
        return got

    def _within(self, label: str, value: Number, low: Number, high: Number, wanted: str) -> Number:
        """The value, or the nearest valid one. (With bounds of its own, a field turns red without a message and does
        not send its value to the server.)"""
        nearest = min(max(value, low), high)
        if nearest != value:
            self.refused.append(f"{label} is {value:,}, which is not {wanted}; the page shows {nearest:,}.")
            st.markdown(f":red[Not {wanted}.]")
        return nearest

    def optional(
        self, name: str, label: str, default: Number | None, low: Number, high: Number, *,
        at: Place = None, step: Number = 1, help: str | None = None,
    ) -> Number | None:  # fmt: skip
        """A number from low to high of their type, or None: an empty field, "none" in the link."""
        kind = type(low)

        def parse(text: str) -> Number | None:
            if text == NONE:
                return None
            if not low <= kind(text) <= high:
                raise ValueError
            return kind(text)

        sort = "whole number" if kind is int else "number"
        wanted = f"a {sort} from {low:,} to {high:,}, or {NONE}"
        key = self._settle(name, default, parse, wanted)
        options: Any = {"step": step, "help": help, "key": key, "placeholder": NONE, **_KEPT}
        with _inside(at):
            got = st.number_input(label, value=None, format=None if kind is int else "%g", **options)
            value = None if got is None else self._within(label, kind(got), low, high, wanted)
        self._show(name, said(value), said(default))
        return value

    def choice(
        self, name: str, label: str, options: Mapping[str, str] | Sequence[str], default: str | None = None, *,
        at: Place = None, segmented: bool = False, local: bool = False, help: str | None = None,
    ) -> str:  # fmt: skip
        """One option. ``options`` maps its name in the link to its words on the screen."""
        words = distinct(options)
        fallback = default if default in words else next(iter(words))

        def parse(text: str) -> str:
            if text not in words:
                raise ValueError
            return text

        key = self._settle(name, fallback, parse, f"one of {_named(words)}")
        if st.session_state[key] not in words:  # the options changed
            st.session_state[key] = fallback
            st.session_state.pop(f"asked.{key}", None)
        shown: Any = {"format_func": words.get, "help": help, "key": key, **_KEPT}
        with _inside(at):
            if segmented:
                got = st.segmented_control(label, list(words), required=True, wrap=True, **shown)
            else:
                got = st.selectbox(label, list(words), **shown)
        chosen = str(got) if got is not None else fallback
        self._show(name, chosen, fallback, local)
        return chosen

    def several(
        self, name: str, label: str, options: Mapping[str, str] | Sequence[str], default: Sequence[str], *,
        at: Place = None, local: bool = False, help: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Any number of options, comma-separated in the link."""
        words = distinct(options)
        default = [x for x in default if x in words]

        def parse(text: str) -> list[str]:
            by_link = {several([x]): x for x in words}
            return [by_link[x] for x in text.split(",") if x]

        wanted = f"any of {_named(words)}, separated by commas"
        key = self._settle(name, default, parse, wanted, among=tuple(words))
        st.session_state[key] = [x for x in st.session_state[key] if x in words]
        with _inside(at):
            got = st.multiselect(
                label, list(words), format_func=words.__getitem__, help=help, key=key, **_KEPT
            )
        self._show(name, several(got), several(default), local)
        return list(got)

    def flag(
        self, name: str, label: str, default: bool = False, *, at: Place = None, help: str | None = None
    ) -> bool:
        """Yes or no; 1 or 0 in the link."""
        key = self._settle(name, default, lambda text: {"1": True, "0": False}[text], "1 or 0")
        with _inside(at):
            got = bool(st.toggle(label, help=help, key=key, **_KEPT))
        self._show(name, str(int(got)), str(int(default)))
        return got

    def text(
        self, name: str, label: str, default: str, read: Callable[[str], Read], write: Callable[[Read], str],
        wanted: str, help: str,
    ) -> Read:  # fmt: skip
        """The value that ``read`` makes of a text, which raises ValueError with a reason. An unreadable text stays in
        the field while the page shows the last readable one. The link has the text of ``write``."""

        def parse(text: str) -> str:
            read(text)
            return text

        key = self._settle(name, default, parse, wanted)
        text = str(st.text_area(label, height=68, help=help, key=key, **_KEPT))
        try:
            value, shown = read(text), text
        except ValueError as error:
            shown = st.session_state.get(f"read.{key}", default)
            value = read(shown)
            self.refused.append(f"{label}: {error}. The page shows the last valid text.")
            st.markdown(f":red[{error}.]")
        st.session_state[f"read.{key}"] = shown
        self._show(name, write(value), write(read(default)))
        return value

    def kept(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number of a figure, which changes it by :meth:`set`."""
        key = self._settle(name, default, *_whole(low, high))
        nearest = min(max(int(st.session_state[key]), low), high)
        self._show(name, nearest, default)
        return nearest

    def carried(self, name: str, parse: Callable[[str], Any], wanted: str) -> Any:
        """The parsed value of a link parameter without a widget, which stays in the link; None if absent."""
        key = self._settle(name, "", lambda text: text if parse(text) is not None else "", wanted)
        text = st.session_state[key]
        self._show(name, text, "")
        return parse(text) if text else None

    def hold(self, *names: str) -> None:
        """Keep the link's parameters of controls that a later run creates."""
        for name in names:
            self._link.hold(name)

    def asked(self, name: str) -> str:
        """The value of a control before its creation: from the session, or from the link."""
        held = st.session_state.get(self._key(name))
        of_link = st.query_params.get(self._prefix + name, held or "")
        return str(of_link if self._entered or held is None else held)

    def set(self, name: str, value: Any) -> None:
        """Give a control a new value: in a callback, or before its creation."""
        self.put(self._page, self._prefix + name, value)

    @staticmethod
    def put(page: str, name: str, value: Any) -> None:
        """:meth:`set` for a callback, which runs before the page's controls exist."""
        st.session_state[f"{page}.{name}"] = value
        st.session_state[f"asked.{page}.{name}"] = _ANY

    @staticmethod
    def follow(parameters: Mapping[str, str]) -> None:
        """Show another link of this page; for a callback."""
        st.query_params.from_dict(parameters)
        st.session_state.pop(_PAGE, None)

    def notice(self, text: str) -> None:
        """Show a message above the page: an impossible choice, and the value shown instead."""
        self._link.notices.append(text)

    def finish(self) -> None:
        """Show all messages and write the link. Call this method once all controls exist."""
        self._link.finish()
        for reason in self.refused:
            self._box.error(reason, icon=":material/error:")
        if self._link.notices:
            text = "  \n".join(n[0].upper() + n[1:] for n in self._link.notices)
            self._box.warning(text, icon=":material/link_off:")
        self.write_link()

    def write_link(self) -> None:
        """Write the link; call this at the end of a fragment with controls, which reruns without :meth:`finish`."""
        self._link.write()

    def _key(self, name: str) -> str:
        return f"{self._page}.{self._prefix}{name}"

    def _settle(
        self, name: str, default: Any, parse: Callable[[str], Any], wanted: str, among: object = _ANY
    ) -> str:
        """Give the widget its value: from the link of this visit, from the last visit, or the default. A control
        without a choice by the visitor (``among`` these options) follows its default."""
        full = self._prefix + name
        text = self._link.add(full)
        key = self._key(name)
        former = st.session_state.get(f"default.{key}", _SAME)
        st.session_state[f"default.{key}"] = default
        is_known = key in st.session_state
        is_asked = f"asked.{key}" in st.session_state and st.session_state[f"asked.{key}"] in (_ANY, among)
        if not is_known or (not is_asked and former is not _SAME and st.session_state[key] == former):
            st.session_state[key] = default
        if text is not None and (self._entered or not is_known):
            try:
                st.session_state[key] = parse(text)
                st.session_state[f"asked.{key}"] = among
            except (ValueError, KeyError):
                st.session_state[key] = default
                self.notice(
                    f"the link asks for {full} = {text!r}, which is not {wanted}; "
                    + (f"showing {_worded(default)} instead." if default != "" else "the page ignores it.")
                )
        return key

    def _show(self, name: str, value: Any, default: Any, local: bool = False) -> None:
        self._link.show(self._prefix + name, str(value) if local or value != default else None)


def _inside(place: Place) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if place is None else place


def _whole(low: int, high: int, step: int = 1) -> tuple[Callable[[str], int], str]:
    """A parser of whole numbers, and the accepted values in words."""

    def parse(text: str) -> int:
        if int(text) not in range(low, high + 1, step):
            raise ValueError
        return int(text)

    steps = f" in steps of {step:,}" if step > 1 else ""
    return parse, f"a whole number from {low:,} to {high:,}{steps}"


def _named(words: Collection[str]) -> str:
    return ", ".join(words) if len(words) <= _MOST_NAMED else f"the {len(words):,} options"


def _worded(value: Any) -> str:
    """A control's value in a sentence."""
    return ", ".join(value) or NONE if isinstance(value, list) else said(value)
