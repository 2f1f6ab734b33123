"""Sentences beside each step of the backward."""

from __future__ import annotations

import numpy as np

from cufa.dashboard.model.walkthrough_backward import PREPARE, BackwardStep, BackwardWalk
from cufa.dashboard.model.walkthrough_words import Phase, size, span
from cufa.problem.mask import FULL
from cufa.run.cpu.backward import GradientStep


def phases(walk: BackwardWalk, step: BackwardStep) -> list[Phase]:
    """The phases of one step, in order."""
    if step.kernel:
        return _over_rows(step)
    rows, keys = span(step.q_block), span(step.kv_block)
    if step.tile is None:
        text = f"No key of {keys} is visible to queries {rows}: P is 0, and no gradient changes."
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
            ("Load", f"Before the tiles, a separate launch reads O, dO and L of all queries: {read}."),
            ("Row sums", "D = rowsum(dO ∘ O), one number per query. The softmax backward subtracts D from dP. "
             f"L and D are stored side by side, and dQ is set to zero: {written}."),
        ]  # fmt: skip
    return [
        ("Load", f"All key blocks have added to dQ. The launch reads dQ in float32: {read}."),
        ("Round", f"dQ is stored in float16: {written}."),
    ]


def _load(step: BackwardStep) -> str:
    read, rows, keys = size(step.moved.read), span(step.q_block), span(step.kv_block)
    text = f"The SM loads Q and dO of queries {rows}, and their L and D"
    if any(move.array == "K" for move in step.moved.moves):
        return f"The SM loads K and V of keys {keys}, which stay for all queries. {text}: {read}."
    return f"{text}: {read}. K and V stay, and so do dK and dV."


def _recompute(tile: GradientStep) -> str:
    hidden = int((tile.P == 0).sum())
    text = "S = Q Kᵀ is computed again, and P = exp(S − L). The forward has stored L, so there is no maximum to find "
    text += "and nothing to rescale."
    return f"{text} The mask hides {hidden} of {tile.P.size}: there P = 0." if hidden else text


def _scores(tile: GradientStep) -> str:
    low, high = (f"{x:.2f}".replace("-", "−") for x in (tile.dS.min(), tile.dS.max()))
    return f"dP = dO Vᵀ, and dS = P ∘ (dP − D), {low} to {high} here. Neither P nor dS leaves the SM."


def _add(step: BackwardStep) -> str:
    added = next(move.written for move in step.moved.moves if move.array == "dQ so far")
    text = (
        f"Pᵀ dO is added to dV and dSᵀ Q to dK, in registers. dS K is added to dQ of queries {span(step.q_block)} in "
        f"device memory, to which other thread blocks add too: {size(added)}."
    )
    return f"{text} {_stored(step)}" if step.is_last else text


def _stored(step: BackwardStep) -> str:
    written = sum(move.written for move in step.moved.moves if move.array in ("dK", "dV"))
    return f"These keys are complete: dK and dV are stored, {size(written)}."


def error(walk: BackwardWalk, step: BackwardStep) -> str:
    """Difference from the exact gradients."""
    if step.kernel == PREPARE:
        return "All gradients are still zero."
    if step.kernel:
        worst = max(np.abs(x - y).max() for x, y in zip(walk.gradients, walk.exact, strict=True))
        return (
            f"All three gradients differ from the exact gradients by at most {worst:.1g}: float16 rounding."
        )
    keys, worst = span(step.kv_block), float(step.error.max())
    if step.tile is None and not step.is_last:
        return f"Nothing changes for keys {keys}."
    if step.is_last:
        return f"dK and dV of keys {keys} are complete; error {worst:.1g}, as O was rounded to float16."
    return f"If the loop ended after this step, the error of dK and dV of keys {keys} would be {worst:.2g}."


def order(walk: BackwardWalk) -> str:
    """The loop order in words."""
    text = (
        "Outer loop: keys; inner loop: queries. The thread blocks, one per key block, work at the same time on a GPU "
        "(here in sequence). dK and dV stay in registers; dQ belongs to queries, so each block adds to dQ in device "
        "memory."
    )
    if walk.problem.mask == FULL:
        return text
    return f"{text} {walk.schedule.skipped} of {walk.schedule.total} tiles are skipped."
