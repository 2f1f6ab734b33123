"""Machine code: what each source line of a kernel became, in PTX and in SASS."""

from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.dashboard.views import links, machine_code_view, occupancy_choice

palette = page.begin(
    "Machine code",
    "Source beside what the compiler made of it: instructions, live registers and issue slots, line by line. No GPU is "
    "needed.",
)
controls = Controls("code")
choice = occupancy_choice.choose(controls)
links.show("machine_code", occupancy_choice.subject_of(choice))
machine_code_view.show(choice, controls, palette)
controls.finish()
