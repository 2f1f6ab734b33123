"""Masked work: predicted times of other tiles of the same kernel, and the limit of each."""

from __future__ import annotations

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.model import tilings
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.tilings import Tiling
from cufa.dashboard.state import Controls
from cufa.dashboard.views.masked_controls import View
from cufa.measure import predictions
from cufa.measure.predictions import Error


def show_tilings(controls: Controls, view: View) -> None:
    """A table, sorted by predicted time."""
    page.header("Which tiles")
    card = _ceilings(controls, view)
    launch = view.problem, view.spec, view.device
    rows = tilings.tilings(*launch, card) if card is not None and view.schedule.visited else []
    if card is None or not rows:
        why = f"no ceilings of {view.device.name} are recorded"
        if card is not None:
            why = (
                tilings.why_none(*launch, card) if view.schedule.visited else "no key is visible to any query"
            )
        page.verdict(f"Times of other tiles cannot be predicted: {why}.", small=True)
        return
    errors = tilings.errors_of(card, view.device)
    page.verdict(_verdict(view, rows, errors.get(view.spec.name)), tag="predicted", small=True)
    st.dataframe([_line(t, rows[0].seconds) for t in rows], hide_index=True)
    st.caption(
        f"Predicted from the ceilings recorded on **{card.device}**, beside its recorded times. Ceilings: products, "
        "exponentials, shared memory, device memory, the overlap between an SM's warps, and the busiest thread block. "
        f"{predictions.in_words(errors)} {tilings.left_out(*launch)}"
    )


def _ceilings(controls: Controls, view: View) -> Evidence | None:
    """Ceilings of the card, or of a chosen similar card."""
    cards = tilings.of_cards(view.device, engine.recorded())
    if len(cards) < 2:
        return next(iter(cards.values()), None)
    return cards[controls.choice("ceilings", "Ceilings of", list(cards), segmented=True, local=True)]


def _verdict(view: View, rows: list[Tiling], error: Error | None) -> str:
    """The shortest predicted time, and the number of tilings within the error of the prediction."""
    best, tolerance = rows[0], 0.0 if error is None else error.median
    alike = [t for t in rows if t.seconds <= best.seconds * (1 + tolerance)]
    text = f"{best.config} is predicted at {seconds_text(best.seconds)}, {_binds(best)}"
    if len(alike) > 1:
        others = sentences.count(len(alike) - 1, "other")
        return f"{text}; {others} of {len(rows) - 1} {sentences.plural(len(alike) - 1, 'is')} as fast within the error."
    here = next((t for t in rows if config_key(t.config) == config_key(view.config)), None)
    if here is None or here is best:
        return f"{text}: the fastest of {sentences.count(len(rows), 'tiling')}."
    return (
        f"{text}: {here.seconds / best.seconds:.2f}× faster than the chosen tiles, which are {_binds(here)}."
    )


def _binds(tiling: Tiling) -> str:
    return "waiting for its busiest block" if tiling.binds == "busiest block" else f"bound by {tiling.binds}"


def _line(tiling: Tiling, shortest: float) -> dict[str, str]:
    measured, error = tiling.measured, tiling.error
    return {
        "predicted": seconds_text(tiling.seconds),
        "÷ shortest": f"{tiling.seconds / shortest:.2f}×",
        "bound by": tiling.binds,
        "recorded": "–" if measured is None else seconds_text(measured.seconds),
        "prediction off by": "–" if error is None else f"{round(error, 2) + 0.0:+.0%}",
        "tiles": config_words(tiling.config),  # the longest column last: a narrow window shows the others
    }
