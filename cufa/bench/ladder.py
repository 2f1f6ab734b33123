"""FA3's techniques switched on one after the other: what each step brings, predicted and measured.

A step is a field of FA3's configs, or the way of launching; what a config switches off itself is no step.
"""

from __future__ import annotations

import dataclasses

from ..kernels import TileConfig
from ..kernels.fa3 import Fa3Config
from .cases import Contender

#: (field of the configs, what it adds), in the order of the story. "" is no field: persistent thread
#: blocks, which run on from item to item, instead of one block for each item.
STEPS = (
    ("ping_pong", "ping-pong"),
    ("store_by_tma", "O by TMA"),
    ("", "persistent blocks"),
)


def ladder(algorithm: str, config: TileConfig) -> tuple[Contender, ...]:
    """One contender a step: the first with all that can be switched off, the last with all of ``config``."""
    assert isinstance(config, Fa3Config)
    steps = [(name, words) for name, words in STEPS if not name or getattr(config, name)]
    rungs = []
    for n in range(len(steps) + 1):
        chosen = dataclasses.replace(config, **{name: False for name, _ in steps[n:] if name})
        added = f"+ {steps[n - 1][1]}" if n else "TMA, WGMMA, warp specialisation, overlap inside a warpgroup"
        one_item = any(not name for name, _ in steps[n:])
        rungs.append(Contender(algorithm, chosen, f"{n}. {added}", one_item_a_block=one_item))
    return tuple(rungs)
