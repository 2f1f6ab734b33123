"""FA3's techniques switched on one after the other: what each step brings, predicted and measured.

A step is a compile-time switch of the registry's configs, or the way of launching; what a config does not
switch is part of every step.
"""

from __future__ import annotations

import dataclasses

from ..kernels import TileConfig
from .cases import Contender

#: (switch of the configs, what it adds), in the order of the story. "" is not a switch: persistent thread
#: blocks, which run on from item to item, instead of one block for each item.
STEPS = (
    ("PING_PONG", "ping-pong"),
    ("STORE_BY_TMA", "O by TMA"),
    ("", "persistent blocks"),
)


def ladder(algorithm: str, config: TileConfig) -> tuple[Contender, ...]:
    """One contender a step: the first with all that can be switched off, the last with all of ``config``."""
    switches = dict(config.switches)
    steps = [(name, words) for name, words in STEPS if not name or switches.get(name)]
    rungs = []
    for n in range(len(steps) + 1):
        off = {name: False for name, _ in steps[n:] if name}
        chosen = dataclasses.replace(config, switches=tuple({**switches, **off}.items()))
        added = f"+ {steps[n - 1][1]}" if n else "TMA, WGMMA, warp specialisation, overlap inside a warpgroup"
        one_item = any(not name for name, _ in steps[n:])
        rungs.append(Contender(algorithm, chosen, f"{n}. {added}", one_item_a_block=one_item))
    return tuple(rungs)
