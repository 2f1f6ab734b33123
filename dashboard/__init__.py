"""The dashboard: why a kernel takes the time it takes.

``app.py`` is what Streamlit runs. ``screens`` are the pages, ``views`` the parts they are made of (controls
and words), ``charts`` functions from data to Plotly figures, ``model`` the data: all of it from the same
planner, schedule, occupancy calculator and records as the API and the command line. Imported as
``cufa.dashboard``, in a checkout too
(:func:`cufa.commands.dashboard.make_importable`).
"""
