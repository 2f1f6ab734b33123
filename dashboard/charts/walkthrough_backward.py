"""The backward's walkthrough as data for the component of :mod:`cufa.dashboard.charts.walkthrough`."""

from __future__ import annotations

import dataclasses
from typing import Any

from cufa.dashboard.charts.walkthrough import colours, common, meters, numbers, table
from cufa.dashboard.model import walkthrough_backward_words as words
from cufa.dashboard.model.traffic_steps import FLOAT32
from cufa.dashboard.model.walkthrough import BLOCK, BLOCKS, weights
from cufa.dashboard.model.walkthrough_backward import PREPARE, BackwardStep, BackwardWalk
from cufa.dashboard.model.walkthrough_words import span
from cufa.dashboard.theme import Palette


def data(walk: BackwardWalk, palette: Palette) -> dict[str, Any]:
    """All data of the component."""
    names = ("Q", "K", "V", "dO", "L", "D")
    return {
        "case": f"{dataclasses.astuple(walk.case)}",
        "palette": colours(palette),
        "decode": False,
        "backward": True,
        "against": "Error of dK and dV",
        "rows": BLOCKS,
        "columns": BLOCKS,
        "block": BLOCK,
        "order": words.order(walk),
        "steps": [_step(walk, n, step) for n, step in enumerate(walk.steps)],
        "meters": meters(walk),
        "held": _held(walk),
        "attention": numbers(weights(walk)),
    } | {name: numbers(getattr(walk, name)) for name in names}


def _step(walk: BackwardWalk, n: int, step: BackwardStep) -> dict[str, Any]:
    tile = step.tile
    data = common(walk, n, step) | {
        "phases": [list(phase) for phase in words.phases(walk, step)],
        "error": None if step.kernel else numbers(step.error, 9),
        "line": step.thread_block,
        "errorText": words.error(walk, step),
        "gradients": [[numbers(x) for x in gradients] for gradients in (step.before, step.after)],
    }
    if step.kernel:
        is_first = step.kernel == PREPARE
        data["wide"] = "first: D = rowsum(dO ∘ O)" if is_first else "last: dQ in float16"
        data["tables"] = _tables(walk, is_first)
    if tile is not None:
        data |= {name: numbers(getattr(tile, name)) for name in ("P", "dP", "dS")}
    return data


def _tables(walk: BackwardWalk, is_first: bool) -> list[dict[str, Any]]:
    """dO and D of all queries, or dQ and its error."""
    blocks = [slice(n * BLOCK, (n + 1) * BLOCK) for n in range(BLOCKS)]
    if is_first:
        names = [f"dO, D: {span(n)}" for n in range(BLOCKS)]
        return [table(names[n], walk.dO[b], walk.D[b], "number", 0, 1) for n, b in enumerate(blocks)]
    dQ, exact = walk.gradients[0].astype(float), walk.exact[0]
    off = abs(dQ - exact).max(axis=1)
    return [table(f"dQ: {span(n)}", dQ[b], off[b], "error", 0, 1) for n, b in enumerate(blocks)]


def _held(walk: BackwardWalk) -> list[dict[str, Any]]:
    """Contents of each memory level, as in :mod:`cufa.dashboard.charts.walkthrough`."""
    item = walk.problem.q_element.itemsize
    tile, scores = BLOCK * walk.problem.head_dim, BLOCK * BLOCK
    sizes = {name: getattr(walk, name).size * item for name in ("Q", "K", "V", "O", "dO")}
    rows = len(walk.Q)
    device = [[name, size, [name], None] for name, size in sizes.items()]
    device += [["L", rows * FLOAT32, ["L"], None], ["L, D", rows * 2 * FLOAT32, ["L, D"], None]]
    device += [["dQ so far", walk.Q.size * FLOAT32, ["dQ so far"], None]]
    device += [[f"d{name}", sizes[name], [f"d{name}"], None] for name in "QKV"]
    shared: list[list[Any]] = [[f"{name} tile", tile * item, [], name] for name in ("Q", "K", "V", "dO")]
    shared += [["L, D", BLOCK * 2 * FLOAT32, [], "L, D"], ["dS", scores * item, [], 2]]
    registers = [
        ["S, then P", scores * FLOAT32, [], 1],
        ["dP, then dS", scores * FLOAT32, [], 2],
        ["dK", tile * FLOAT32, [], 3],
        ["dV", tile * FLOAT32, [], 3],
    ]
    never = len(walk.Q) * len(walk.K) * (FLOAT32 + 2 * item)
    return [
        {"level": "Registers", "items": registers, "said": "dK and dV stay until the keys are complete"},
        {"level": "Shared memory", "items": shared, "said": "of the thread block"},
        {
            "level": "Device memory",
            "items": device,
            "said": f"no P, dP, dS: with stored P, they take {never:,} B here",
        },
    ]
