"""Roofline: measured kernels under measured ceilings."""

from cufa.dashboard import page
from cufa.dashboard.views import roofline_view

controls, palette = page.begin(
    "roofline",
    "Roofline",
    "How close each kernel comes to the limits of the machine: memory, tensor cores, exponentials.",
)
roofline_view.show(controls, palette)
controls.finish()
