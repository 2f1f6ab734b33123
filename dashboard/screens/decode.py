"""Decode: what splitting the keys does to queries of one token or a few."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import decode_measured, decode_ragged, decode_view, run_live

palette = page.begin(
    "Decode",
    "One new token reads the whole cache of keys and values. With few sequences that leaves most SMs idle, "
    "unless the keys are split over thread blocks.",
)
controls = Controls("decode")
choice = decode_view.choose(controls)
found = decode_measured.load()
if choice is not None:
    decode_view.show_splits(choice, controls, found, palette)
    decode_ragged.show(choice, controls, found, palette)
decode_measured.show(controls, found, palette)
controls.finish()
run_live.redraw_when_done()
