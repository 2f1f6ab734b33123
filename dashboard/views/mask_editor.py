"""The mask editor of Masked work: every mask of :mod:`cufa.masks`, by kind and numbers.

In links a mask is ``mask``, the name of what makes it, and its numbers under the names of the arguments; ``diag`` and
``at`` say where the diagonal lies. Lengths and hidden rows are texts (:mod:`cufa.dashboard.model.mask_texts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa import masks
from cufa.dashboard import sentences
from cufa.dashboard.model import mask_texts
from cufa.dashboard.model.mask_texts import Form, Hidden, Lengths
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_control
from cufa.problem.mask import Mask

_SHARES = (7, 15, 3, 21, 10, 9, 2, 15)
"""Lengths that differ, of documents that a page begins with."""
_ANSWERS = (3, 5, 2, 4)
_LEAST_DRAGGED = 128
"""Steps of a slider, at least."""
_WIDTH, _NARROW = 176, 128

Read = TypeVar("Read")


@dataclasses.dataclass
class _Fields:
    """The fields of one mask, side by side."""

    controls: Controls
    seqlen_q: int
    seqlen_k: int
    like: Controls | None
    """Whose fields these begin like."""
    line: DeltaGenerator
    below: DeltaGenerator
    """Where what takes the whole width stands."""
    notes: list[str]
    """What is to be said of the numbers."""

    def begin(self, name: str, default: Any, kind: Callable[[str], Any] = int) -> Any:
        """What a field begins with."""
        text = "" if self.like is None else self.like.asked(name)
        if text in ("", "none"):
            return default if not text else None
        try:
            return kind(text)
        except ValueError:  # a link's, of a field that does not stand there
            return default

    def number(self, name: str, label: str, default: int, help: str | None = None, least: int = 0) -> int:
        """A number of tokens: typed, or dragged up to the length of the sequence."""
        with self.line.container(width=_WIDTH):
            value = self.controls.integer(
                name, label, self.begin(name, default), least, mask_control.MOST, help=help
            )
            most = max(self.seqlen_q, self.seqlen_k, least + 1)
            key = f"masked.drag.{'' if self.like is None else 'b_'}{name}"
            st.session_state[key] = min(value, most)
            step = 1 << max(0, (most // _LEAST_DRAGGED).bit_length() - 1)
            st.slider(
                label, least, most, step=step, key=key, label_visibility="collapsed",
                on_change=lambda: self.controls.set(name, st.session_state[key]),
            )  # fmt: skip
        return value

    def side(self, name: str, label: str, default: int | None) -> int | None:
        """An end of a window."""
        return self.controls.optional(
            name, label, self.begin(name, default), 0, mask_control.MOST, step=128,
            help=mask_control.SIDE_HELP,
        at=self.line.container(width=_NARROW))  # fmt: skip

    def diagonal(self) -> str | int:
        begin = {"diag": self.begin("diag", "bottom-right", str), "at": self.begin("at", 0)}
        return mask_control.choose_diagonal(self.controls, begin, self._places())

    def _places(self) -> Iterator[DeltaGenerator]:
        while True:
            yield self.line.container(width=_WIDTH)

    def flag(self, name: str, label: str, default: bool) -> bool:
        return self.controls.flag(
            name, label, self.begin(name, default, lambda x: x == "1"), at=self.line.container(width=_NARROW)
        )

    def text(self, name: str, label: str, default: str, form: Form[Read], help: str) -> Read:
        with self.below:
            begin = default if self.like is None else self.like.asked(name)
            try:
                form.read(begin)
            except ValueError:  # what stands in the other's field cannot be read
                begin = default
            return self.controls.text(name, label, begin or default, form.read, form.write, form.wanted, help)

    def lengths(self, name: str, label: str, default: Lengths, room: int, help: str) -> Lengths:
        """Lengths of texts that lie one after another, as many tokens as there is room for."""
        form = mask_texts.LENGTHS
        typed = self.text(name, label, form.write(default), form, f"{help} {form.help}")
        total = sum(typed)
        with self.below:
            if total > room:
                self.notes.append(
                    f"{label} add up to {total:,}, and there is room for {room:,}: what is beyond is left out."
                )
                self._offer(total + self.seqlen_k - room)
        return mask_texts.fit(typed, room)

    def _offer(self, tokens: int) -> None:
        """To make room for what was typed."""
        if self.like is None:
            st.button(
                f"Make it {tokens:,} queries and keys", key="masked.fit", icon=":material/fit_width:",
                on_click=lambda: [self.controls.set(name, tokens) for name in ("sq", "sk")],
            )  # fmt: skip


def _window(x: _Fields) -> Mask:
    left = x.side("left", "Keys before", 1023)
    right = x.side("right", "Keys after", 0)
    return masks.window(left, right, x.diagonal())


def _prefix(x: _Fields) -> Mask:
    length = x.number("length", "Keys that all see", x.seqlen_k // 4)
    return masks.prefix(length, x.diagonal())


def _streaming(x: _Fields) -> Mask:
    keep = x.number("keep", "First keys, kept", 64, "Every later query sees them, as StreamingLLM's sinks.")
    window = x.number("window", "Keys before", 1023, "Beside a query's own key.")
    return masks.streaming(keep, window, x.diagonal())


def _global_window(x: _Fields) -> Mask:
    tokens = x.number("tokens", "Global tokens", 256, "They see every key, and every query sees them.")
    left = x.side("left", "Keys before", 511)
    right = x.side("right", "Keys after", 511)
    return masks.global_window(tokens, left, right, x.diagonal())


def _documents(x: _Fields) -> Mask:
    causal = x.flag("causal", "Causal", True)
    diagonal = x.diagonal()
    shares = mask_texts.shared_out(x.seqlen_k, _SHARES)
    lengths = x.lengths("lengths", "Lengths of the documents", shares, x.seqlen_k, "Paste them here.")
    x.notes.append(_spread_words("document", lengths, x.seqlen_k))
    return masks.documents(lengths, causal, seqlen=x.seqlen_k, diagonal=diagonal)


def _spread_words(noun: str, lengths: Lengths, keys: int) -> str:
    """How many there are, how long, and what belongs to none."""
    if not lengths:
        return f"There is no {noun}: nothing is seen."
    span = f"{min(lengths):,} to {max(lengths):,}" if len(set(lengths)) > 1 else f"{lengths[0]:,}"
    rest = keys - sum(lengths)
    beyond = f" The last {sentences.count(rest, 'key')} belong to none and are not seen." if rest else ""
    return f"{sentences.count(len(lengths), noun)} of {span} tokens.{beyond}"


def _chunks(x: _Fields) -> Mask:
    size = x.number("size", "Tokens of a chunk", max(1, x.seqlen_k // 4), least=1)
    return masks.chunks(size, x.diagonal())


def _shared_question(x: _Fields) -> Mask:
    question = x.number("question", "Tokens of the question", x.seqlen_k // 4)
    asked = min(question, x.seqlen_k)
    diagonal = x.diagonal()
    room = x.seqlen_k - asked
    shares = mask_texts.shared_out(room, _ANSWERS)
    answers = x.lengths(
        "answers", "Lengths of the answers", shares, room, "Each sees the question and itself."
    )
    x.notes.append(_spread_words("answer", answers, room))
    return masks.shared_question(asked, answers, seqlen=x.seqlen_k, diagonal=diagonal)


def _evict(x: _Fields) -> Mask:
    least = x.number("least", "Kept for at least", x.seqlen_k // 16, "Rows from a key's own on.", least=1)
    most = x.number("most", "and at most", x.seqlen_k // 2, least=1)
    seed = x.controls.integer("seed", "Seed", x.begin("seed", 0), 0, 9999, at=x.line.container(width=_NARROW))
    diagonal = x.diagonal()
    form = mask_texts.LENGTHS
    help = (
        f"Of the first key, the second, …; those behind the last number stay. Empty: at random. {form.help}"
    )
    rows = x.text("rows", "Or the row at which each key is gone", "", form, help)
    if rows:
        gone = np.full(x.seqlen_k, mask_control.MOST)
        gone[: len(rows)] = rows[: x.seqlen_k]
        if len(rows) > x.seqlen_k:
            x.notes.append(f"{len(rows):,} rows for {x.seqlen_k:,} keys: the others are left out.")
        return masks.evict(gone, diagonal)
    if most < least:
        x.notes.append(
            f"At least {least:,} rows and at most {most:,} cannot be: every key is kept for {least:,}."
        )
    stay = np.random.default_rng(seed).integers(least, max(least, most) + 1, x.seqlen_k)
    own = np.arange(x.seqlen_k) - masks.causal(diagonal).shift(x.seqlen_q, x.seqlen_k)
    return masks.evict(own + stay, diagonal)


def _columns(x: _Fields) -> Mask:
    causal = x.flag("causal", "Causal", True)
    diagonal = x.diagonal()
    quarter, form = x.seqlen_k // 4, mask_texts.HIDDEN
    begin = form.write([Hidden(quarter, max(quarter, 2 * quarter - 1), x.seqlen_q // 2, None)])
    hidden = x.text("hidden", "Keys, and the rows that they are hidden from", begin, form, form.help)
    beyond = sum(h.last >= x.seqlen_k for h in hidden)
    if beyond:
        count = sentences.count(beyond, "entry")
        x.notes.append(f"{count} of keys beyond the last, {x.seqlen_k - 1:,}: what is beyond is left out.")
    runs = mask_texts.runs_of(hidden, x.seqlen_k)
    return masks.columns(*runs, causal=causal, diagonal=diagonal)


_KINDS: dict[str, tuple[str, Callable[[_Fields], Mask]]] = {
    "causal": ("causal", lambda x: masks.causal(x.diagonal())),
    "full": ("full", lambda x: masks.full()),
    "window": ("window", _window),
    "prefix": ("prefix", _prefix),
    "streaming": ("streaming", _streaming),
    "global_window": ("global + window", _global_window),
    "documents": ("documents", _documents),
    "chunks": ("chunks", _chunks),
    "shared_question": ("shared question", _shared_question),
    "evict": ("eviction", _evict),
    "columns": ("columns", _columns),
}


def choose(
    controls: Controls, seqlen_q: int, seqlen_k: int, like: Controls | None = None
) -> tuple[Mask, float | None]:
    """Mask and soft cap. ``like``: other controls of the page, whose mask these begin with."""
    kinds = {name: words for name, (words, _) in _KINDS.items()}
    begin = "causal" if like is None else like.asked("mask")
    kind = controls.choice("mask", "Mask", kinds, begin or "causal", segmented=True)
    line = st.container(horizontal=True)
    fields = _Fields(controls, seqlen_q, seqlen_k, like, line, st.container(), [])
    mask = _KINDS[kind][1](fields)
    with line.container(width=_NARROW):
        softcap = mask_control.choose_softcap(controls, fields.begin("softcap", None, float))
    for note in fields.notes:
        st.caption(note)
    return mask, softcap
