"""The mask editor of Masked work: every mask of :mod:`cufa.masks`, by kind and numbers.

In links a mask is ``mask``, the name of its builder, and its numbers under the names of the arguments; ``diag`` and
``at`` say where the diagonal lies. Lengths and hidden rows are texts (:mod:`cufa.dashboard.model.mask_texts`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa import masks
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import tile_grid
from cufa.dashboard.model import mask_texts
from cufa.dashboard.model.mask_texts import Form, Hidden, Lengths
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_control
from cufa.problem.mask import Mask

_SHARES = (7, 15, 3, 21, 10, 9, 2, 15)
"""Proportions of the default documents."""
_ANSWERS = (3, 5, 2, 4)
_LEAST_DRAGGED = 128
"""Minimum number of slider steps."""
_WIDTH, _NARROW = 176, 128
_PREVIEW, _EXAMPLE = 160, 24
"""Pixels of the mask's picture, and tokens of an example."""
_FIGURE = '<div style="display:flex;gap:14px;align-items:center">{}<span>{}</span></div>'
_LEGEND = "Blue: visible. Amber, hatched: partly visible. Dotted: hidden."

Read = TypeVar("Read")


@dataclasses.dataclass
class _Fields:
    """The fields of one mask, side by side."""

    controls: Controls
    seqlen_q: int
    seqlen_k: int
    like: Controls | None
    """Controls whose values are the defaults of these fields."""
    line: DeltaGenerator
    below: DeltaGenerator
    """Container of full-width fields."""
    notes: list[str]
    """Messages about the numbers."""

    def begin(self, name: str, default: Any, kind: Callable[[str], Any] = int) -> Any:
        """Default of a field."""
        text = "" if self.like is None else self.like.asked(name)
        if text in ("", "none"):
            return default if not text else None
        try:
            return kind(text)
        except ValueError:  # from a link, for a field that is not shown
            return default

    def number(self, name: str, label: str, default: int, help: str | None = None, least: int = 0) -> int:
        """A number of tokens: a field, and a slider up to the length of the sequence."""
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

    def sides(self, left: int, right: int) -> tuple[int | None, int | None]:
        """Both ends of a window."""
        begin = {"left": left, "right": right}.items()
        place = functools.partial(self.line.container, width=_NARROW)
        before, after = (
            mask_control.choose_side(self.controls, x, self.begin(x, n), place()) for x, n in begin
        )
        return before, after

    def diagonal(self) -> str | int:
        begin = {"diag": self.begin("diag", "bottom-right", str), "at": self.begin("at", 0)}
        return mask_control.choose_diagonal(self.controls, begin, self._places())

    def _places(self) -> Iterator[DeltaGenerator]:
        while True:
            yield self.line.container(width=_WIDTH)

    def flag(self, name: str, label: str, default: bool) -> bool:
        begin = self.begin(name, default, lambda x: x in ("1", "True"))
        return self.controls.flag(name, label, begin, at=self.line.container(width=_NARROW))

    def text(self, name: str, label: str, default: str, form: Form[Read], help: str) -> Read:
        with self.below:
            begin = default if self.like is None else self.like.asked(name)
            try:
                form.read(begin)
            except ValueError:  # the text of the other field is invalid
                begin = default
            return self.controls.text(name, label, begin or default, form.read, form.write, form.wanted, help)

    def lengths(self, name: str, label: str, default: Lengths, room: int, help: str) -> Lengths:
        """Lengths of consecutive texts, cut to the available room."""
        form = mask_texts.LENGTHS
        typed = self.text(name, label, form.write(default), form, f"{help} {form.help}")
        total = sum(typed)
        with self.below:
            if total > room:
                self.notes.append(
                    f"{label} add up to {total:,}, but there is room for {room:,}: the rest is ignored."
                )
                self._offer(total + self.seqlen_k - room)
        return mask_texts.fit(typed, room)

    def _offer(self, tokens: int) -> None:
        """A button that makes room for the lengths."""
        if self.like is None:
            st.button(
                f"Make it {tokens:,} queries and keys", key="masked.fit", icon=":material/fit_width:",
                on_click=self._resize, args=(tokens,),
            )  # fmt: skip

    def _resize(self, tokens: int) -> None:
        for name in ("sq", "sk"):
            self.controls.set(name, tokens)


