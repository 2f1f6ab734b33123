"""The run engine: one worker process a device, and a folder a run that everyone else reads.

``jobs`` is what can be asked for, ``store`` the folders, ``reading`` what one of them holds, ``run`` what comes of
that, ``serve`` the worker's process, ``measuring`` what it does with one job, ``client`` what the application calls.
All timing is :mod:`cufa.measure`'s. Nothing here imports Streamlit.

The folder of a run is the only thing that application and worker share, so a reloaded page, a second browser
and a restarted application all see the same runs:

    request.json     what was asked for
    started.json     a worker has taken it
    progress.jsonl   one event a line, rows of results among them: they outlive whatever happens to the worker
    record.json      the finished record, as `cufa bench --json` prints it (all of it, or no file)
    outcome.json     how it ended
    cancel           somebody wants it to stop
    lock             held by the worker while it runs: the system drops the lock when the worker dies, however
    log.txt          stderr of the worker meanwhile
"""
