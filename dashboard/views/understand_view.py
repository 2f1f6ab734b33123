"""Understand: the choice of a case, its walkthrough, and the same byte counts at a real size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import walkthrough, walkthrough_backward, walkthrough_fa3
from cufa.dashboard.charts.work import si
from cufa.dashboard.model import own_rows, source, traffic_steps
from cufa.dashboard.model import walkthrough_fa3 as fa3
from cufa.dashboard.model import walkthrough_words as words
from cufa.dashboard.model.walkthrough import BLOCK, BLOCKS, DECODE_TILES, Case, Walk, walk
from cufa.dashboard.model.walkthrough_backward import ALGORITHM as BACKWARD
from cufa.dashboard.model.walkthrough_backward import BackwardWalk, walk_backward
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import PALETTES, Palette
from cufa.dashboard.views import understand_why
from cufa.gpu.architectures import Device
from cufa.measure.cases import of_forward
from cufa.measure.suites import make
from cufa.plan.planner import make_plan

_STEP = "understand.walk"
_ORDERS = {
    "fa2": "FA2: queries outside",
    "fa1": "FA1: keys outside",
    "fa3": "FA3: producer and consumers",
    "decode": "Flash-Decoding: keys split",
    BACKWARD: "FA2 backward: keys outside",
}
_MASKS = {"full": "full", "causal": "causal", "window": "window of 10 keys"}
_SPLITS = ("1", "2", "4", "8")
_STAGES = ("1", "2", "3")
_LENGTH, _HEAD_DIM = 4096, 128
_KEYS = "When the figure has the focus, the arrow keys step and the space bar plays."


def choose(controls: Controls) -> Case:
    """Algorithm, mask and seed."""
    with page.control_box():
        algorithm = controls.choice("algorithm", "Algorithm and loop order", _ORDERS, segmented=True)
        places, mask, splits = page.fields(2.2, 1, 3.4), "full", "4"
        if algorithm == "decode":
            splits = controls.choice("splits", "Splits", _SPLITS, "4", segmented=True, at=places[0])
        elif algorithm == "fa3":
            stages = "Stages of each ring"
            splits = controls.choice("stages", stages, _STAGES, "2", segmented=True, at=places[0])
        else:
            help = sentences.of_masks(_MASKS)
            mask = controls.choice("mask", "Mask", _MASKS, segmented=True, at=places[0], help=help)
        seed = 0
        if algorithm != "fa3":
            help = "For the random Q, K and V (and dO)."
            seed = controls.integer("seed", "Seed", 0, 0, 9999, help=help, at=places[1])
        case = Case(algorithm, mask, seed, int(splits))
        return case if algorithm == "fa3" else _add_own_rows(controls, case, places[2])


def _add_own_rows(controls: Controls, case: Case, at: DeltaGenerator) -> Case:
    """The case with the visitor's first rows of Q and K. ``at``: the place of the switch."""
    if not controls.flag("own", "Your own Q and K", at=at):
        return case
    given = {}
    for name, place in zip("QK", st.columns(2), strict=True):
        with place:
            form = own_rows.read, own_rows.write, own_rows.WANTED, own_rows.HELP
            given[name] = controls.text(name.lower(), f"First rows of {name}", "", *form)
    q, k = (1, DECODE_TILES) if case.algorithm == "decode" else (BLOCKS, BLOCKS)
    size = {"Q": q * BLOCK, "K": k * BLOCK}
    used = (f"{min(len(rows), size[name])} of {size[name]} rows of {name}" for name, rows in given.items())
    st.caption(f"{' and '.join(used)} are yours; the others are random.")
    return dataclasses.replace(case, Q=given["Q"], K=given["K"])


@functools.lru_cache(128)
def _walk(case: Case) -> Walk | BackwardWalk:
    return walk_backward(case) if case.algorithm == BACKWARD else walk(case)


@functools.lru_cache(128)
def _data(case: Case, palette_name: str) -> dict[str, Any]:
    palette = PALETTES[palette_name]
    if case.algorithm == "fa3":
        return walkthrough_fa3.data(case.parts, palette)
    steps = _walk(case)
    if isinstance(steps, BackwardWalk):
        return walkthrough_backward.data(steps, palette)
    return walkthrough.data(steps, palette)


