"""Masked work of the backward: the grid of one head, and the query tiles that one key block visits."""

from __future__ import annotations

import numpy as np
import streamlit as st

from cufa.dashboard import page, sentences
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import masked_grid
from cufa.dashboard.views.masked_tile import take_click
from cufa.dashboard.views.masked_view import View
from cufa.schedule.schedule import Tile


@st.fragment
def show_one_head(view: View, controls: Controls, palette: Palette) -> None:
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
        st.header("One key block", anchor=False)
    page.verdict(_verdict(view, kv_block, palette), tag="computed", small=True)
    controls.write_link()


def _verdict(view: View, kv_block: int, palette: Palette) -> str:
    """The visited query blocks, by tile class."""
    schedule, problem = view.schedule, view.problem
    column = schedule.tiles[:, kv_block]
    visited = np.flatnonzero(column != Tile.SKIPPED)
    where = f"Key block {kv_block:,}"
    if not len(visited):
        return f"{where} visits no query block: no query sees its keys; their dK and dV are exactly 0."
    of_class = [
        (int((column == t).sum()), palette.tiles[t].label) for t in (Tile.FULL, Tile.PARTIAL, Tile.PADDED)
    ]
    kinds = sentences.listed([f"{count:,} {label}" for count, label in of_class if count])
    span = f"{visited[0]:,} to {visited[-1]:,}" if len(visited) > 1 else f"{visited[0]:,}"
    holes = "" if len(visited) == visited[-1] - visited[0] + 1 else ", with gaps"
    group = problem.heads // problem.kv_heads
    each = f", for each of the {group} query heads that share its keys" if group > 1 else ""
    return (
        f"{where} visits {len(visited):,} of {sentences.count(schedule.num_q_blocks, 'query block')}{each}: "
        f"{span}{holes} ({kinds})."
    )
