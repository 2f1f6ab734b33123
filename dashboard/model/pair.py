"""Comparison of two launches of one operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from cufa.dashboard.model import work
from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.model.launch import Timeline
from cufa.dashboard.model.many import grouped
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.tilings import is_of
from cufa.kernels import Kernel, TileConfig
from cufa.measure.regimes import Regime
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule

FLOP = "FLOP"
"""Unit of a predicted timeline in a comparison: arithmetic that an SM could have done until then."""


def in_arithmetic(
    timeline: Timeline, problem: Problem, schedule: Schedule, blocks_of_item: int = 1
) -> Timeline:
    """A timeline predicted in tiles, in units of FLOP, which are comparable between tile sizes. Resident blocks share
    the rate of their SM; ``blocks_of_item`` blocks share the work of a tile."""
    tiles = schedule.visited * problem.batch * problem.heads * blocks_of_item
    flop = work.work(problem, schedule).done / tiles if tiles else 0.0
    if schedule.by_keys:  # tiles of an item are counted for one query head of its query group
        flop *= problem.group_size
    scale = flop * (timeline.slots_per_sm if timeline.blocks.thread_block is None else 1)
    return dataclasses.replace(timeline, start=scale * timeline.start, end=scale * timeline.end, unit=FLOP)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launch, to be found among measurements."""

    problem: Problem
    spec: Kernel
    config: TileConfig

    def is_in(self, m: Measurement) -> bool:
        """Whether the measurement is of this launch."""
        is_same = m.problem == self.problem and m.kernel == self.spec.name
        return is_same and is_of(self.config, m.row.json.get("config"))


def times_of_both(found: Iterable[Measurement], sides: Sequence[Launched], card: str) -> list[Measurement]:
    """The newest times in turns of all sides from one source, of this card if there are some; empty if no source has
    all sides."""
    complete = []
    for of_source in grouped((m for m in found if m.regime is Regime.IN_TURNS), lambda m: m.source).values():
        both = [next((m for m in of_source if side.is_in(m)), None) for side in sides]
        told = [m for m in both if m is not None]
        if len(told) == len(sides):
            complete.append(told)
    return max(complete, key=lambda told: (is_same_card(told[0].machine, card), told[0].recorded), default=[])
