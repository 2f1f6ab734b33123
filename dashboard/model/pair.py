"""Comparison of two launches of one operation."""

from __future__ import annotations

import dataclasses

from cufa.dashboard.model import work
from cufa.dashboard.model.launch import Timeline
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
