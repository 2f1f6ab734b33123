"""Causal work: which tiles are computed, by which thread block, when, and what it was good for."""

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import causal_controls, causal_gain, causal_grid, causal_sms, causal_tile

palette = page.begin(
    "Causal work",
    "A causal mask hides almost half of the score matrix. Here is what each algorithm does about it: tile by "
    "tile, block by block, SM by SM.",
)
controls = Controls("causal")
view = causal_controls.choose(controls)
causal_tile.take_click(controls)
grid = st.container()  # above the controls that say which of its tiles is selected
selected = causal_tile.choose_tile(view, controls)
causal_tile.show_tile(view, palette, selected)
with grid:
    causal_grid.show_grid(view, palette, selected)
    causal_grid.show_counters(view)
    st.header("Inside one tile", anchor=False)
causal_sms.show_timelines(view, palette)
causal_gain.show_flops(view, palette)
causal_gain.show_speedup(view, palette)
controls.finish()
