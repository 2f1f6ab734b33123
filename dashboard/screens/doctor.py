"""Doctor: what `cufa doctor` says, with fixes."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import doctor_view

page.begin("Doctor", "The state of this installation: what works, what is missing, and how to fix it.")
controls = Controls("doctor")
doctor_view.show(controls)
controls.finish()
