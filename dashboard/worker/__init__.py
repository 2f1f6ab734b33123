"""The run engine: one worker process per device, and one folder per run.

``jobs`` are requests, ``store`` the folders, ``reading`` reads a folder, ``run`` is the result. ``serve`` is the
worker's process, ``measuring`` runs one job, ``client`` is the application's side. :mod:`cufa.measure` does all timing.
This package does not import Streamlit.

Application and worker share only the folder of a run: a reloaded page, a second browser and a restarted application see
the same runs.

    request.json     the job
    started.json     a worker has taken the run
    progress.jsonl   one event per line, including result rows, which survive a crash of the worker
    record.json      the finished record in the format of `cufa bench --json` (complete, or no file)
    outcome.json     how the run ended
    cancel           a request to stop
    lock             held by the worker during the run; the system releases it when the worker dies
    log.txt          stderr of the worker during the run
"""
