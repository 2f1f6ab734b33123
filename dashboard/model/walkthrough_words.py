"""What is said beside each step of the walkthrough: short sentences, from the numbers that were observed."""

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
"""A title of a word or two, and what happens."""

ALGORITHMS = {
    "naive": "naive",
    "fa1": "FA1",
    "fa2": "FA2",
    "decode": "Flash-Decoding",
    "whole": "keys not split",
    "fa2_backward": "FA2 backward",
    "naive_backward": "with P kept",
}
"""As meters name them."""


def size(count: int) -> str:
    return f"{count:,} B"


def span(block: int) -> str:
    """Of queries or keys."""
    return f"{block * BLOCK}–{block * BLOCK + BLOCK - 1}"


def queries(walk: Walk, step: Step) -> str:
    return f"the {BLOCK} query heads" if walk.is_decode else f"queries {span(step.q_block)}"


def phases(walk: Walk, step: Step) -> list[Phase]:
    """What happens in one step, in order."""
    if step.kv_block == MERGE:
        return _merge(walk, step)
    if step.tile is None:
        who, keys = queries(walk, step), span(step.kv_block)
        return [("Skip", f"None of {who} sees a key of {keys}: nothing is read, nothing is computed.")]
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
            return f"Q of {who} comes to the SM, and the first K and V, of keys {keys}: {read}."
        return f"K and V of keys {keys} take the place of the last ones: {read}. Q stays."
    text = f"Q of {who} comes to the SM"
    if "O" in arrays:
        text = f"Q of {who} comes, and with it their O, l and m so far"
    if "K" in arrays:
        return f"K and V of keys {keys} come, and stay for all queries. {text}: {read}."
    return f"{text}: {read}. K and V stay."


def _scores(tile: TileStep) -> str:
    hidden, all_of = int(np.isneginf(tile.S).sum()), tile.S.size
    if hidden == all_of:
        return f"S = Q Kᵀ, {all_of} scores, and the mask hides all of them: this work is lost."
    text = f"S = Q Kᵀ: {all_of} scores that never leave the SM."
    return f"{text} The mask hides {hidden} of them." if hidden else text


def _rescale(walk: Walk, tile: TileStep) -> str:
    rows = len(tile.m_after)
    had, has = np.isfinite(tile.m_before), np.isfinite(tile.m_after)
    first, risen = int((has & ~had).sum()), tile.alpha[had & (tile.m_after > tile.m_before)]
    if first == rows:
        return (
            f"The first tile of these rows: all {rows} get their first maximum, there is nothing to rescale."
        )
    said = []
    if first:
        said.append(f"{sentences.count(first, 'row')} {'gets' if first == 1 else 'get'} a first maximum.")
    if not len(risen):
        return " ".join([*said, "No other row" if first else "No row", "finds a larger maximum: α = 1."])
    low, high = f"{risen.min():.2f}", f"{risen.max():.2f}"
    finds, they = ("finds", "it") if len(risen) == 1 else ("find", "they")
    said.append(f"{len(risen)} of {rows} rows {finds} a larger maximum:")
    factor = f"α = {low}" if low == high else f"α, {low} to {high}"
    if walk.case.algorithm == "fa1":
        said.append(f"the l that {they} had is multiplied by {factor}, and O by α l over the new l.")
    else:
        said.append(f"the l and O that {they} had are multiplied by {factor}.")
    return " ".join(said)


def _add(walk: Walk, step: Step) -> str:
    written = size(step.moved.written)
    text = "The row sums of P = exp(S − m) are added to l, and P V to O."
    if walk.case.algorithm == "fa1":
        text = "The row sums of P = exp(S − m) are added to l, and P V to O, which is divided by the new l."
        if step.tile is not None and np.isneginf(step.tile.S).all():
            text = "P = exp(S − m) is 0 everywhere: l and O stay as they were."
        if not step.is_last:
            return f"{text} O, l and m go back to device memory: {written}."
        return f"{text} These rows have seen all keys: O and L are stored, {written}."
    if not step.is_last:
        return f"{text} Both stay in registers: nothing is written."
    if step.moved.moves[-1].array == "parts":
        return f"{text} The split is done: O, m and l wait in device memory for the merge, {written}."
    return f"{text} These rows have seen all their keys: O / l and L = m + log l are stored, {written}."


def _merge(walk: Walk, step: Step) -> list[Phase]:
    count = len(step.parts)
    shares = np.concatenate([part.share for part in step.parts])
    low, high = f"{shares.min():.1%}", f"{shares.max():.1%}"
    return [
        ("Load", f"O, m and l of {count} splits come back from device memory: {size(step.moved.read)}."),
        ("Weigh", f"A split's share of a row is exp(L of the split − L of all): {low} to {high} here."),
        ("Add", f"The weighted sum is attention over all keys. O and L are stored: {size(step.moved.written)}."),
    ]  # fmt: skip


def error(walk: Walk, step: Step) -> str:
    """How far these rows are from the plain softmax."""
    who, worst = queries(walk, step), float(step.error.max())
    if step.tile is None and step.kv_block != MERGE:
        return f"Nothing changes for {who}."
    if worst < 1e-5:
        return f"After this step {who} agree with the plain softmax, but for the rounding of float32."
    if step.is_last:
        return f"This split is right about its own keys, and {worst:.2g} off the whole, until the splits are merged."
    return f"Ended after this step, {who} would be {worst:.2g} off."


def meter(walk: Walk | BackwardWalk, n: int) -> str:
    """Of step n, all of it: what has crossed so far."""
    own, *others = walk.meters
    mine = _so_far(walk, own, n)
    ratios = [f"{ALGORITHMS[name]} {_so_far(walk, name, n) / mine:.1f} times that" for name in others]
    return ", ".join([f"After this step: {ALGORITHMS[own]} {size(mine)}", *ratios]) + "."


def _so_far(walk: Walk | BackwardWalk, name: str, n: int) -> int:
    read, written = meter_totals(walk, name)
    return read[n + 1] + written[n + 1]


def meter_totals(walk: Walk | BackwardWalk, name: str) -> tuple[list[int], list[int]]:
    """Bytes read and bytes written before each step of the walk and after the last, by an algorithm at the same share
    of its own steps."""
    steps, count = walk.meters[name], len(walk.steps)
    read = np.cumsum([0, *(step.read for step in steps)])
    written = np.cumsum([0, *(step.written for step in steps)])
    at = [min(n, len(steps)) if walk.is_decode else n * len(steps) // count for n in range(count + 1)]
    return read[at].tolist(), written[at].tolist()


def order(walk: Walk) -> str:
    """The loop order in words."""
    blocks = len({step.thread_block for step in walk.steps})
    most = max(step.number for step in walk.steps)
    if walk.case.algorithm == "fa1":
        return (
            f"Keys outside, queries inside: one thread block per head takes all {most} tiles, one after the "
            "other. Every time it comes back to a row it must load what it had left of it."
        )
    if walk.is_decode:
        if blocks == 1:
            return f"Not split: one thread block takes all {most} tiles, however idle the rest of the GPU is."
        return (
            f"Keys split: {blocks} thread blocks work at the same time, each on its own keys. All are done after "
            f"{sentences.count(most - 1, 'tile')} and a merge, not after {walk.schedule.num_kv_blocks}."
        )
    skipped = walk.schedule.skipped
    text = (
        f"Queries outside, keys inside: {blocks} thread blocks, one per block of queries, which work at the same "
        f"time on a GPU (here one after the other)."
    )
    if walk.problem.mask == FULL:
        return text
    return f"{text} {skipped} of {walk.schedule.total} tiles are skipped."
