"""The dashboard: where the time of a kernel goes.

``server.py`` is the served application, ``app.py`` the script that Streamlit runs for each visitor. ``screens`` are the
pages, ``views`` their parts (controls and sentences), ``charts`` functions from data to Plotly figures. ``model`` has
the data, from the planner, schedules, occupancy calculator and records of the API and the command line. ``worker`` runs
benchmarks in separate processes. The ``.md`` files are prose that pages fill with numbers. The import name is
``cufa.dashboard``, also in a checkout (:func:`cufa.commands.dashboard.make_importable`)."""
