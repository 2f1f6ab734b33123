"""Occupancy: how many blocks of each kernel fit an SM, what limits them, and what would add one."""

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import links, occupancy_choice, occupancy_view

palette = page.begin(
    "Occupancy",
    "Blocks and warps that fit one SM at a time, from registers and shared memory of the kernels as "
    "compiled on this machine. No GPU is needed.",
)
controls = Controls("occupancy")
choice = occupancy_choice.choose(controls)
links_here = st.container()  # filled once the first figures are on their way
occupancy_view.show_kernel(choice, controls, palette)
with links_here:
    links.show("occupancy", occupancy_choice.subject_of(choice))
controls.finish()
occupancy_view.show_table(choice, palette)
