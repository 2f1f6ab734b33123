"""Sentences beside each step of the walkthrough, from the observed numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cufa.dashboard import sentences
from cufa.dashboard.model.walkthrough import BLOCK, MERGE, Step, Walk
from cufa.problem.mask import FULL
from cufa.run.cpu.tiles import TileStep

if TYPE_CHECKING:
    from cufa.dashboard.model.walkthrough_backward import BackwardWalk

Phase = tuple[str, str]
"""A short title, and a sentence."""

ALGORITHMS = {
    "naive": "naive",
    "fa1": "FA1",
    "fa2": "FA2",
    "fa3": "FA3",
    "decode": "Flash-Decoding",
    "whole": "keys not split",
    "fa2_backward": "FA2 backward",
    "naive_backward": "with stored P",
}
"""Names on the meters."""


def size(count: int) -> str:
    return f"{count:,} B"


def span(block: int) -> str:
    """Numbers of a block's queries or keys."""
    return f"{block * BLOCK}–{block * BLOCK + BLOCK - 1}"


def queries(walk: Walk, step: Step) -> str:
    return f"the {BLOCK} query heads" if walk.is_decode else f"queries {span(step.q_block)}"


def phases(walk: Walk, step: Step) -> list[Phase]:
    """The phases of one step, in order."""
    if step.kv_block == MERGE:
        return _merge(walk, step)
    if step.tile is None:
        who, keys = queries(walk, step), span(step.kv_block)
        return [("Skip", f"No key of {keys} is visible to {who}: nothing is read, nothing is computed.")]
    return [
        ("Load", _load(walk, step)),
        ("Score", _scores(step.tile)),
        ("Rescale", _rescale(walk, step.tile)),
        ("Add", _add(walk, step)),
    ]


def _load(walk: Walk, step: Step) -> str:
    read, keys, who = size(step.moved.read), span(step.kv_block), queries(walk, step)
    arrays = {move.array for move in step.moved.moves if move.read}
    if walk.case.algorithm != "fa1":
        if "Q" in arrays:
            return f"The SM loads Q of {who}, and the first K and V, of keys {keys}: {read}."
        return f"K and V of keys {keys} replace the previous tile: {read}. Q stays."
    text = f"The SM loads Q of {who}"
    if "O" in arrays:
        text = f"The SM loads Q of {who}, and their O, l and m so far"
    if "K" in arrays:
        return f"The SM loads K and V of keys {keys}, which stay for all queries. {text}: {read}."
    return f"{text}: {read}. K and V stay."


def _scores(tile: TileStep) -> str:
    hidden, all_of = int(np.isneginf(tile.S).sum()), tile.S.size
    if hidden == all_of:
        return f"S = Q Kᵀ, {all_of} scores. The mask hides all of them: this work is wasted."
    text = f"S = Q Kᵀ: {all_of} scores that never leave the SM."
    return f"{text} The mask hides {hidden} of them." if hidden else text


def _rescale(walk: Walk, tile: TileStep) -> str:
    rows = len(tile.m_after)
    had, has = np.isfinite(tile.m_before), np.isfinite(tile.m_after)
    first, risen = int((has & ~had).sum()), tile.alpha[had & (tile.m_after > tile.m_before)]
    if first == rows:
        return f"This is the first tile of these rows: all {rows} get a first maximum, nothing is rescaled."
    parts = []
    if first:
        parts.append(f"{sentences.count(first, 'row')} {'gets' if first == 1 else 'get'} a first maximum.")
    if not len(risen):
        return " ".join([*parts, "No other row" if first else "No row", "finds a larger maximum: α = 1."])
    low, high = f"{risen.min():.2f}", f"{risen.max():.2f}"
    finds, their = ("finds", "its") if len(risen) == 1 else ("find", "their")
    parts.append(f"{len(risen)} of {rows} rows {finds} a larger maximum:")
    factor = f"α = {low}" if low == high else f"α, {low} to {high}"
    if walk.case.algorithm == "fa1":
        parts.append(f"{their} old l is multiplied by {factor}, and O by α l ÷ the new l.")
    else:
        parts.append(f"{their} old l and O are multiplied by {factor}.")
    return " ".join(parts)


