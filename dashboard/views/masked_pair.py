"""Masked work: a second algorithm, mask or tiling, for the same shape on the same card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import pair as charts
from cufa.dashboard.charts.timeline import describe_timeline
from cufa.dashboard.charts.work import si
from cufa.dashboard.model import counters, pair, work
from cufa.dashboard.model.asked import Asked, together, unlike, where
from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.model.launch import Timeline, algorithms
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.trace import measured_timeline
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import inside_traces, mask_editor, masked_grid
from cufa.dashboard.views.masked_controls import ALGORITHM_WORDS, MOST_THREAD_BLOCKS, View, choose_config
from cufa.dashboard.views.masked_sms import TRACE_TIME
from cufa.measure.costs import cost_on
from cufa.measure.regimes import Regime
from cufa.schedule.schedule import Schedule

_flop, _bytes = functools.partial(si, unit="FLOP"), functools.partial(si, unit="B")
_PREFIX = "b_"
"""Prefix of the second controls in links."""


def choose_other(controls: Controls, view: View) -> View | None:
    """The second view; None if there is none."""
    help = "Two algorithms, masks or tilings, same shape."
    if not controls.flag("two", "Compare with a second one", help=help):
        return None
    with st.container(border=True, key="controls-beside"):
        first, controls = controls, controls.second(_PREFIX)
        known = algorithms(view.problem.operation, view.problem.dtype, view.problem.head_dim)
        specs = {name: spec for name, spec in known.items() if spec.runs_on(view.device.arch.capability)}
        words = {name: ALGORITHM_WORDS.get(name, name) for name in specs}
        default = next((name for name in reversed(specs) if name != view.algorithm), view.algorithm)
        algorithm = controls.choice("alg", "Second algorithm", words, default, segmented=True)
        lengths = view.problem.seqlen_q, view.problem.seqlen_k
        mask, softcap = mask_editor.choose(controls, *lengths, like=first)
        problem = dataclasses.replace(view.problem, mask=mask, softcap=softcap)
        config = choose_config(controls, problem, specs[algorithm], view.device)
    spec = specs[algorithm]
    schedule = Schedule.of(problem, config.block_q, config.block_kv, spec.skip_masked_tiles)
    return View(problem, schedule, algorithm, spec, config, view.device)


def show(view: View, other: View, palette: Palette) -> None:
    """Both views on one axis, and their numbers."""
    sides, names = (view, other), _names(view, other)
    if not (view.schedule.visited and other.schedule.visited):
        page.verdict("In one view, no key is visible to any query: there is nothing to compare.", "warn")
        return
    lines = _predicted(sides)
    page.verdict(_verdict(sides, names, lines), tag="predicted" if lines else "")
    for side in sides:
        masked_grid.show_refusal(side)
    card, turns = view.device.name, Regime.IN_TURNS
    both = [Asked(x.problem, x.spec.name, x.config, turns, card) for x in sides]
    times = together(engine.all_measurements(), both)
    _say_measured(times, names, card)
    alt = "Two grids of tiles in queries (downwards) and keys (to the right). " + " ".join(
        f"{name}: {x.schedule.visited:,} of {x.schedule.total:,} tiles are computed under the mask {x.schedule.mask}."
        for name, x in zip(names, sides, strict=True)
    )
    page.figure(charts.grids(names, [x.schedule for x in sides], palette), "masked.pair.grids", alt)
    st.dataframe(_table(sides, names, lines, times), hide_index=True, height="content")
    st.caption(
        "**Compulsory bytes**: every operand once, the minimum for device memory. **Bytes requested from L2**: reads "
        "and writes of the tiles of all thread blocks, hits and misses; counted from the kernel's loops."
    )
    _show_timelines(sides, names, lines, palette)
    inside_traces.show_pair(sides, names, palette)


def _names(view: View, other: View) -> list[str]:
    """Names of the two views by their differences."""
    names = []
    for x in (view, other):
        words = [f"{ALGORITHM_WORDS.get(x.algorithm, x.algorithm)} {x.config.block_q}×{x.config.block_kv}"]
        words += [x.problem.scores_text] * (view.problem.scores_text != other.problem.scores_text)
        names.append(", ".join(words))
    if names[0] == names[1] and str(view.config) != str(other.config):
        names = [f"{name}, {x.config}" for name, x in zip(names, (view, other), strict=True)]
    return names if names[0] != names[1] else [f"{names[0]} (left)", f"{names[1]} (right)"]


def _predicted(sides: tuple[View, View]) -> list[Timeline]:
    """Both launches on one axis; empty if one launch is too large for a simulation."""
    if any(len(x.blocks) > MOST_THREAD_BLOCKS for x in sides):
        return []
    return [pair.in_arithmetic(x.predicted, x.problem, x.schedule, x.config.blocks_of_item) for x in sides]


def _verdict(sides: tuple[View, View], names: list[str], lines: list[Timeline]) -> str:
    first, second = (work.work(x.problem, x.schedule).done for x in sides)
    text = f"{names[1]} does {_times(second / first)} the arithmetic of {names[0]}"
    if first == second:
        text = f"{names[0]} and {names[1]} do the same arithmetic"
    if not lines:
        return f"{text}."
    return f"{text}; at equal rates per SM it ends {_ends(lines[1].span / lines[0].span)}."


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if abs(ratio - 1) >= 0.005 else f"{ratio:.4g}×"


def _ends(ratio: float) -> str:
    if abs(ratio - 1) < 0.005:
        return "at the same time"
    return f"{1 / ratio:.2f}× sooner" if ratio < 1 else f"{ratio:.2f}× later"


def _say_measured(times: list[Measurement], names: list[str], card: str) -> None:
    """Times of both from one run, if available; times of another card name it first."""
    if not times:
        return
    first, second = (m.seconds for m in times)
    ratio = first / second
    text = f"{names[1]} takes {seconds_text(second)}, {names[0]} {seconds_text(first)}: "
    text += f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"
    text += f" ({where(times)}, {times[0].regime})."
    if other := unlike(card, times[0].machine, times[0].recorded):
        text = f"{other}: {text}"
    page.verdict(text, "warn" if other else "", page.origin_tag(times[0].origin), small=True)


def _table(
    sides: tuple[View, View], names: list[str], lines: list[Timeline], times: list[Measurement]
) -> list[dict[str, str]]:
    """One line per quantity."""
    done = [work.work(x.problem, x.schedule) for x in sides]
    costs = [cost_on(x.problem, x.spec, x.config) for x in sides]
    moved = [cost.l2 for cost in costs if cost is not None]
    rows: list[tuple[str, Sequence[float], Callable[[float], str]]] = [
        ("tiles of a head", [x.schedule.visited for x in sides], "{:,.0f}".format),
        ("FLOP done", [w.done for w in done], _flop),
        ("FLOP useful", [w.useful for w in done], _flop),
        ("FLOP wasted", [w.waste for w in done], _flop),
        ("compulsory bytes", [x.problem.io_bytes for x in sides], _bytes),
    ]
    if len(moved) == len(sides):
        per_byte = [w.done / t for w, t in zip(done, moved, strict=True)]
        rows += [("bytes requested from L2", moved, _bytes)]
        rows += [("FLOP per byte requested", per_byte, "{:,.0f}".format)]
    takers = [x.blocks.thread_block for x in sides]
    launched = [
        len(x.blocks) if t is None else int(t.max(initial=-1)) + 1 for x, t in zip(sides, takers, strict=True)
    ]
    rows += [("thread blocks", launched, "{:,.0f}".format)]
    if lines:
        rows += [("SM time idle at the end, predicted", [t.tail for t in lines], sentences.share)]
        rows += [("end of the last block, predicted", [t.span for t in lines], _flop)]
    if times:
        on = "" if is_same_card(times[0].machine, sides[0].device.name) else f" on {times[0].machine}"
        rows += [(f"time, {page.origin_tag(times[0].origin)}{on}", [m.seconds for m in times], seconds_text)]
    return [_line(quantity, names, values, words) for quantity, values, words in rows]


def _line(
    quantity: str, names: list[str], values: Sequence[float], words: Callable[[float], str]
) -> dict[str, str]:
    first, second = values
    ratio = f"{second / first:.2f}×" if first else "–"
    return {"": quantity, names[0]: words(first), names[1]: words(second), "right ÷ left": ratio}


def _show_timelines(
    sides: tuple[View, View], names: list[str], lines: list[Timeline], palette: Palette
) -> None:
    page.header("On the SMs")
    if not lines:
        text = f"More than {MOST_THREAD_BLOCKS:,} thread blocks are not simulated."
        page.verdict(text, "warn", small=True)
        return
    page.verdict(_idle(lines, names), tag="predicted", small=True)
    page.figure(charts.timelines(names, lines, palette), "masked.pair.predicted", _describe(names, lines))
    st.caption(
        "Both timelines share one axis: the arithmetic that an SM could have done until then, in whole tiles. The axis "
        "ignores the speed of each kernel. A stronger colour means more tiles per thread block."
    )
    traces = [counters.matching_trace(x.problem, x.spec.name, x.config, x.device) for x in sides]
    known = [t for t in traces if t is not None and t.is_of(sides[0].device)]
    if len(known) < len(sides) or known[0].card != known[1].card:
        missing = [name for name, t in zip(names, traces, strict=True) if t is None or t not in known]
        page.not_measured(
            f"no trace of {sentences.listed(missing) or 'both on one card'} is recorded for this card."
        )
        return
    both = zip(known, sides, strict=True)
    runs = [measured_timeline(t.trace.records, t.trace.num_sms, x.whole_heads) for t, x in both]
    text = f"{names[1]} ends after {runs[1].span:,.0f} µs, {names[0]} after {runs[0].span:,.0f} µs"
    text += f". {_idle(runs, names)}" if all(t.has_every_block for t in known) else "."
    page.verdict(text, "", page.origin_tag(known[0].origin), small=True)
    page.figure(charts.timelines(names, runs, palette), "masked.pair.measured", _describe(names, runs))
    st.caption(
        f"{known[0].card}, {known[0].trace.environment['recorded'][:10]}: start, end and SM of each thread block, "
        f"written by trace builds of the kernels. {TRACE_TIME}"
    )


def _idle(lines: list[Timeline], names: list[str]) -> str:
    parts = [f"{sentences.share(t.tail)} in {name}" for t, name in zip(lines, names, strict=True)]
    return f"SM time idle at the end is {sentences.listed(parts)}."


def _describe(names: list[str], lines: list[Timeline]) -> str:
    parts = [f"{name}: {describe_timeline(t)}" for name, t in zip(names, lines, strict=True)]
    return "Two timelines on one axis, one above the other. " + " ".join(parts)
