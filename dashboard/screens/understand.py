"""Understand: attention tile by tile, on a small case."""

from cufa.dashboard import page
from cufa.dashboard.views import understand_view

controls, palette = page.begin(
    "understand",
    "Understand",
    "FlashAttention never stores the scores. It reads the keys tile by tile, and rescales its partial result when a "
    "larger maximum appears. This page shows every step. cufa's NumPy code computes the numbers in tiles on this "
    "machine; FA3's timeline is a model.",
)
case = understand_view.choose(controls)
understand_view.show_walk(case, controls, palette)
understand_view.show_lines(case)
understand_view.show_real_size(case)
controls.finish()
