"""Doctor: what `cufa doctor` says, with fixes."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import doctor_view

palette = page.begin("Doctor", "What is here, what is wrong with it, and what to do about it.")
controls = Controls("doctor")
doctor_view.show(controls, palette)
controls.finish()
