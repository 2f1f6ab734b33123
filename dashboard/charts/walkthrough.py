"""The walkthrough as one component: all steps of a case as data, and the scripts that draw and play them in the
browser, where nothing is computed but colours and places."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import streamlit as st

from cufa.bench.traffic_steps import FLOAT32
from cufa.dashboard.model import walkthrough_words as words
from cufa.dashboard.model.walkthrough import BLOCK, BLOCKS, DECODE_TILES, MERGE, Step, Walk
from cufa.dashboard.theme import Palette

_FOLDER = Path(__file__).parents[1] / "walkthrough"
_SCRIPTS = ("draw.js", "order.js", "tile.js", "memory.js", "player.js")
"""One module, in this order."""
_DIGITS = 4


def data(walk: Walk, palette: Palette) -> dict[str, Any]:
    """Everything that the component shows."""
    case = walk.case
    return {
        "case": f"{dataclasses.astuple(case)}",
        "palette": _colours(palette),
        "decode": walk.is_decode,
        "fa1": case.algorithm == "fa1",
        "rows": 1 if walk.is_decode else BLOCKS,
        "columns": DECODE_TILES if walk.is_decode else BLOCKS,
        "block": BLOCK,
        "Q": _numbers(walk.Q),
        "K": _numbers(walk.K),
        "V": _numbers(walk.V),
        "order": words.order(walk),
        "steps": [_step(walk, n, step) for n, step in enumerate(walk.steps)],
        "meters": [_meter(walk, name) for name in walk.meters],
        "held": _held(walk),
    }


def _step(walk: Walk, n: int, step: Step) -> dict[str, Any]:
    tile, is_divided = step.tile, any(move.array == "O" and move.written for move in step.moved.moves)
    after = step.ended if is_divided and step.is_last else step.O
    kept: dict[str, Any] = {
        "i": step.q_block,
        "j": step.kv_block,
        "threadBlock": step.thread_block,
        "number": step.number,
        "skipped": step.moved.skipped,
        "last": step.is_last,
        "phases": [list(phase) for phase in words.phases(walk, step)],
        "error": _numbers(step.error, 9),
        "errorText": words.error(walk, step),
        "meterText": words.meter(walk, n),
        "reads": {move.array: move.read for move in step.moved.moves if move.read},
        "writes": {move.array: move.written for move in step.moved.moves if move.written},
        "O": [_numbers(x) for x in (step.O_before, step.O_scaled, after)],
        "divided": is_divided and step.is_last,
    }
    if step.kv_block == MERGE:
        kept["parts"] = [{"O": _numbers(part.O), "share": _numbers(part.share)} for part in step.parts]
    if tile is not None:
        kept |= {
            "S": _numbers(tile.S),
            "P": _numbers(tile.P),
            "m": [_numbers(tile.m_before), _numbers(tile.m_after)],
            "l": [_numbers(tile.l_before), _numbers(tile.l_after)],
            "alpha": _numbers(tile.alpha),
        }
    return kept


def _numbers(x: npt.NDArray[Any], digits: int = _DIGITS) -> Any:
    """As JSON has them: what is not finite (a score that is hidden, a maximum of nothing) is null."""
    wide = x.astype(np.float64)
    return np.where(np.isfinite(wide), wide.round(digits), None).tolist()


def _meter(walk: Walk, name: str) -> dict[str, Any]:
    read, written = words.meter_totals(walk, name)
    return {"name": words.ALGORITHMS[name], "read": read, "written": written}


def _held(walk: Walk) -> list[dict[str, Any]]:
    """What lies where while the algorithm runs: (name, bytes, whether a step's moves name it)."""
    item = walk.problem.q_element.itemsize
    tile = BLOCK * walk.problem.head_dim
    rows, keys = len(walk.Q), len(walk.K)
    of = {"Q": walk.Q.size * item, "K": walk.K.size * item, "V": walk.V.size * item}
    kept = BLOCK * 2 * FLOAT32
    device = [[name, size, [name]] for name, size in of.items()]
    if walk.case.algorithm == "fa1":
        device += [["O, l, m on their way", rows * (walk.problem.head_dim + 2) * FLOAT32, ["O", "l, m"]]]
    elif len(walk.meters) > 1 and walk.is_decode:
        splits = len({step.thread_block for step in walk.steps})
        device += [["O, m, l of splits", splits * (tile * FLOAT32 + kept), ["parts"]]]
    if walk.case.algorithm != "fa1":
        device += [["O", rows * walk.problem.head_dim * item, ["O"]]]
    device += [["L", rows * FLOAT32, ["L"]]]
    never = rows * keys * (FLOAT32 + item)
    shared = [["Q tile", tile * item, []], ["K tile", tile * item, []], ["V tile", tile * item, []]]
    registers = [["S, then P", BLOCK * BLOCK * FLOAT32, []], ["m, l", kept, []], ["O", tile * FLOAT32, []]]
    stays = "all of it leaves" if walk.case.algorithm == "fa1" else "O, m and l stay until the rows are done"
    return [
        {"level": "Registers", "items": registers, "said": f"S and P are gone with the tile, {stays}"},
        {"level": "Shared memory", "items": shared, "said": "of the thread block"},
        {
            "level": "Device memory",
            "items": device,
            "said": f"never S and P: naive keeps {never:,} B of them here",
        },
    ]


def _colours(palette: Palette) -> dict[str, Any]:
    names = ("name", "background", "panel", "text", "muted", "grid", "accent", "measured", "warn", "idle")
    plain = {name: getattr(palette, name) for name in names}
    return plain | {"series": list(palette.series), "scale": list(palette.scale)}


@functools.cache
def _component() -> Callable[..., Any]:
    script = "\n".join((_FOLDER / name).read_text("utf-8") for name in _SCRIPTS)
    found: Callable[..., Any] = st.components.v2.component(
        "cufa.walkthrough", css=(_FOLDER / "style.css").read_text("utf-8"), js=script
    )
    return found


def show(content: dict[str, Any], key: str, on_step: Callable[[], None]) -> None:
    """The component, at step ``content["start"]``. Where it was stopped it says in the session, under ``key``."""
    _component()(key=key, data=content, on_step_change=on_step)
