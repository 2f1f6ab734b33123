"""Decode: split keys for queries of one or a few tokens."""

import streamlit as st

from cufa.dashboard import engine, page
from cufa.dashboard.model.many import grouped
from cufa.dashboard.views import (
    inside_traces,
    ladder_view,
    links,
    rates_view,
    run_live,
    splits_ragged,
    splits_view,
)

controls, palette = page.begin(
    "decode",
    "Decode",
    "One new token reads the whole cache of keys and values. With few sequences most SMs are idle, unless the keys are "
    "split over thread blocks.",
)
choice = splits_view.choose(controls)
links_here = st.container()  # filled after the first figure is sent
measured = [m for m in engine.all_measurements() if m.operation.split_selects_kernel]
if choice is not None:
    splits_view.show_splits(choice, controls, measured, palette)
    ladder_view.show_ladder(choice, measured)
    with links_here:
        links.show("decode", choice.subject)
    splits_ragged.show(choice, controls, measured, palette)
page.header("Measured")
shown = [m for m in measured if m.suite != "splits"]  # a sweep is the curve above
sources = grouped(shown, lambda m: f"{m.source}, {m.regime}")
if sources:
    words = {name: rates_view.source_words(rows) for name, rows in sources.items()}
    of_card = (name for name, rows in sources.items() if choice and choice.is_of_card(rows[0]))
    chosen = controls.choice("record", "Measured", words, next(of_card, None), local=True)
    rates_view.show(sources[chosen], "decode.measured", palette)
else:
    page.verdict("No decoding is recorded yet.", "warn", small=True)
inside_traces.show_decode(choice.device.name if choice else "", controls, palette)
controls.finish()
run_live.watch(engine.store().active())
