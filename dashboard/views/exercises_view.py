"""Exercises: the task, the answer's controls, and the verdict of the grader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import streamlit as st

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import cells
from cufa.dashboard.charts.timeline import describe_timeline, timeline_figure
from cufa.dashboard.model import exercises, exercises_executed
from cufa.dashboard.model.exercises import BLOCK, Verdict
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.run.emulate.build import CompilerError

_PASSED = "exercises.passed"
Answer = tuple[Any, ...]


def _one_of(label: str, options: tuple[Any, ...], key: str) -> Any:
    return st.segmented_control(label, options, default=options[0], required=True, key=f"exercises.{key}")


def _ask_tiles(palette: Palette) -> Answer:
    blocks = range(exercises.TOKENS // BLOCK)
    spans = [f"{i * BLOCK}–{(i + 1) * BLOCK - 1}" for i in blocks]
    for i in blocks:
        label = f"Query block {i}, queries {spans[i]}: keys to compute"
        st.pills(
            label, blocks, selection_mode="multi", key=f"exercises.row.{i}", format_func=spans.__getitem__
        )
    return tuple(tuple(sorted(st.session_state[f"exercises.row.{i}"])) for i in blocks)


def _ask_order(palette: Palette) -> Answer:
    names = list(exercises.STEPS)
    words = exercises.STEPS.__getitem__
    places = range(len(names))
    return tuple(st.selectbox(f"Step {n + 1}", names, n, words, key=f"exercises.step.{n}") for n in places)


def _ask_race(palette: Palette) -> Answer:
    before, after = exercises_executed.excerpt()
    options = ["", *exercises_executed.STATEMENTS]
    st.code(before, language="cpp")
    answer = []
    for n, planted in enumerate(exercises_executed.PLANTED):
        at, key = options.index(planted), f"exercises.line.{n}"
        answer.append(st.selectbox(f"Line {n + 1}", options, at, lambda x: x or "(nothing)", key=key))
    st.code(after, language="cpp")
    return tuple(answer)


def _ask_swizzle(palette: Palette) -> Answer:
    bits = _one_of("How many bits", (0, 1, 2, 3), "bits")
    base = _one_of("Lowest bit that changes", (4, 5, 6), "base")
    shift = _one_of("XORed with the bits this many places higher", (1, 2, 3, 4), "shift")
    units, names = exercises_executed.banks(bits, base, shift), [str(n) for n in range(8)]
    shown = [[(palette.scale[1] if x == 0 else palette.idle, str(x)) for x in row] for row in units]
    alt = "Banks of each unit: " + "; ".join(f"row {n}: {row}" for n, row in enumerate(units))
    st.html(cells.picture(shown, alt, palette, 30, [f"row {n}" for n in names], names))
    st.caption(
        "Columns are the units of a row. Number n: the unit lies in banks 4 n to 4 n + 3. `ldmatrix` reads one column."
    )
    return bits, base, shift


def _ask_ragged(palette: Palette) -> Answer:
    long = _one_of(f"Splits of the sequence of {exercises.CACHED[0]:,} keys", exercises.SPLITS, "long")
    short = _one_of(f"Splits of each sequence of {exercises.CACHED[1]:,} keys", exercises.SPLITS, "short")
    line = exercises.split_timeline(long, short)
    page.figure(timeline_figure(line, palette, 300), "exercises.ragged", describe_timeline(line))
    return long, short


_ASK: dict[str, tuple[Callable[[Palette], Answer], Callable[[Any], Verdict]]] = {
    "tiles": (_ask_tiles, lambda answer: exercises.tiles(dict(enumerate(answer)))),
    "order": (_ask_order, exercises.order),
    "tile": (
        lambda _: (_one_of("Query rows × keys", tuple(exercises.TILES), "tile"),),
        lambda x: exercises.tile(*x),
    ),
    "race": (_ask_race, exercises_executed.race),
    "swizzle": (_ask_swizzle, lambda x: exercises_executed.swizzle(*x)),
    "ragged": (_ask_ragged, exercises.ragged),
}
"""By exercise: a function that shows the controls and returns the answer, and its grader."""


@functools.cache
def tasks() -> dict[str, tuple[str, str]]:
    """Title and task by name, from exercises.md."""
    cached = ", ".join(f"{n:,}" for n in exercises.CACHED)
    numbers = vars(exercises) | {"CACHED": cached, "KERNEL": exercises_executed.KERNEL}
    sections = sentences.sections("exercises.md")
    return {name: (title, task.format(**numbers)) for name, (title, task) in sections.items()}


def show(controls: Controls, palette: Palette) -> None:
    """The exercise that the control selects."""
    titles = {name: title for name, (title, _) in tasks().items()}
    with page.control_box():
        name = controls.choice("exercise", "Exercise", titles, segmented=True)
    passed, place = st.session_state.setdefault(_PASSED, set()), st.container()
    ask, grade = _ASK[name]
    page.header(titles[name])
    st.markdown(tasks()[name][1])
    answer, checked = ask(palette), f"exercises.checked.{name}"
    if st.button("Check my answer", key=f"exercises.check.{name}", icon=":material/check:", type="primary"):
        st.session_state[checked] = answer
    if st.session_state.get(checked) == answer:
        try:
            verdict = grade(answer)
        except CompilerError as error:
            verdict = Verdict(False, str(error))
        if verdict.right:
            passed.add(name)
            st.success(f"Right. {verdict.why}", icon=":material/check_circle:")
        else:
            st.error(f"Not yet. {verdict.why}", icon=":material/lightbulb:")
    with place:
        done = ", ".join(titles[x] for x in titles if x in passed)
        text = f"{len(passed)} of {len(titles)} solved"
        page.verdict(f"{text}: {done}." if done else f"{text}. Any order will do.", "good" if done else "")
