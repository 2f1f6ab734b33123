"""Run: time kernels on this machine in a separate process; times and errors."""

from cufa.dashboard import engine, page
from cufa.dashboard.views import links, run_controls, run_live, run_result

controls, palette = page.begin(
    "run",
    "Run",
    "Time kernels side by side on this machine. A run continues when this page is closed. Each device runs one job at "
    "a time; other jobs wait.",
)
runs = engine.all_runs()
job = run_controls.choose(controls)
if job.cases:
    links.show("run", run_controls.subject_of(job))
run_live.show_start(job, runs, controls.refused)
run_live.watch(runs, palette)
left, right = page.fields(5, 1.1)
run = run_live.choose_run(controls, runs, left)
zoomed = controls.flag(
    "zoom", "Zoom in", help="The axis begins at the fastest call and omits outliers.", at=right
)
measured = run_result.choose_shape(controls, run)
controls.finish()
if run is None:
    run_live.show_first_steps()
else:
    run_live.explain_end(run)
    run_result.show(measured, run, zoomed, palette)
