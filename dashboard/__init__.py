"""The dashboard: why a kernel takes the time it takes.

``server.py`` is what is served, ``app.py`` the script that Streamlit runs for every visitor. ``screens`` are
the pages, ``views`` the parts they are made of (controls and words), ``charts`` functions from data to Plotly
figures, ``model`` the data: all of it from the same planner, schedules, occupancy calculator and records as
the API and the command line; ``worker`` runs benchmarks in processes of their own. Imported as
``cufa.dashboard``, in a checkout too (:func:`cufa.commands.dashboard.make_importable`).
"""
