"""Controls that live in the address bar: a view is shared by copying its link.

Every control of a page is mirrored in one query parameter. It is left out while it has its default, unless that
default follows from what is on this machine at the moment (``local``): a link shows the same everywhere, every day.
What a link asks for and cannot have falls back to the default, and the page says so.

Streamlit keeps the values (``persist_state``). It does not write the links (``bind="query-params"``): a bound widget
puts the words of an option into the link, where this puts its name; it leaves out every default, local ones too; and
a parameter is then a widget's key, which pages would share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import streamlit as st

from cufa.dashboard.link import NONE, Link, distinct, said

__all__ = ["Controls", "said"]

Number = TypeVar("Number", int, float)
Read = TypeVar("Read")

_SAME = object()
_ANY = "any"
_KEPT: Any = {"persist_state": "session"}
"""A page that is left and visited again, and a control that comes back, have the values that they had."""
_PAGE = "state.page"
_MOST_NAMED = 40
"""Choices that a refusal still names: of rows that are recorded there are thousands."""


class Controls:
    """The controls of one page. Create it first, then each control where it is to stand, then
    :meth:`finish`."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._link = Link()
        self.refused: list[str] = []
        """What fields hold that they cannot, in words: the page shows the nearest that is possible."""
        self._prefix = ""
        self._entered = st.session_state.get(_PAGE) != page
        st.session_state[_PAGE] = page
        self._box = st.container()

    def second(self, prefix: str) -> Controls:
        """These controls once more, for a second thing of the same kind on the page: names in links begin with
        ``prefix``."""
        found = copy.copy(self)
        found._prefix = self._prefix + prefix
        return found

    def integer(
        self,
        name: str,
        label: str,
        default: int,
        low: int,
        high: int,
        *,
        step: int = 1,
        slider: bool = False,
        local: bool = False,
        help: str | None = None,
    ) -> int:
        """A whole number from low to high; a ``slider`` where looking around matters more than digits."""
        allowed = range(low, high + 1, step if slider else 1)

        def parse(text: str) -> int:
            if int(text) not in allowed:
                raise ValueError
            return int(text)

        wanted = f"a whole number from {low:,} to {high:,}"
        wanted += f" in steps of {allowed.step:,}" if allowed.step > 1 else ""
        default = min(max(default, low), high)
        key = self._settle(name, default, parse, wanted)
        options: Any = {"step": step, "help": help, "key": key, **_KEPT}
        if slider:
            st.session_state[key] = min(
                max(int(st.session_state[key]), low), high
            )  # the bounds may have moved
            got = int(st.slider(label, low, high, **options))
        else:
            got = self._within(
                label, int(st.number_input(label, value=default, **options)), low, high, wanted
            )
        self._show(name, got, default, local)
        return got

    def _within(self, label: str, value: Number, low: Number, high: Number, wanted: str) -> Number:
        """The value of a field, or the nearest that it can have. (A field that knows its bounds goes red, says nothing,
        and keeps from the server what stands in it.)"""
        nearest = min(max(value, low), high)
        if nearest != value:
            self.refused.append(f"{label} is {value:,}, which is not {wanted}; the page shows {nearest:,}.")
            st.markdown(f":red[Not {wanted}.]")
        return nearest

    def optional(
        self,
        name: str,
        label: str,
        default: Number | None,
        low: Number,
        high: Number,
        *,
        step: Number = 1,
        help: str | None = None,
    ) -> Number | None:
        """A number from low to high of their type, or none, which is an empty field and "none" in the link."""
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
        got = st.number_input(label, value=None, format=None if kind is int else "%g", **options)
        value = None if got is None else self._within(label, kind(got), low, high, wanted)
        self._show(name, said(value), said(default))
        return value

    def choice(
        self,
        name: str,
        label: str,
        options: Mapping[str, str] | Sequence[str],
        default: str | None = None,
        *,
        segmented: bool = False,
        local: bool = False,
        help: str | None = None,
    ) -> str:
        """One of several. ``options`` maps the value in the link to the words on the screen."""
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
        if segmented:
            got = st.segmented_control(label, list(words), required=True, wrap=True, **shown)
        else:
            got = st.selectbox(label, list(words), **shown)
        chosen = str(got) if got is not None else fallback
        self._show(name, chosen, fallback, local)
        return chosen

    def several(
        self,
        name: str,
        label: str,
        options: Mapping[str, str] | Sequence[str],
        default: Sequence[str],
        *,
        local: bool = False,
        help: str | None = None,
    ) -> list[str]:
        """Any number of several, comma-separated in the link."""
        words = distinct(options)
        default = [x for x in default if x in words]

        def parse(text: str) -> list[str]:
            values = [x for x in text.split(",") if x]
            if any(x not in words for x in values):
                raise ValueError
            return values

        wanted = f"any of {_named(words)}, separated by commas"
        key = self._settle(name, default, parse, wanted, among=tuple(words))
        st.session_state[key] = [x for x in st.session_state[key] if x in words]
        got = st.multiselect(label, list(words), format_func=words.get, help=help, key=key, **_KEPT)
        self._show(name, ",".join(got), ",".join(default), local)
        return list(got)

    def flag(self, name: str, label: str, default: bool = False, *, help: str | None = None) -> bool:
        """Yes or no; 1 or 0 in the link."""

        def parse(text: str) -> bool:
            return {"1": True, "0": False}[text]

        key = self._settle(name, default, parse, "1 or 0")
        got = bool(st.toggle(label, help=help, key=key, **_KEPT))
        self._show(name, str(int(got)), str(int(default)))
        return got

    def text(
        self,
        name: str,
        label: str,
        default: str,
        read: Callable[[str], Read],
        write: Callable[[Read], str],
        wanted: str,
        help: str,
    ) -> Read:
        """What ``read`` makes of a text; it raises ValueError with a reason for one that it cannot read, which stays in
        the field while the page shows what stood there before. In the link it is as ``write`` says it."""

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
            self.refused.append(f"{label}: {error}. The page shows what stood there before.")
            st.markdown(f":red[{error}.]")
        st.session_state[f"read.{key}"] = shown
        self._show(name, write(value), write(read(default)))
        return value

    def kept(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number that a figure has, and changes by :meth:`set`."""

        def parse(text: str) -> int:
            if not low <= int(text) <= high:
                raise ValueError
            return int(text)

        key = self._settle(name, default, parse, f"a whole number from {low:,} to {high:,}")
        found = min(max(int(st.session_state[key]), low), high)
        self._show(name, found, default)
        return found

    def carried(self, name: str, parse: Callable[[str], Any], wanted: str) -> Any:
        """What no widget shows and the page goes on with: ``parse`` of what its link says, or None."""
        key = self._settle(name, "", lambda text: text if parse(text) is not None else "", wanted)
        text = st.session_state[key]
        self._show(name, text, "")
        return parse(text) if text else None

    def hold(self, *names: str) -> None:
        """Keep what the link says of controls that come later, when what they are about is there."""
        for name in names:
            self._link.hold(name)

    def asked(self, name: str) -> str:
        """What a control holds, or the link says of it: before it is created, to offer it."""
        held = st.session_state.get(self._key(name))
        return str(
            st.query_params.get(self._prefix + name, held or "") if self._entered or held is None else held
        )

    def set(self, name: str, value: Any) -> None:
        """Give a control a new value: in a callback, or before it is created."""
        self.put(self._page, self._prefix + name, value)

    @staticmethod
    def put(page: str, name: str, value: Any) -> None:
        """:meth:`set` for a callback, which runs before the page's controls exist."""
        st.session_state[f"{page}.{name}"] = value
        st.session_state[f"asked.{page}.{name}"] = _ANY

    def notice(self, text: str) -> None:
        """Say something above the page: a choice that was not possible, and what is shown instead."""
        self._link.notices.append(text)

    def finish(self) -> None:
        """Show what could not be done and write the link. Call it once all controls exist."""
        self._link.finish()
        for reason in self.refused:
            self._box.error(reason, icon=":material/error:")
        if self._link.notices:
            text = "  \n".join(n[0].upper() + n[1:] for n in self._link.notices)
            self._box.warning(text, icon=":material/link_off:")
        self.write_link()

    def write_link(self) -> None:
        """At the end of a fragment with controls: :meth:`finish` is not reached when it runs alone."""
        self._link.write()

    def _key(self, name: str) -> str:
        return f"{self._page}.{self._prefix}{name}"

    def _settle(
        self, name: str, default: Any, parse: Callable[[str], Any], wanted: str, among: object = _ANY
    ) -> str:
        """Give the widget its value: from the link by which the page was reached, from the last visit, or the
        default, which a control follows whose value nobody asked for (``among`` these options)."""
        full = self._prefix + name
        text = self._link.add(full)
        key = self._key(name)
        former = st.session_state.get(f"default.{key}", _SAME)
        st.session_state[f"default.{key}"] = default
        is_known = key in st.session_state
        is_asked = (
            st.session_state.get(f"asked.{key}") in (_ANY, among) and f"asked.{key}" in st.session_state
        )
        if not is_known or (not is_asked and former is not _SAME and st.session_state[key] == former):
            st.session_state[key] = default
        if text is not None and (self._entered or not is_known):
            try:
                st.session_state[key] = parse(text)
                st.session_state[f"asked.{key}"] = among
            except (ValueError, KeyError):
                st.session_state[key] = default
                self.notice(
                    f"the link asks for {full} = {text!r}, which is not {wanted}; showing {_in_words(default)} instead."
                )
        return key

    def _show(self, name: str, value: Any, default: Any, local: bool = False) -> None:
        """In the link, if it has to say so."""
        self._link.show(self._prefix + name, str(value) if local or value != default else None)


def _named(words: Collection[str]) -> str:
    """What there is to choose from."""
    return ", ".join(words) if len(words) <= _MOST_NAMED else f"the {len(words):,} that there are"


def _in_words(value: Any) -> str:
    """A control's value in a sentence."""
    return ", ".join(value) or NONE if isinstance(value, list) else said(value)
