"""Masked work: which tiles are computed, by which thread block, and when."""

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.views import (
    links,
    masked_controls,
    masked_gain,
    masked_inside,
    masked_pair,
    masked_sms,
    masked_tile,
    masked_tiles,
)

controls, palette = page.begin(
    "masked",
    "Masked work",
    "A mask hides part of the score matrix: half of it, or all but a window. This page shows the work of each "
    "algorithm under a mask: by tile, by thread block, by SM.",
)
view = masked_controls.choose(controls)
other = masked_pair.choose_other(controls, view)
links_here = st.container()  # filled after the answer is sent
if other is not None:
    masked_pair.show(view, other, palette)
else:
    show = masked_tile.show_key_block if view.schedule.by_keys else masked_tile.show_one_head
    show(view, controls, palette)
with links_here:
    links.show("masked_work", view.subject, "The first" if other else "")
    if other is not None:
        links.show("masked_work", other.subject, "Beside it")
if other is None:
    masked_sms.show_timelines(view, palette)
    masked_inside.show_inside(view, palette)
    masked_tiles.show_tilings(controls, view)
    masked_gain.show_flops(view, palette)
    masked_gain.show_speedup(view, palette)
controls.finish()
