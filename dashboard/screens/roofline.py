"""Roofline: measured kernels under measured ceilings."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import roofline_view

palette = page.begin(
    "Roofline",
    "How close each kernel comes to the limits of the machine: memory, tensor cores, exponentials.",
)
controls = Controls("roofline")
roofline_view.show(controls, palette)
controls.finish()
