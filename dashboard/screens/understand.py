"""Understand: attention tile by tile, on a case small enough to look at whole."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import understand_view

palette = page.begin(
    "Understand",
    "FlashAttention never stores the scores: it meets the keys tile by tile, and corrects what it has whenever a "
    "larger maximum turns up. Here is every step; all numbers are those of cufa's own CPU path.",
)
controls = Controls("understand")
case = understand_view.choose(controls)
understand_view.show_walk(case, controls, palette)
understand_view.show_lines(case)
understand_view.show_real_size(case)
controls.finish()
