"""The page Decode: a batch of sequences of different lengths, cut alike or in shares of all the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from cufa.bench.decode import DecodeCase, DecodeContender
from cufa.commands.common import seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import decode as charts
from cufa.dashboard.charts import timeline as timeline_charts
from cufa.dashboard.model import decode
from cufa.dashboard.model.decode import Batch
from cufa.dashboard.model.decode_rows import DecodeRow, rows_of_batch
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import decode_measured
from cufa.dashboard.views.decode_view import Choice


def show(
    choice: Choice, controls: Controls, found: Mapping[str, Sequence[DecodeRow]], palette: Palette
) -> None:
    """The same split for all, or the same work for all: predicted, and measured where it has been."""
    st.header("A ragged batch", anchor=False)
    left, right, _ = st.columns([1, 1, 2])
    with left:
        default = max(8, choice.problem.batch)
        size = controls.integer("ragged", "Sequences of different length", default, 2, 512)
    with right:
        spread = controls.integer("spread", "Longest ÷ shortest", 16, 1, 1024)
    plans = {s: choice.plan(s, batch=size, ragged=True) for s in ("fixed", "balanced")}
    lengths = decode.ragged(size, choice.problem.capacity, spread)
    batch = Batch.of(plans["balanced"], lengths, choice.overhead)
    fixed, launches = _launches(batch, plans["balanced"].num_splits)
    splits = {name: decode.evaluate(batch, blocks, 0) for name, blocks in launches.items()}
    gain = splits["fixed"].span / splits["balanced"].span
    page.verdict(_verdict(gain, fixed, splits["balanced"].blocks), tag="predicted", small=True)
    st.caption(
        f"{size} sequences of {min(lengths):,} to {max(lengths):,} cached tokens, drawn log-uniformly with a "
        f"fixed seed. The planner takes {choice.plan(batch=size, ragged=True).schedule}: it sees no lengths, "
        "which stand on the device, so it cannot know the best fixed split. Here all SMs read at one "
        "speed; on a card they do not, which shares of two sizes even out."
    )
    titles = {
        "fixed": f"Fixed: {fixed} splits a sequence, the best there is",
        "balanced": f"Balanced: {splits['balanced'].blocks:,} shares",
    }
    for column, (name, blocks) in zip(st.columns(2), launches.items(), strict=True):
        with column:
            st.subheader(titles[name], anchor=False)
            line = decode.timeline(batch, blocks)
            alt = timeline_charts.describe_timeline(line)
            page.figure(timeline_charts.timeline_figure(line, palette, 320), f"decode.{name}", alt)
            share = splits[name].fill
            st.caption(f"{splits[name].blocks:,} thread blocks, {share:.0%} of the places' time on tiles.")
    problem = plans["balanced"].problem
    contenders = [
        DecodeContender("balanced", problem, "balanced"),
        DecodeContender("fixed", problem, "fixed"),
    ]
    if fixed != plans["fixed"].num_splits:
        contenders.append(DecodeContender(f"fixed, {fixed} splits", problem, "fixed", fixed))
    heads = f"{problem.heads}/{problem.kv_heads}"
    title = f"{size} ragged × {heads}, {min(lengths):,} to {max(lengths):,}"
    case = DecodeCase(title, tuple(contenders), lengths)
    _show_measured(found, case, gain, palette)
    decode_measured.offer("Measure both on the GPU", "decode.measure.ragged", case, choice.config is None)


@st.cache_data(max_entries=64, show_spinner=False)
def _launches(batch: Batch, shares: int) -> tuple[int, dict[str, decode.Blocks]]:
    """The best fixed split, and both launches."""
    curve = decode.split_curve(batch, decode.candidates(min(64, max(batch.tiles)), dense=8))
    splits = decode.best(curve).splits
    fixed = decode.fixed_blocks(batch, splits)
    return splits, {"fixed": fixed, "balanced": decode.balanced_blocks(batch, shares)}


def _verdict(gain: float, fixed: int, shares: int) -> str:
    if gain > 1.02:
        return f"{shares:,} shares are {gain:.2f}× faster than the best fixed split ({fixed})."
    if gain < 0.98:
        return f"The best fixed split ({fixed}) is {1 / gain:.2f}× faster than {shares:,} shares."
    return f"Shares and the best fixed split ({fixed}) take equally long here."


def _show_measured(
    found: Mapping[str, Sequence[DecodeRow]], case: DecodeCase, predicted: float, palette: Palette
) -> None:
    """This very batch, from the latest run of it."""
    for where, measured in found.items():
        rows = rows_of_batch(measured, case.problem, case.kv_bytes)
        if rows:
            text, tone = measured_verdict(rows, predicted)
            page.verdict(f"{text} ({where}).", tone, "measured", small=True)
            lines = "; ".join(f"{r.label}: {seconds_text(r.timing.p50)}, {r.of_read:.0%}" for r in rows)
            alt = f"Bars of the rate against a plain streaming read of as many bytes. {lines}."
            page.figure(charts.rates_figure(rows, palette), "decode.ragged.measured", alt)
            return


def measured_verdict(rows: Sequence[DecodeRow], predicted: float) -> tuple[str, str]:
    """Sentence and tone. ``predicted``: the best fixed split's time over that of shares."""
    shares = next(r for r in rows if r.schedule == "balanced")
    fixed = min((r for r in rows if r.schedule == "fixed"), key=lambda r: r.timing.p50)
    gain = fixed.timing.p50 / shares.timing.p50
    faster, slower, ratio = (shares, fixed, gain) if gain >= 1 else (fixed, shares, 1 / gain)
    names = {shares.label: "shares", fixed.label: f"the best fixed split timed ({fixed.num_splits})"}
    read = f"{faster.of_read:.0%} against {slower.of_read:.0%} of a plain read"
    text = f"{names[faster.label]} {'are' if faster is shares else 'is'} {ratio:.2f}× faster than "
    text = f"{text}{names[slower.label]}: {seconds_text(faster.timing.p50)}, {read}"
    disagree = (gain - 1) * (predicted - 1) < 0 and min(abs(gain - 1), abs(predicted - 1)) > 0.02
    text = text[0].upper() + text[1:] + (". The prediction says otherwise" if disagree else "")
    return text, "warn" if disagree else ""
