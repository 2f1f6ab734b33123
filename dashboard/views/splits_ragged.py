"""The page Decode: a batch of different lengths, in fixed splits or in shares of all tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import timeline as timeline_charts
from cufa.dashboard.model import splits
from cufa.dashboard.model.asked import Asked, figures, unlike, where
from cufa.dashboard.model.launch import Blocks
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.split_time import load_of
from cufa.dashboard.model.splits import Batch, Split
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import rates_view
from cufa.dashboard.views.splits_view import Choice, kind, reading_of
from cufa.dashboard.worker.jobs import Job
from cufa.measure.cases import READ, Case, Contender, contenders
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem


def show(choice: Choice, controls: Controls, measured: Sequence[Measurement], palette: Palette) -> None:
    """Fixed splits against shares: predicted, and measured if available."""
    page.header("A ragged batch")
    left, right, _ = page.fields(1.4, 1.2, 2)
    default = max(8, choice.problem.batch)
    size = controls.integer("ragged", "Sequences of different length", default, 2, 512, at=left)
    spread = controls.integer("spread", "Longest ÷ shortest", 16, 1, 1024, at=right)
    cache = dataclasses.replace(choice.problem.cache, given=True)
    problem = dataclasses.replace(choice.problem, batch=size, lengths=cache)
    plans = {s: choice.plan(s, problem) for s in ("fixed", "balanced")}
    lengths = splits.ragged(size, problem.seqlen_k, spread)
    batch = Batch.of(plans["balanced"], lengths, choice.overhead)
    fixed, launches = _launches(batch, plans["balanced"].num_splits)
    cuts = {name: splits.evaluate(batch, blocks, 0) for name, blocks in launches.items()}
    gain = cuts["fixed"].span / cuts["balanced"].span
    page.verdict(_verdict(choice, problem, lengths, fixed, cuts), tag="predicted", small=True)
    st.caption(
        f"{size} sequences of {min(lengths):,} to {max(lengths):,} cached tokens, drawn log-uniformly with a "
        f"fixed seed. The planner takes {kind(choice.plan(problem=problem))}: the lengths are on the device, so the "
        "planner cannot know the best fixed split. The prediction assumes equal read rates of all SMs; on a card the "
        "rates differ, which shares of two sizes compensate."
    )
    titles = {
        "fixed": f"Fixed: {fixed} splits per sequence, the best number",
        "balanced": f"Balanced: {cuts['balanced'].blocks:,} shares",
    }
    for column, (name, blocks) in zip(st.columns(2), launches.items(), strict=True):
        with column:
            page.header(titles[name], small=True)
            line = splits.timeline(batch, blocks)
            alt = timeline_charts.describe_timeline(line)
            page.figure(timeline_charts.timeline_figure(line, palette, 320), f"decode.{name}", alt)
            share = cuts[name].fill
            st.caption(f"{cuts[name].blocks:,} thread blocks, {share:.0%} of the places' time on tiles.")
    fixed_splits = Contender("fixed", name=f"fixed, {fixed} splits", num_splits=fixed)
    entrants = (
        Contender("balanced"),
        Contender("fixed"),
        *([fixed_splits] if fixed != plans["fixed"].num_splits else []),
        *contenders(READ),
    )
    title = f"{size} ragged × {problem.heads_text}, {min(lengths):,} to {max(lengths):,}"
    case = Case(problem, entrants, title, lengths)
    _show_measured(figures(measured, Asked(problem, card=choice.device.name)), case, gain, choice, palette)
    job = Job(title, rates_view.first_device(), (case,), 1.0)
    rates_view.offer("Measure both on the GPU", "decode.measure.ragged", job, choice.config is None)


def _verdict(
    choice: Choice, problem: Problem, lengths: tuple[int, ...], fixed: int, cuts: dict[str, Split]
) -> str:
    """The faster split by the prediction; without predicted times, the tiles of the busiest place."""
    plan = choice.plan("balanced", problem)
    shares, named = sentences.count(cuts["balanced"].blocks, "share"), f"the best fixed split ({fixed})"
    reading = reading_of(plan)
    if reading is None:
        more = cuts["fixed"].span / cuts["balanced"].span
        return f"With {named} the busiest place has {more:.2f}× as many tiles as with {shares}."
    cut = make_plan(problem, choice.device, "fixed", choice.config, num_splits=fixed)
    slow, fast = (reading.seconds(load_of(split, lengths)) for split in (cut, plan))
    times = f"{seconds_text(fast)} against {seconds_text(slow)}"
    if slow / fast > 1 + reading.error:
        return f"{shares} take {times} with {named}: {slow / fast:.2f}× faster."
    if fast / slow > 1 + reading.error:
        return f"{shares} take {times} with {named}, which is {fast / slow:.2f}× faster."
    return f"{shares} take {times} with {named}: no difference within the error of {reading.error:.0%}."


@st.cache_data(max_entries=64, show_spinner=False)
def _launches(batch: Batch, shares: int) -> tuple[int, dict[str, Blocks]]:
    """The best fixed split, and both launches."""
    curve = splits.split_curve(batch, splits.candidates(min(64, max(batch.tiles)), dense=8))
    best = splits.best(curve).splits
    fixed = splits.fixed_blocks(batch, best)
    return best, {"fixed": fixed, "balanced": splits.balanced_blocks(batch, shares)}


def _show_measured(
    measured: Sequence[Measurement], case: Case, predicted: float, choice: Choice, palette: Palette
) -> None:
    """The first measurement of exactly this batch."""
    same = [m for m in measured if m.lengths == case.lengths and m.split]
    rows = [m for m in same if m.group == same[0].group]
    if {m.split.kind for m in rows if m.split} == {"fixed", "balanced"}:
        text, tone = measured_verdict(rows, predicted)
        other = unlike(choice.device.name, rows[0].machine, rows[0].recorded)
        text = f"{other}. {text}" if other else text
        page.verdict(f"{text} ({where(rows)}).", tone, page.origin_tag(rows[0].origin), small=True)
        rates_view.show_figure(rows, "decode.ragged.measured", palette)


def measured_verdict(rows: Sequence[Measurement], predicted: float) -> tuple[str, str]:
    """Sentence and tone. ``predicted``: the best fixed split's time over the shares' time."""
    shares = next(m for m in rows if m.split and m.split.kind == "balanced")
    fixed = min((m for m in rows if m.split and m.split.kind == "fixed"), key=lambda m: m.seconds)
    assert fixed.split is not None
    gain = fixed.seconds / shares.seconds
    faster, slower, ratio = (shares, fixed, gain) if gain >= 1 else (fixed, shares, 1 / gain)
    names = {shares.label: "shares", fixed.label: f"the best fixed split timed ({fixed.split.count})"}
    read = f"{faster.of_read:.0%} against {slower.of_read:.0%} of a plain read"
    text = f"{names[faster.label]} {'are' if faster is shares else 'is'} {ratio:.2f}× faster than "
    text = f"{text}{names[slower.label]}: {seconds_text(faster.seconds)}, {read}"
    disagree = (gain - 1) * (predicted - 1) < 0 and min(abs(gain - 1), abs(predicted - 1)) > 0.02
    text = text[0].upper() + text[1:] + (". The prediction says otherwise" if disagree else "")
    return text, "warn" if disagree else ""
