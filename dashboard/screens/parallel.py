"""Several GPUs: who computes which scores when, and what travels."""

from cufa.dashboard import page
from cufa.dashboard.views import parallel_view

controls, palette = page.begin(
    "parallel",
    "Several GPUs",
    "A sequence is spread over the ranks of a group. Each rank computes its share of the scores in steps, while the "
    "keys of the next step travel.",
)
parallel_view.show(controls, palette)
controls.finish()
