"""Doctor: what `cufa doctor` says, with fixes."""

from cufa.dashboard import page
from cufa.dashboard.views import doctor_view

controls, _ = page.begin(
    "doctor", "Doctor", "The state of this installation: what works, what is missing, and how to fix it."
)
doctor_view.show(controls)
controls.finish()
