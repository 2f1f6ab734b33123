"""Occupancy: blocks of each kernel per SM, the limiting resource, and the change that would add a block."""

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.views import links, occupancy_choice, occupancy_view

controls, palette = page.begin(
    "occupancy",
    "Occupancy",
    "Thread blocks and warps that fit on one SM, from the registers and shared memory of the compiled kernels. They "
    "are compiled on this machine; no GPU is needed.",
)
choice = occupancy_choice.choose(controls)
links_here = st.container()  # filled after the first figures are sent
occupancy_view.show_kernel(choice, controls, palette)
with links_here:
    links.show("occupancy", occupancy_choice.subject_of(choice))
controls.finish()
occupancy_view.show_table(choice, palette)
