"""Masked work: the grid of one head, and the softmax state of one tile; in the backward, one key block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from cufa.dashboard import page, sentences
from cufa.dashboard.charts import work
from cufa.dashboard.model import softmax_steps
from cufa.dashboard.model.softmax_steps import Step
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import masked_grid
from cufa.dashboard.views.masked_controls import View
from cufa.problem.integers import Integers
from cufa.schedule.schedule import Tile

_BY_DIGEST: dict[str | type[Any], Callable[[Any], Any]] = {Integers: lambda numbers: numbers.digest}
_observe = st.cache_data(max_entries=64, show_spinner=False, hash_funcs=_BY_DIGEST)(
    softmax_steps.observe_rows
)
_IS_NEW = "masked.new"
"""Session key: the whole page is drawn, not only another tile."""


def show_one_head(view: View, controls: Controls, palette: Palette) -> None:
    """The grid and its selected tile; another selection redraws only these."""
    st.session_state[_IS_NEW] = True
    _show_one_head(view, controls, palette)


@st.fragment
def _show_one_head(view: View, controls: Controls, palette: Palette) -> None:
    take_click(controls, q="y", k="x")
    grid = st.container()  # above the controls of the selected tile
    selected = _choose_tile(view, controls)
    parts: list[Callable[[], None]] = [
        lambda: _show_grid(view, palette, grid, selected),
        lambda: _show_tile(view, palette, selected),
    ]
    is_new = st.session_state.pop(_IS_NEW, False)
    for show in parts if is_new else reversed(parts):  # a newly selected tile does not wait for the grid
        show()
    controls.write_link()


def _show_grid(view: View, palette: Palette, place: DeltaGenerator, selected: tuple[int, int]) -> None:
    with place:
        masked_grid.show_grid(view, palette, selected)
        masked_grid.show_counters(view)
        page.header("Inside one tile")


def take_click(controls: Controls, **axes: str) -> None:
    """Take a click, which Streamlit put in the session before this run. ``axes``: the axis of each control."""
    event: Any = st.session_state.get(masked_grid.GRID_KEY)
    points = event["selection"]["points"] if event else []
    picked = {name: int(points[0][axis]) for name, axis in axes.items()} if points else None
    if picked is not None and picked != st.session_state.get("masked.picked"):
        for name, block in picked.items():
            controls.set(name, block)
    st.session_state["masked.picked"] = picked


def _choose_tile(view: View, controls: Controls) -> tuple[int, int]:
    """Query block and key block: by number, or by a click in the grid."""
    rows, columns = view.schedule.num_q_blocks, view.schedule.num_kv_blocks
    row = rows // 2
    visited = np.flatnonzero(view.schedule.tiles[row] != Tile.SKIPPED)
    # The second tile says more: the first one starts without a state.
    second = int(visited[:2][-1]) if len(visited) else 0
    left, right, text = page.fields(1, 1, 3)
    q_block = controls.integer("q", "Query block", row, 0, rows - 1, at=left)
    kv_block = controls.integer("k", "Key block", second, 0, columns - 1, at=right)
    text.caption(
        "Click a tile in the grid, or type its numbers. The CPU path computes the rows of one head with random inputs, "
        "in the order of the key blocks."
    )
    return q_block, kv_block


def _show_tile(view: View, palette: Palette, selected: tuple[int, int]) -> None:
    """Effect of the selected tile on its rows."""
    schedule, (q_block, kv_block) = view.schedule, selected
    tile = Tile(int(schedule.tiles[q_block, kv_block]))
    steps = _observe(schedule, q_block, view.problem.head_dim, view.problem.softcap)
    step = next((s for s in steps if s.kv_block == kv_block), None)
    where = f"Tile ({q_block:,}, {kv_block:,})"
    if tile == Tile.SKIPPED:
        text = f"{where} is skipped: it is not loaded, and its rows keep their maximum and sum."
        page.verdict(text, small=True)
    elif step is None:
        text = f"{where} is computed, but fully masked: its rows keep their maximum and sum."
        page.verdict(text, "warn", small=True)
    else:
        page.verdict(f"{where} is {palette.tiles[tile].label}: {_change(step)}", tag="computed", small=True)
        page.figure(work.softmax_figure(step, palette), "masked.softmax", _describe(step, where))


def _change(step: Step) -> str:
    rows = len(step.m_after)
    risen = int((step.m_after > step.m_before).sum())
    if not np.isfinite(step.m_before).any():
        return f"{sentences.count(risen, 'row')} get a first maximum in this tile."
    with np.errstate(invalid="ignore"):  # rows that see no key yet
        old_sum = step.l_before * np.exp(step.m_before - step.m_after)
        share = np.where(step.l_after > 0, 1 - old_sum / step.l_after, np.nan)
    if np.isnan(share).all():
        return "no row has a visible key so far."
    gained = float(np.nanmean(share))
    rose = f"the maximum rose in {risen:,} of {sentences.count(rows, 'row')}"
    return f"{rose}; the tile contributes {gained:.1%} of the sum so far."


def _describe(step: Step, where: str) -> str:
    def span(values: Any) -> str:
        finite = values[np.isfinite(values)]
        return f"{finite.min():.3g} to {finite.max():.3g}" if len(finite) else "minus infinity in every row"

    return (
        f"{where}: two panels over its {len(step.m_after):,} query rows. Running maximum m before the tile: "
        f"{span(step.m_before)}; after: {span(step.m_after)}. Running sum l before: {span(step.l_before)}; "
        f"after: {span(step.l_after)}. Rows without a visible key so far have m = minus infinity and are not "
        "drawn."
    )


@st.fragment
def show_key_block(view: View, controls: Controls, palette: Palette) -> None:
    """The grid and its selected key block."""
    take_click(controls, k="x")
    grid = st.container()  # above the control of the selected column
    columns = view.schedule.num_kv_blocks
    left, text = page.fields(1, 4)
    kv_block = controls.integer("k", "Key block", columns // 2, 0, columns - 1, at=left)
    text.caption(
        "Click a column in the grid, or type its number. A thread block keeps K and V of its keys, and accumulates "
        "their dK and dV, while it visits query blocks. Every key block adds to dQ, which stays in device memory."
    )
    with grid:
        masked_grid.show_grid(view, palette, (0, kv_block))
        masked_grid.show_counters(view)
        page.header("One key block")
    page.verdict(_column_verdict(view, kv_block, palette), tag="computed", small=True)
    controls.write_link()


def _column_verdict(view: View, kv_block: int, palette: Palette) -> str:
    """The visited query blocks, by tile class."""
    schedule, problem = view.schedule, view.problem
    column = schedule.tiles[:, kv_block]
    visited = np.flatnonzero(column != Tile.SKIPPED)
    where = f"Key block {kv_block:,}"
    if not len(visited):
        return f"{where} visits no query block: no query sees its keys; their dK and dV are exactly 0."
    counts = {
        style.label: int((column == t).sum()) for t, style in palette.tiles.items() if t != Tile.SKIPPED
    }
    kinds = sentences.listed(f"{count:,} {label}" for label, count in counts.items() if count)
    span = f"{visited[0]:,} to {visited[-1]:,}" if len(visited) > 1 else f"{visited[0]:,}"
    holes = "" if len(visited) == visited[-1] - visited[0] + 1 else ", with gaps"
    group = problem.group_size
    each = f", for each of the {group} query heads that share its keys" if group > 1 else ""
    return (
        f"{where} visits {len(visited):,} of {sentences.count(schedule.num_q_blocks, 'query block')}{each}: "
        f"{span}{holes} ({kinds})."
    )
