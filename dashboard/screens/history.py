"""History: runs and recorded measurements, the difference between two, and downloads."""

from cufa.dashboard import engine, page
from cufa.dashboard.views import history_over_time, history_regressions, history_runs, history_view

controls, palette = page.begin(
    "history",
    "History",
    "All measurements of this machine, and recorded measurements of other machines. Choose two to compare them.",
)
measured = engine.all_measurements(listed=True)
runs = engine.all_runs()
engine.show_problems()
rows = history_view.choose_rows(controls, measured) if measured else []
if rows:
    history_view.show_table(rows)
    history_runs.show_ended(runs)
    history_view.show_difference(controls, rows, palette)
    history_over_time.show(controls, rows, palette)
    history_regressions.show(controls, measured)
else:
    text = (
        "No measurement matches these filters."
        if measured
        else "Nothing is measured yet: start a run on the page Run."
    )
    page.verdict(text, "warn")
    history_runs.show_ended(runs)
controls.finish()
if rows:
    history_view.show_downloads(rows)
history_runs.show_kept(runs)
