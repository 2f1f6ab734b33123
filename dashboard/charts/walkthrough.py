"""The walkthrough as one component: the steps of a case as data, and scripts that draw and play the steps in the
browser."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import streamlit as st

from cufa.dashboard.model import walkthrough_words as words
from cufa.dashboard.model.traffic_steps import FLOAT32
from cufa.dashboard.model.walkthrough import BLOCK, BLOCKS, DECODE_TILES, MERGE, Step, Walk, weights
from cufa.dashboard.model.walkthrough_backward import BackwardStep, BackwardWalk
from cufa.dashboard.theme import Palette

_FOLDER = Path(__file__).parents[1] / "walkthrough"
_SCRIPTS = (
    "draw.js",
    "order.js",
    "tile.js",
    "gradient.js",
    "memory.js",
    "heat.js",
    "timeline.js",
    "player.js",
)
"""One module, in this order."""
_DIGITS = 4


def data(walk: Walk, palette: Palette) -> dict[str, Any]:
    """All data of the component."""
    case = walk.case
    return {
        "case": f"{dataclasses.astuple(case)}",
        "palette": colours(palette),
        "decode": walk.is_decode,
        "against": "Error against the plain softmax",
        "fa1": case.algorithm == "fa1",
        "rows": 1 if walk.is_decode else BLOCKS,
        "columns": DECODE_TILES if walk.is_decode else BLOCKS,
        "block": BLOCK,
        "Q": numbers(walk.Q),
        "K": numbers(walk.K),
        "V": numbers(walk.V),
        "order": words.order(walk),
        "steps": [_step(walk, n, step) for n, step in enumerate(walk.steps)],
        "meters": meters(walk),
        "held": _held(walk),
        "attention": numbers(weights(walk)),
    }


def _step(walk: Walk, n: int, step: Step) -> dict[str, Any]:
    tile, is_divided = step.tile, any(move.array == "O" and move.written for move in step.moved.moves)
    after = step.ended if is_divided and step.is_last else step.O
    data = common(walk, n, step) | {
        "phases": [list(phase) for phase in words.phases(walk, step)],
        "error": numbers(step.error, 9),
        "line": ("merge" if step.kv_block == MERGE else step.thread_block)
        if walk.is_decode
        else step.q_block,
        "errorText": words.error(walk, step),
        "O": [numbers(x) for x in (step.O_before, step.O_scaled, after)],
        "divided": is_divided and step.is_last,
    }
    if step.kv_block == MERGE:
        shares = [table(f"split {n + 1}", x.O, x.share, "share", 0, 1) for n, x in enumerate(step.parts)]
        data |= {
            "wide": f"merge: {step.number}",
            "tables": [*shares, table("merged", step.O, step.error, "error", 2, 2)],
        }
    if tile is not None:
        data |= {
            "S": numbers(tile.S),
            "P": numbers(tile.P),
            "m": [numbers(tile.m_before), numbers(tile.m_after)],
            "l": [numbers(tile.l_before), numbers(tile.l_after)],
            "alpha": numbers(tile.alpha),
        }
    return data


def common(walk: Walk | BackwardWalk, n: int, step: Step | BackwardStep) -> dict[str, Any]:
    """Data of step n in both directions."""
    return {
        "i": step.q_block,
        "j": step.kv_block,
        "threadBlock": step.thread_block,
        "number": step.number,
        "skipped": step.moved.skipped,
        "last": step.is_last,
        "meterText": words.meter(walk, n),
        "reads": {move.array: move.read for move in step.moved.moves if move.read},
        "writes": {move.array: move.written for move in step.moved.moves if move.written},
    }


def table(name: str, rows: Any, beside: Any, kind: str, shown: int, shown_beside: int) -> dict[str, Any]:
    """A block of rows, and beside each row a "share", an "error" or a "number" (``kind``), shown from these phases
    on."""
    return {
        "name": name,
        "rows": numbers(rows),
        "beside": numbers(beside, 9),
        "kind": kind,
        "from": [shown, shown_beside],
    }


def numbers(x: npt.NDArray[Any], digits: int = _DIGITS) -> Any:
    """Rounded numbers for JSON; null for infinite numbers: hidden scores, maxima without a score."""
    wide = x.astype(np.float64)
    rounded = wide.round(digits).astype(object)
    rounded[~np.isfinite(wide)] = None
    return rounded.tolist()


def meters(walk: Walk | BackwardWalk) -> list[dict[str, Any]]:
    """Bytes read and written up to each step, for each compared algorithm."""
    totals = {words.ALGORITHMS[name]: words.meter_totals(walk, name) for name in walk.meters}
    return [{"name": name, "read": read, "written": written} for name, (read, written) in totals.items()]


def _held(walk: Walk) -> list[dict[str, Any]]:
    """Contents of each memory level: (name, bytes, arrays of a step's moves, use: from a phase on, or while an array is
    read)."""
    item = walk.problem.q_element.itemsize
    tile = BLOCK * walk.problem.head_dim
    rows, keys = len(walk.Q), len(walk.K)
    sizes = {"Q": walk.Q.size * item, "K": walk.K.size * item, "V": walk.V.size * item}
    state = BLOCK * 2 * FLOAT32
    device = [[name, size, [name], None] for name, size in sizes.items()]
    if walk.case.algorithm == "fa1":
        device += [["partial O, l, m", rows * (walk.problem.head_dim + 2) * FLOAT32, ["O", "l, m"], None]]
    elif len(walk.meters) > 1 and walk.is_decode:
        splits = len({step.thread_block for step in walk.steps})
        device += [["O, m, l of splits", splits * (tile * FLOAT32 + state), ["parts"], None]]
    if walk.case.algorithm != "fa1":
        device += [["O", rows * walk.problem.head_dim * item, ["O"], None]]
    device += [["L", rows * FLOAT32, ["L"], None]]
    never = rows * keys * (FLOAT32 + item)
    shared = [[f"{name} tile", tile * item, [], name] for name in "QKV"]
    registers = [
        ["S, then P", BLOCK * BLOCK * FLOAT32, [], 1],
        ["m, l", state, [], 2],
        ["O", tile * FLOAT32, [], 2],
    ]
    stays = (
        "O, l and m are stored each step"
        if walk.case.algorithm == "fa1"
        else "O, m and l stay until the rows are done"
    )
    return [
        {"level": "Registers", "items": registers, "said": f"S and P last for one tile; {stays}"},
        {"level": "Shared memory", "items": shared, "said": "of the thread block"},
        {
            "level": "Device memory",
            "items": device,
            "said": f"no S, no P: naive attention stores {never:,} B of both here",
        },
    ]


def colours(palette: Palette) -> dict[str, Any]:
    names = ("name", "background", "panel", "text", "muted", "grid", "accent", "measured", "warn", "idle")
    plain = {name: getattr(palette, name) for name in names}
    return plain | {"series": list(palette.series), "scale": list(palette.scale)}


@functools.cache
def _component() -> Callable[..., Any]:
    script = "\n".join((_FOLDER / name).read_text("utf-8") for name in _SCRIPTS)
    component: Callable[..., Any] = st.components.v2.component(
        "cufa.walkthrough", css=(_FOLDER / "style.css").read_text("utf-8"), js=script
    )
    return component


def show(content: dict[str, Any], key: str, on_step: Callable[[], None]) -> None:
    """The component, at step ``content["start"]``. It writes the step where it stops to the session under ``key``."""
    _component()(key=key, data=content, on_step_change=on_step)
