"""Compare: kernels against sequence length, and published results reproduced here."""

from cufa.dashboard import engine, page
from cufa.dashboard.views import compare_error, compare_known, compare_two, compare_view, run_live

controls, palette = page.begin(
    "compare",
    "Compare",
    "Kernels against sequence length, from runs on this machine and from recorded measurements. Below: published "
    "results, and the same measurements on this machine.",
)
measured = engine.all_measurements()
engine.show_problems()
chosen = []
if measured:
    chosen = compare_view.choose_machine(controls, measured)
    compare_view.show_lengths(controls, chosen, palette)
    compare_two.show(controls, measured, palette)
    compare_error.show(controls, measured, palette)
else:
    page.verdict(
        "Nothing is measured yet: start a run on the page Run, or measure a published table below.", "warn"
    )
compare_known.show(controls, measured, chosen, palette)
controls.finish()
run_live.watch(engine.store().active())
