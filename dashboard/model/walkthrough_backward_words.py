"""What is said beside each step of the backward."""

from __future__ import annotations

import numpy as np

from cufa.dashboard.model.walkthrough_backward import PREPARE, BackwardStep, BackwardWalk
from cufa.dashboard.model.walkthrough_words import Phase, size, span
from cufa.problem.mask import FULL
from cufa.run.cpu.backward import GradientStep


def phases(walk: BackwardWalk, step: BackwardStep) -> list[Phase]:
    """What happens in one step, in order."""
    if step.kernel:
        return _over_rows(step)
    rows, keys = span(step.q_block), span(step.kv_block)
    if step.tile is None:
        text = f"No query of {rows} sees a key of {keys}: P is 0 there, and adds nothing to any gradient."
        return [("Skip", text + (f" {_stored(step)}" if step.is_last else ""))]
    return [
        ("Load", _load(step)),
        ("Recompute", _recompute(step.tile)),
        ("Back through softmax", _scores(step.tile)),
        ("Add", _add(step)),
    ]


def _over_rows(step: BackwardStep) -> list[Phase]:
    read, written = size(step.moved.read), size(step.moved.written)
    if step.kernel == PREPARE:
        return [
            ("Load", f"Before any tile, a launch of its own reads O, dO and L of all queries: {read}."),
            ("Row sums", "D = rowsum(dO ∘ O), a number per query: what the softmax of its row takes off every dP. "
             f"L and D are stored side by side, and dQ begins as zeros: {written}."),
        ]  # fmt: skip
    return [
        ("Load", f"All key blocks have added to dQ. It comes back in float32: {read}."),
        ("Round", f"It is stored once more, in float16: {written}."),
    ]


def _load(step: BackwardStep) -> str:
    read, rows, keys = size(step.moved.read), span(step.q_block), span(step.kv_block)
    text = f"Q and dO of queries {rows} come to the SM, and their L and D"
    if any(move.array == "K" for move in step.moved.moves):
        return f"K and V of keys {keys} come, and stay for all queries. {text}: {read}."
    return f"{text}: {read}. K and V stay, and so do dK and dV."


def _recompute(tile: GradientStep) -> str:
    hidden = int((tile.P == 0).sum())
    text = (
        "S = Q Kᵀ once more, and P = exp(S − L): the forward has left L, so there is no maximum to find and "
    )
    text += "nothing to rescale."
    return f"{text} The mask hides {hidden} of {tile.P.size}: there P = 0." if hidden else text


def _scores(tile: GradientStep) -> str:
    low, high = (f"{x:.2f}".replace("-", "−") for x in (tile.dS.min(), tile.dS.max()))
    return f"dP = dO Vᵀ, and dS = P ∘ (dP − D), {low} to {high} here. Neither P nor dS leaves the SM."


def _add(step: BackwardStep) -> str:
    added = next(move.written for move in step.moved.moves if move.array == "dQ so far")
    text = (
        f"Pᵀ dO is added to dV and dSᵀ Q to dK, in registers; dS K to dQ of queries {span(step.q_block)}, "
        f"in device memory, as other thread blocks do: {size(added)}."
    )
    return f"{text} {_stored(step)}" if step.is_last else text


def _stored(step: BackwardStep) -> str:
    written = sum(move.written for move in step.moved.moves if move.array in ("dK", "dV"))
    return f"These keys have met all queries: dK and dV are stored, {size(written)}."


def error(walk: BackwardWalk, step: BackwardStep) -> str:
    """How far the gradients are from the exact ones."""
    if step.kernel == PREPARE:
        return "No gradient has anything yet."
    if step.kernel:
        worst = max(np.abs(x - y).max() for x, y in zip(walk.gradients, walk.exact, strict=True))
        return f"All three gradients agree with the exact ones to {worst:.1g}: the rounding of float16."
    keys, worst = span(step.kv_block), float(step.error.max())
    if step.tile is None and not step.is_last:
        return f"Nothing changes for keys {keys}."
    if step.is_last:
        return f"dK and dV of keys {keys} are complete, {worst:.1g} off the exact ones: O was rounded to float16."
    return f"Ended after this step, dK and dV of keys {keys} would be {worst:.2g} off."


def order(walk: BackwardWalk) -> str:
    """The loop order in words."""
    text = (
        "Keys outside, queries inside: a thread block per block of keys, which work at the same time on a GPU (here "
        "one after the other). dK and dV stay where they are added up; dQ belongs to queries, so every block adds to "
        "it in device memory."
    )
    if walk.problem.mask == FULL:
        return text
    return f"{text} {walk.schedule.skipped} of {walk.schedule.total} tiles are skipped."
