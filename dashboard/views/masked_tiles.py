"""Masked work: what other tiles of the same kernel would take, and what binds each."""

from __future__ import annotations

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page, sentences
from cufa.dashboard.model import evidence, tilings
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.tilings import Tiling
from cufa.dashboard.state import Controls
from cufa.dashboard.views.masked_view import View
from cufa.measure import predictions
from cufa.measure.predictions import Error


def show_tilings(controls: Controls, view: View) -> None:
    """A table, the shortest predicted time first."""
    page.header("Which tiles")
    found = _ceilings(controls, view)
    told = [] if found is None or not view.schedule.visited else _tilings(view, found)
    if found is None or not told:
        why = f"no ceilings of {view.device.name} are recorded" if found is None else _why_none(view, found)
        page.verdict(f"Times of other tiles are not predicted: {why}.", small=True)
        return
    errors = tilings.errors_of(found, view.device)
    page.verdict(_verdict(view, told, errors.get(view.spec.name)), tag="predicted", small=True)
    st.dataframe([_line(t, told[0].seconds) for t in told], hide_index=True)
    st.caption(
        f"From the ceilings recorded on **{found.where}** alone: products, exponentials, shared memory and memory, "
        "what the warps of an SM hide of one another, and the thread block with the most to do. "
        f"{predictions.in_words(errors)} {tilings.left_out(view.problem, view.spec, view.device)}"
    )


def _ceilings(controls: Controls, view: View) -> Evidence | None:
    """Those of the card, or of another one of its kind where there are more."""
    try:
        found = tilings.of_cards(view.device, evidence.load())
    except ValueError:  # the page says so further up
        return None
    if len(found) < 2:
        return next(iter(found.values()), None)
    words = {name: name for name in found}
    return found[
        controls.choice("ceilings", "Ceilings of", words, next(iter(found)), segmented=True, local=True)
    ]


def _tilings(view: View, found: Evidence) -> list[Tiling]:
    return tilings.tilings(view.problem, view.spec, view.device, found)


def _why_none(view: View, found: Evidence) -> str:
    if not view.schedule.visited:
        return "no query sees a key"
    return tilings.why_none(view.problem, view.spec, view.device, found)


def _verdict(view: View, told: list[Tiling], error: Error | None) -> str:
    """The shortest predicted time, and how many tilings the prediction cannot tell from it."""
    best, tolerance = told[0], 0.0 if error is None else error.median
    alike = [t for t in told if t.seconds <= best.seconds * (1 + tolerance)]
    text = f"{best.config} is predicted at {seconds_text(best.seconds)}, {_binds(best)}"
    if len(alike) > 1:
        others = sentences.count(len(alike) - 1, "other")
        return f"{text}; {others} of {len(told) - 1} {sentences.plural(len(alike) - 1, 'is')} too close to tell apart."
    here = next((t for t in told if config_key(t.config) == config_key(view.config)), None)
    if here is None or here is best:
        return f"{text}: the fastest of {sentences.count(len(told), 'tiling')}."
    return f"{text}: {here.seconds / best.seconds:.2f}× faster than the chosen one, which is {_binds(here)}."


def _binds(tiling: Tiling) -> str:
    return "waiting for its busiest block" if tiling.binds == "busiest block" else f"bound by {tiling.binds}"


def _line(tiling: Tiling, shortest: float) -> dict[str, str]:
    measured, error = tiling.measured, tiling.error
    return {
        "tiles": config_words(tiling.config),
        "predicted": seconds_text(tiling.seconds),
        "÷ shortest": f"{tiling.seconds / shortest:.2f}×",
        "bound by": tiling.binds,
        "recorded": "–" if measured is None else seconds_text(measured.seconds),
        "prediction off by": "–" if error is None else f"{error:+.0%}",
    }