def _add(walk: Walk, step: Step) -> str:
    written = size(step.moved.written)
    text = "The row sums of P = exp(S − m) are added to l, and P V to O."
    if walk.case.algorithm == "fa1":
        text = "The row sums of P = exp(S − m) are added to l, and P V to O, which is divided by the new l."
        if step.tile is not None and np.isneginf(step.tile.S).all():
            text = "P = exp(S − m) is 0 everywhere: l and O stay as they were."
        if not step.is_last:
            return f"{text} O, l and m are written to device memory: {written}."
        return f"{text} These rows are complete: O and L are stored, {written}."
    if not step.is_last:
        return f"{text} Both stay in registers: nothing is written."
    if step.moved.moves[-1].array == "parts":
        return (
            f"{text} The split is complete: O, m and l are written to device memory for the merge, {written}."
        )
    return f"{text} These rows are complete: O / l and L = m + log l are stored, {written}."


def _merge(walk: Walk, step: Step) -> list[Phase]:
    count = len(step.parts)
    shares = np.concatenate([part.share for part in step.parts])
    low, high = f"{shares.min():.1%}", f"{shares.max():.1%}"
    return [
        ("Load", f"O, m and l of {count} splits are read from device memory: {size(step.moved.read)}."),
        ("Weigh", f"The weight of a split in a row is exp(L of the split − L of all keys): {low} to {high} here."),
        ("Add", f"The weighted sum is attention over all keys. O and L are stored: {size(step.moved.written)}."),
    ]  # fmt: skip


def error(walk: Walk, step: Step) -> str:
    """Difference of these rows from the plain softmax."""
    who, worst = queries(walk, step), float(step.error.max())
    if step.tile is None and step.kv_block != MERGE:
        return f"Nothing changes for {who}."
    if worst < 1e-5:
        return f"After this step, {who} equal the plain softmax up to float32 rounding."
    if step.is_last:
        return f"This split is exact for its own keys. Until the merge, it differs from the full result by {worst:.2g}."
    return f"If the loop ended after this step, the error of {who} would be {worst:.2g}."


def meter(walk: Walk | BackwardWalk, n: int) -> str:
    """Bytes moved up to the end of step n, in words."""
    own, *others = walk.meters
    mine = _moved(walk, own, n)
    ratios = [f"{ALGORITHMS[name]} {_moved(walk, name, n) / mine:.1f} times that" for name in others]
    return ", ".join([f"After this step: {ALGORITHMS[own]} {size(mine)}", *ratios]) + "."


def _moved(walk: Walk | BackwardWalk, name: str, n: int) -> int:
    read, written = meter_totals(walk, name)
    return read[n + 1] + written[n + 1]


def meter_totals(walk: Walk | BackwardWalk, name: str) -> tuple[list[int], list[int]]:
    """Bytes read and written by an algorithm before each step of the walk and after the last step, at the same fraction
    of its own steps."""
    steps, count = walk.meters[name], len(walk.steps)
    read = np.cumsum([0, *(step.read for step in steps)])
    written = np.cumsum([0, *(step.written for step in steps)])
    steps_done = [min(n, len(steps)) if walk.is_decode else n * len(steps) // count for n in range(count + 1)]
    return read[steps_done].tolist(), written[steps_done].tolist()


def order(walk: Walk) -> str:
    """The loop order in words."""
    blocks = len({step.thread_block for step in walk.steps})
    most = max(step.number for step in walk.steps)
    if walk.case.algorithm == "fa1":
        return (
            f"Outer loop: keys; inner loop: queries. One thread block per head computes all {most} tiles in sequence. "
            "For each tile it loads the partial result of the rows, and stores the new one."
        )
    if walk.is_decode:
        if blocks == 1:
            return f"Keys not split: one thread block computes all {most} tiles, while the rest of the GPU is idle."
        return (
            f"Keys split: {blocks} thread blocks work at the same time, each on its own keys. They end after "
            f"{sentences.count(most - 1, 'tile')} and a merge, not after {walk.schedule.num_kv_blocks} tiles."
        )
    skipped = walk.schedule.skipped
    text = (
        f"Outer loop: queries; inner loop: keys. {blocks} thread blocks, one per query block, work at the same time on "
        "a GPU (here in sequence)."
    )
    if walk.problem.mask == FULL:
        return text
    return f"{text} {skipped} of {walk.schedule.total} tiles are skipped."
