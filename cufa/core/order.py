"""In what order persistent thread blocks take their query blocks: the host side of ``PersistentItems`` in
``cuda_src/tiles/schedule.cuh``.

Items (a query block of a head) are numbered; block b of G takes numbers b, 2G-1-b, 2G+b, ... Full attention
numbers head after head. Causal attention goes from long query blocks to short ones within a group of heads:
small groups keep their keys and values in the L2 cache, and the size of a group also decides how evenly the
last rounds fill the blocks. Both are known before the launch, so the size is chosen here, once a plan.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .schedule import Schedule

Ints = npt.NDArray[np.int64]

#: Time that an item takes besides its tiles, in tiles: Q, the first scores, the store. With this value the
#: predicted end of the last block and times measured on an H200 (13 group sizes, 3 tilings) correlate best.
ITEM_COST = 0.5

#: Bytes of keys and values that stay in the L2 cache of a GPU (H200: 50 MB) beside everything else.
L2_SHARE = 24 << 20

_MOST_ITEMS = 1 << 16  # beyond, rounds are so many that the last one does not matter


def causal_items(index: Ints, num_q_blocks: int, heads: int, heads_per_group: int) -> tuple[Ints, Ints]:
    """(head, query block) of each item number; heads are counted over the batch."""
    group, rest = np.divmod(index, heads_per_group * num_q_blocks)
    members = np.minimum(heads_per_group, heads - group * heads_per_group)
    return group * heads_per_group + rest % members, num_q_blocks - 1 - rest // members


def taker(index: Ints, num_blocks: int) -> Ints:
    """The persistent block that takes each item: forwards and backwards by turns."""
    turn, place = np.divmod(index, num_blocks)
    return np.where(turn % 2 == 0, place, num_blocks - 1 - place)


@functools.lru_cache(maxsize=256)
def heads_per_group(schedule: Schedule, heads: int, num_blocks: int, head_bytes: int) -> int:
    """The group size that leaves the blocks least idle, among those whose keys and values fit in the L2 cache
    where that costs no more than one part in fifty; of equals the largest.

    ``heads`` counts over the batch; ``head_bytes`` is the size of one head's keys and values.
    """
    fitting = max(1, min(heads, L2_SHARE // max(head_bytes, 1)))
    items = schedule.num_q_blocks * heads
    if items <= num_blocks or items > _MOST_ITEMS:
        return fitting
    # Numbers that divide the blocks evenly are the likely ones; each costs a tenth of a millisecond to try.
    step = max(1, num_blocks // 12)
    likely = {*range(step, min(fitting, 8 * step) + 1, step), 1, 2, 3, 4, 6, 8, 12, 24, 48, fitting, heads}
    idle: dict[int, float] = {n: _makespan(schedule, heads, num_blocks, n) for n in likely if n <= heads}
    cached = [n for n in idle if n <= fitting]
    best = min(idle.values())
    if min(idle[n] for n in cached) <= 1.02 * best:
        best = min(idle[n] for n in cached)
        return max(n for n in cached if idle[n] <= 1.001 * best)
    return max(n for n in idle if idle[n] <= 1.001 * best)


def _makespan(schedule: Schedule, heads: int, num_blocks: int, group: int) -> float:
    """When the last block ends, in tiles."""
    index = np.arange(schedule.num_q_blocks * heads)
    _, q_block = causal_items(index, schedule.num_q_blocks, heads, group)
    time = schedule.visits[q_block] + ITEM_COST
    return float(np.bincount(taker(index, num_blocks), time).max())
