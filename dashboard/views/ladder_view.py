"""The page Decode: the ladder of decoding, one idea at a time, with measured times of the chosen problem."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page
from cufa.dashboard.model.asked import Asked, figures
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.views import rates_view
from cufa.dashboard.views.splits_view import Choice
from cufa.dashboard.worker.jobs import Job
from cufa.measure.cases import READ, Case, contenders
from cufa.measure.decode_cases import OURS, steps
from cufa.measure.regimes import Regime

#: What each contender of :func:`cufa.measure.decode_cases.steps` adds, by its label.
IDEAS = {
    "FlashAttention-2, no splits": "one thread block per key/value head and sequence (FlashAttention-2)",
    "Flash-Decoding, merged by a second launch": "the keys of a sequence are split over thread blocks (Flash-Decoding)",
    "merged by the last warp": "one launch: the warp that finishes last merges",
    "merged in clusters": "one launch: the splits are a cluster and merge in shared memory",
    "balanced shares": "shares of all tiles (LeanAttention): for sequences of different lengths",
    "pages of 16": "keys in pages (PagedAttention): costs a little, saves memory",
    OURS: "the planner's choice of these",
    "maximum by bound": "a bound in place of row maxima (FlashDecoding++): gains nothing where loads take the time",
    "maximum of 0": "a constant in place of row maxima: gains nothing there either",
    "invariant": "splits at fixed keys: the same bits in every batch",
}


def show_ladder(choice: Choice, measured: Sequence[Measurement]) -> None:
    """A table of ideas, and a button that measures them."""
    some = steps(choice.problem, choice.device)
    with st.expander("One idea at a time", icon=":material/stairs:"):
        lines, first = [], None
        for contender in some:
            problem = contender.problem_of(choice.problem)
            same = figures(measured, Asked(problem, regime=Regime.IN_TURNS))
            here = (m for m in same if choice.is_of_card(m) and m.lengths is None)
            m = next((m for m in here if m.label == contender.label), None)
            first = first or (m and m.seconds)
            lines.append(
                {
                    "step": contender.label,
                    "idea": IDEAS[contender.label],
                    "time": seconds_text(m.seconds) if m else "not measured",
                    "speed over the first": f"{first / m.seconds:.2f}×" if m and first else "",
                }
            )
        page.table(lines)
        case = Case(choice.problem, (*some, *contenders(READ)), f"{choice.problem}, ladder")
        job = Job(case.name, rates_view.first_device(), (case,), 1.0)
        rates_view.offer("Measure these steps on the GPU", "decode.ladder", job, choice.config is None)
        engine.show_problems()
