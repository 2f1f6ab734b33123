"""The dashboard: where the time of a kernel goes.

``server.py`` is the served application, ``app.py`` the script that Streamlit runs for each visitor. ``screens`` are the
pages, ``views`` their parts (controls and sentences), ``charts`` functions from data to Plotly figures. ``model`` has
the data, from the planner, schedules, occupancy calculator and records of the API and the command line. ``worker`` runs
benchmarks in separate processes. The ``.md`` files are prose that pages fill with numbers. The import name is
``cufa.dashboard``, also in a checkout (:func:`cufa.commands.dashboard.make_importable`)."""

#: File under ``screens``, title and icon of each page, in the order of the sidebar. Pages are files because Streamlit's
#: AppTest can only switch to files. The folder is not named ``pages``: Streamlit would run its files without this
#: script when a browser opens one of them first.
PAGES = (
    ("understand", "Understand", "school"),
    ("exercises", "Exercises", "fitness_center"),
    ("run", "Run", "play_arrow"),
    ("masked_work", "Masked work", "grid_on"),
    ("compare", "Compare", "show_chart"),
    ("occupancy", "Occupancy", "stacks"),
    ("machine_code", "Machine code", "code"),
    ("roofline", "Roofline", "roofing"),
    ("decode", "Decode", "call_split"),
    ("parallel", "Several GPUs", "hub"),
    ("history", "History", "history"),
    ("doctor", "Doctor", "stethoscope"),
)
