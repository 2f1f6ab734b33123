"""Exercises: small tasks, each graded by cufa's planner or executor."""

from cufa.dashboard import page
from cufa.dashboard.views import exercises_view

controls, palette = page.begin(
    "exercises",
    "Exercises",
    "Small tasks on what Understand shows. cufa's planner, its simulation of a card or its executor grades each answer "
    "on this machine, without a GPU. A wrong answer shows why.",
)
exercises_view.show(controls, palette)
controls.finish()