def _window(x: _Fields) -> Mask:
    return masks.window(*x.sides(1023, 0), x.diagonal())


def _prefix(x: _Fields) -> Mask:
    length = x.number("length", "Keys visible to all", x.seqlen_k // 4)
    return masks.prefix(length, x.diagonal())


def _streaming(x: _Fields) -> Mask:
    keep = x.number(
        "keep", "First keys, kept", 64, "Visible to every later query, as the sinks of StreamingLLM."
    )
    window = x.number("window", "Keys before", 1023, "In addition to a query's own key.")
    return masks.streaming(keep, window, x.diagonal())


def _global_window(x: _Fields) -> Mask:
    tokens = x.number(
        "tokens", "Global tokens", 256, "These tokens see every key, and every query sees these tokens."
    )
    return masks.global_window(tokens, *x.sides(511, 511), x.diagonal())


def _documents(x: _Fields) -> Mask:
    causal = x.flag("causal", "Causal", True)
    diagonal = x.diagonal()
    shares = mask_texts.shared_out(x.seqlen_k, _SHARES)
    lengths = x.lengths("lengths", "Lengths of the documents", shares, x.seqlen_k, "Paste the lengths here.")
    x.notes.append(_spread_words("document", lengths, x.seqlen_k))
    return masks.documents(lengths, causal, seqlen=x.seqlen_k, diagonal=diagonal)


def _spread_words(noun: str, lengths: Lengths, keys: int) -> str:
    """Number and lengths of the texts, and the keys outside of all texts."""
    if not lengths:
        return f"There is no {noun}: no key is visible."
    span = f"{min(lengths):,} to {max(lengths):,}" if len(set(lengths)) > 1 else f"{lengths[0]:,}"
    rest = keys - sum(lengths)
    beyond = f" The last {sentences.count(rest, 'key')} belong to no {noun} and are hidden." if rest else ""
    return f"{sentences.count(len(lengths), noun)} of {span} tokens.{beyond}"


def _chunks(x: _Fields) -> Mask:
    size = x.number("size", "Tokens of a chunk", max(1, x.seqlen_k // 4), least=1)
    return masks.chunks(size, x.diagonal())


def _shared_question(x: _Fields) -> Mask:
    question = x.number("question", "Tokens of the question", x.seqlen_k // 4)
    length = min(question, x.seqlen_k)
    diagonal = x.diagonal()
    room = x.seqlen_k - length
    shares = mask_texts.shared_out(room, _ANSWERS)
    answers = x.lengths(
        "answers", "Lengths of the answers", shares, room, "Each answer sees the question and itself."
    )
    x.notes.append(_spread_words("answer", answers, room))
    return masks.shared_question(length, answers, seqlen=x.seqlen_k, diagonal=diagonal)


def _evict(x: _Fields) -> Mask:
    least = x.number("least", "Kept for at least", x.seqlen_k // 16, "Rows from the key's own row.", least=1)
    most = x.number("most", "Kept for at most", x.seqlen_k // 2, least=1)
    seed = x.controls.integer("seed", "Seed", x.begin("seed", 0), 0, 9999, at=x.line.container(width=_NARROW))
    diagonal = x.diagonal()
    form = mask_texts.LENGTHS
    help = f"Rows of the first key, the second key, …; later keys stay. Empty: random rows. {form.help}"
    rows = x.text("rows", "Or the row at which each key is evicted", "", form, help)
    if rows:
        gone = np.full(x.seqlen_k, mask_control.MOST)
        gone[: len(rows)] = rows[: x.seqlen_k]
        if len(rows) > x.seqlen_k:
            x.notes.append(f"{len(rows):,} rows for {x.seqlen_k:,} keys: the rest is ignored.")
        return masks.evict(gone, diagonal)
    if most < least:
        x.notes.append(
            f"The maximum of {most:,} rows is below the minimum: every key is kept for {least:,} rows."
        )
    stay = np.random.default_rng(seed).integers(least, max(least, most) + 1, x.seqlen_k)
    own = np.arange(x.seqlen_k) - masks.causal(diagonal).shift(x.seqlen_q, x.seqlen_k)
    return masks.evict(own + stay, diagonal)


def _columns(x: _Fields) -> Mask:
    causal = x.flag("causal", "Causal", True)
    diagonal = x.diagonal()
    quarter, form = x.seqlen_k // 4, mask_texts.HIDDEN
    begin = form.write([Hidden(quarter, max(quarter, 2 * quarter - 1), x.seqlen_q // 2, None)])
    hidden = x.text("hidden", "Keys, and the rows from which they are hidden", begin, form, form.help)
    beyond = sum(h.last >= x.seqlen_k for h in hidden)
    if beyond:
        count = sentences.count(beyond, "entry")
        x.notes.append(f"{count} beyond the last key, {x.seqlen_k - 1:,}: these keys are ignored.")
    runs = mask_texts.runs_of(hidden, x.seqlen_k)
    return masks.columns(*runs, causal=causal, diagonal=diagonal)


_KINDS: dict[str, Callable[[_Fields], Mask]] = {
    "causal": lambda x: masks.causal(x.diagonal()),
    "full": lambda x: masks.full(),
    "window": _window,
    "prefix": _prefix,
    "streaming": _streaming,
    "global_window": _global_window,
    "documents": _documents,
    "chunks": _chunks,
    "shared_question": _shared_question,
    "evict": _evict,
    "columns": _columns,
}


_EXAMPLES: dict[str, Mask] = {
    "causal": masks.causal(),
    "full": masks.full(),
    "window": masks.window(5, 2),
    "prefix": masks.prefix(7),
    "streaming": masks.streaming(3, 4),
    "global_window": masks.global_window(2, 3, 3),
    "documents": masks.documents([7, 4, 10, 3]),
    "chunks": masks.chunks(6),
    "shared_question": masks.shared_question(6, [7, 5, 6]),
    "evict": masks.evict(np.arange(_EXAMPLE) + np.tile([3, 9, 5, 18, 12, 2], _EXAMPLE // 6)),
    "columns": masks.columns(*mask_texts.runs_of([Hidden(4, 9, 13, 18)], _EXAMPLE), causal=True),
}
"""An example of each kind, for the pictures."""


@functools.cache
def _gallery(palette_name: str) -> str:
    """Each kind in a sentence with a picture."""
    figures = (
        _FIGURE.format(
            tile_grid.preview(_EXAMPLES[name], _EXAMPLE, _EXAMPLE, palette_name, 4 * _EXAMPLE, title),
            f"<b>{title[0].upper()}{title[1:]}.</b> {text}",
        )
        for name, (title, text) in sentences.sections("masks.md").items()
    )
    style = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:14px 24px"
    return f'<div style="{style}">{"".join(figures)}</div>'


def choose(
    controls: Controls, seqlen_q: int, seqlen_k: int, like: Controls | None = None
) -> tuple[Mask, float | None]:
    """Mask and soft cap. ``like``: other controls of the page, whose mask is the default."""
    sections = sentences.sections("masks.md")
    kinds = {name: sections[name][0] for name in _KINDS}
    begin = "causal" if like is None else like.asked("mask")
    kind = controls.choice("mask", "Mask", kinds, begin or "causal", segmented=True)
    line = st.container(horizontal=True)
    fields = _Fields(controls, seqlen_q, seqlen_k, like, line, st.container(), [])
    mask = _KINDS[kind](fields)
    begin_cap = fields.begin("softcap", None, float)
    softcap = mask_control.choose_softcap(controls, begin_cap, line.container(width=_NARROW))
    alt = f"The mask over {seqlen_q:,} queries (downwards) and {seqlen_k:,} keys (to the right)"
    picture = tile_grid.preview(mask, seqlen_q, seqlen_k, page.palette().name, _PREVIEW, alt)
    st.html(_FIGURE.format(picture, f"{sections[kind][1]}<br><small>{alt}. {_LEGEND}</small>"))
    for note in fields.notes:
        st.caption(note)
    if like is None:
        with st.expander("All kinds of masks in pictures", icon=":material/grid_view:"):
            st.html(_gallery(page.palette().name))
    return mask, softcap