@st.fragment
def show_walk(case: Case, controls: Controls, palette: Palette) -> None:
    """The component plays by itself; the step where it stops goes into the link."""
    content = _data(case, palette.name)
    start = controls.kept("step", 1, 1, len(content["steps"]))
    page.verdict(_verdict(case))
    content = {**content, "start": start}
    walkthrough.show(content, _STEP, lambda: _take_step(controls))
    if case.algorithm != "fa3" and isinstance(steps := _walk(case), Walk):
        understand_why.show(steps, start - 1, palette)
    controls.write_link()


def _take_step(controls: Controls) -> None:
    step = st.session_state[_STEP].get("step")
    if step is not None:
        controls.set("step", int(step))


def _verdict(case: Case) -> str:
    """Bytes moved, against the alternative. FA3: use of the tensor cores."""
    if case.algorithm == "fa3":
        (computing, units), (alone, of) = (fa3.busy(fa3.pipeline(case.parts, n)) for n in (fa3.CONSUMERS, 1))
        return (
            f"Ping-pong: one consumer has the tensor cores while the other computes its softmax. In this model they "
            f"compute {computing / units:.0%} of the time; with one consumer, {alone / of:.0%}."
        )
    result = _walk(case)
    moved = {name: sum(traffic_steps.total(iter(steps))) for name, steps in result.meters.items()}
    own = result.case.algorithm
    if own == BACKWARD:
        more = moved["naive_backward"] / moved[own]
        return (
            f"The backward recomputes P. Without a cache, {moved[own]:,} B would pass through device memory; with a "
            f"stored P, {more:.1f} times as much."
        )
    if result.is_decode:
        blocks = len({step.thread_block for step in result.steps})
        if blocks == 1:
            return f"One thread block reads all {result.schedule.num_kv_blocks} tiles of keys in sequence."
        more = moved["decode"] / moved["whole"]
        steps = max(step.number for step in result.steps)
        return (
            f"{blocks} thread blocks at the same time: {steps} steps instead of {result.schedule.num_kv_blocks}, but "
            f"{more:.1f} times the bytes in this small case."
        )
    return (
        f"Without a cache, {words.ALGORITHMS[own]} would move {moved[own]:,} B through device memory; naive attention "
        f"{moved['naive']:,} B, {moved['naive'] / moved[own]:.1f} times as much."
    )


def show_lines(case: Case) -> None:
    """Source lines of the GPU kernel for each phase."""
    phases = source.PHASES[case.algorithm]
    name = words.ALGORITHMS[case.algorithm]
    with st.expander(f"The source lines of cufa's {name} kernel for these phases", icon=":material/code:"):
        for tab, excerpt in zip(st.tabs(list(phases)), phases.values(), strict=True):
            with tab:
                page.show_lines([excerpt])


def show_real_size(case: Case) -> None:
    """The same byte counts for one head of a real size."""
    departs = sentences.sections("understand.md")[f"departs {case.algorithm}"][1]
    if not (is_backward := case.algorithm == BACKWARD) and case.algorithm not in traffic_steps.MODELS:
        st.caption(f"{departs} {_KEYS}")
        return
    moved = real_size("backward" if is_backward else "forward")
    most = max(moved.values())
    texts = ", ".join(
        f"**{words.ALGORITHMS[name]} {si(count, 'B')}**"
        + (f" (1/{most / count:.0f})" if count < most else "")
        for name, count in moved.items()
    )
    st.caption(
        f"The same counts for one head of {_LENGTH:,} queries and keys, head dim {_HEAD_DIM}, with the kernels' tiles "
        f"on an H100: {texts}. These are bytes that thread blocks request: the L2 cache serves most repeated reads, so "
        f"that fewer pass through device memory. {departs} Inputs have 2 bytes per number. {_KEYS}"
    )


@functools.cache
def real_size(operation: str) -> dict[str, int]:
    """Bytes read and written per head, by algorithm."""
    problem, is_backward = make(1, 32, _LENGTH, _HEAD_DIM, "bfloat16"), operation == "backward"
    if is_backward:
        problem = of_forward(problem)
    sizes = {}
    for name, model in (traffic_steps.BACKWARD_MODELS if is_backward else traffic_steps.MODELS).items():
        plan = make_plan(problem, Device.typical("sm_90"), "fa2" if is_backward else name)
        sizes[name] = sum(traffic_steps.total(model(problem, plan.schedule)))
    return sizes
