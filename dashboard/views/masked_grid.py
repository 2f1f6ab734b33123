"""Masked work: the grid of tiles, and the tile counters of the kernel."""

from __future__ import annotations

import streamlit as st

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import tile_grid
from cufa.dashboard.model import counters, trace, work
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.masked_controls import View
from cufa.problem.mask import FULL

GRID_KEY = "masked.grid"


def show_grid(view: View, palette: Palette, selected: tuple[int, int]) -> None:
    """The score matrix of one head."""
    schedule, counts = view.schedule, view.counts
    page.verdict(_verdict(view))
    show_refusal(view)
    st.caption(f"Mask: **{view.problem.scores_text}**. {_band_words(view)}{_share_words(view)}")
    figure = tile_grid.tile_grid(schedule, palette, selected)
    alt = tile_grid.describe(schedule, counts)
    if schedule.total <= tile_grid.PICKABLE:
        page.figure(figure, GRID_KEY, alt, on_select="rerun", selection_mode="points")
    else:
        page.figure(figure, "masked.grid.large", alt)
    for column, (t, style) in zip(st.columns(4), palette.tiles.items(), strict=True):
        column.caption(
            f"**{counts[t]:,} {style.label}** ({counts[t] / schedule.total:.0%})  \n{style.meaning}"
        )


def show_refusal(view: View) -> None:
    """A warning if the kernel does not serve the mask."""
    if view.refusal is not None:
        text = f"No kernel runs this problem: {view.spec.name} {view.refusal}. Tiles: its schedule."
        page.verdict(text, "warn", small=True)


def _verdict(view: View) -> str:
    schedule = view.schedule
    if not schedule.visited:
        return "No key is visible to any query: nothing is computed, and the result is zero."
    if view.problem.mask_kind == "full":
        named = "" if view.problem.mask == FULL else f" by {view.problem.mask}"
        return f"Nothing is masked{named}: all {schedule.total:,} tiles of a head are computed."
    if schedule.skip_masked_tiles:
        if not schedule.skipped:
            return f"All {schedule.total:,} tiles are computed: each tile has a visible score."
        return (
            f"{schedule.visited:,} of {schedule.total:,} tiles are computed. Skipping the other "
            f"{schedule.skipped / schedule.total:.0%} can make the kernel {work.skip_speedup(schedule):.2f}× faster."
        )
    lost = work.work(view.problem, schedule).waste_share
    return f"All {schedule.total:,} tiles are computed; the mask discards {lost:.0%} of the work: nothing is skipped."


def _band_words(view: View) -> str:
    """The visible keys of a query, for a band mask."""
    if view.problem.mask.irregular_kind:
        return ""
    first, last = view.problem.edges
    begin = "the first key" if first is None else _shifted(first)
    end = "the last key" if last is None else _shifted(last)
    return f"Query i sees {begin} to {end}. "


def _share_words(view: View) -> str:
    """Share of visible scores, and scores computed per visible score."""
    schedule, visible = view.schedule, view.problem.visible_scores
    if not visible:
        return ""
    share = sentences.share(visible / (schedule.seqlen_q * schedule.seqlen_k))
    over = schedule.visited * schedule.block_q * schedule.block_kv / visible
    return f"{share} of the scores are visible; the visited tiles compute {over:.2f}× as many."


def _shifted(shift: int) -> str:
    return f"key i {'−' if shift < 0 else '+'} {abs(shift):,}" if shift else "key i"


def show_counters(view: View) -> None:
    """The tile counters of the kernel, recorded on a GPU or executed on this CPU, against the schedule."""
    recorded = counters.matching_trace(view.problem, view.spec.name, view.config, view.device)
    if recorded is not None:  # from any card: visited tiles do not depend on the card
        wrong = trace.disagreements(recorded.trace.records, view.schedule)
        _judge(view, wrong, page.origin_tag(recorded.origin), recorded.card)
    p, reason = view.problem, view.why_not_executed
    launch = counters.EmulationKey(
        view.schedule, view.spec.algorithm, view.config, p.head_dim, p.softcap, p.dtype, p.precision
    )
    left, right = page.fields(2.6, 4)
    with left:
        result = page.on_demand(
            "Count tiles by executing the kernel here", "masked.emulate", "developer_board", launch,
            lambda: counters.emulate_counts(launch), refused=reason,
            help="Compiles the kernel's CUDA source with g++, and executes all threads of one head on this CPU.",
        )  # fmt: skip
    with right:
        if reason is not None:
            st.caption(reason)
        elif isinstance(result, str):
            st.error(result)
        elif result is not None:
            _judge(view, trace.disagreements(result, view.schedule), "executed", "this CPU, one head")


def _judge(view: View, wrong: list[str], tag: str, where: str) -> None:
    if wrong:
        text = f"Alarm: the kernel ({where}) did not visit the tiles of the schedule."
        page.verdict(text, "alarm", tag, small=True)
        st.error("  \n".join(wrong), icon=":material/error:")
    else:
        line = "column" if view.schedule.by_keys else "row"
        text = f"The kernel's own tile counters ({where}) agree with every {line} of the schedule."
        page.verdict(text, "good", tag, small=True)
