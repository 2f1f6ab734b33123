"""Machine code: PTX and SASS of each source line of a kernel."""

from cufa.dashboard import page
from cufa.dashboard.views import (
    links,
    machine_code_banks,
    machine_code_scores,
    machine_code_view,
    occupancy_choice,
)

controls, palette = page.begin(
    "code",
    "Machine code",
    "Source lines and their compiled instructions, live registers and issue slots. No GPU is needed.",
)
choice = occupancy_choice.choose(controls)
links.show("machine_code", occupancy_choice.subject_of(choice))
machine_code_view.show(choice, controls, palette)
machine_code_banks.show(choice, controls, palette)
machine_code_scores.show(controls)
controls.finish()
