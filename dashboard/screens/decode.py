"""Decode: what splitting the keys does to one-token queries. Arithmetic only: the kernels have not landed."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import decode_view

palette = page.begin(
    "Decode",
    "One new token reads the whole cache of keys and values. With few sequences that leaves most SMs idle, "
    "unless the keys are split over thread blocks.",
)
controls = Controls("decode")
decode_view.say_what_is_missing()
choice = decode_view.choose(controls)
decode_view.show_splits(choice, controls, palette)
decode_view.show_ragged(choice, controls, palette)
controls.finish()
