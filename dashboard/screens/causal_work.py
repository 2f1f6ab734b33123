"""Causal work: which tiles are computed, by which thread block, when, and what it was good for."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import causal_controls, causal_gain, causal_sms, causal_tile

palette = page.begin(
    "Causal work",
    "A causal mask hides almost half of the score matrix. Here is what each algorithm does about it: tile by "
    "tile, block by block, SM by SM.",
)
controls = Controls("causal")
view = causal_controls.choose(controls)
causal_tile.show_one_head(view, controls, palette)
causal_sms.show_timelines(view, palette)
causal_gain.show_flops(view, palette)
causal_gain.show_speedup(view, palette)
controls.finish()
