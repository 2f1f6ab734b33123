"""The order in which thread blocks take work items, and the time at which each item would run: the one simulation of
launches.

A work item is a query block of a head. FA1: a whole head. Decode: a part of the keys of a sequence. Backward: a key
block of a key/value head (:mod:`cufa.schedule.key_order`). Items are numbered in the order in which they are taken.
Device side: ``work_item`` (``cuda_src/shared/block_order.cuh``) and ``PersistentItems``
(``cuda_src/forward/fa3/persistent_items.cuh``); a test executes the kernels and compares.

If query blocks have about equal length (full and band masks), items go head after head. If later rows see more keys,
items go from long to short query blocks within a head batch. Small batches keep their keys and values in the L2 cache;
the batch size also decides how evenly the last rounds fill the thread blocks. Under irregular masks kernels take the
last query blocks for the longest, unless the host gives an order (:func:`longest_first`). Persistent block b of G takes
numbers b, 2G-1-b, 2G+b, …
"""

from __future__ import annotations

import dataclasses
import functools
import heapq

import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..problem.problem import Problem
from .schedule import Schedule

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WHOLE_HEAD = -1
"""A ``q_block``: the thread block computes every query block of its head."""

#: Time that an item takes besides its tiles, in tiles: Q, the first scores, the store. With this value the
#: predicted end of the last block and times measured on an H200 (13 group sizes, 3 tilings) correlate best.
ITEM_COST = 0.5

#: Bytes of keys and values that stay in the L2 cache of a GPU (H200: 50 MB) beside everything else.
L2_SHARE = 24 << 20

#: Time relative to the best head batch that is accepted for a batch whose keys and values fit in the L2 cache: in
#: general, and if memory is slow. Third: if memory is slow, the time that is accepted for a smaller batch.
_CACHED, _CACHED_SLOW, _SMALLER_SLOW = 1.02, 1.04, 1.02

_MOST_ITEMS = 1 << 16  # with more items there are so many rounds that the last one does not matter


@dataclasses.dataclass(frozen=True)
class Order:
    """Work items in the order in which they are taken; arrays have one entry per item."""

    q_block: Ints
    """:data:`WHOLE_HEAD` if an item is a whole head; in the backward the key block."""
    head: Ints
    """Counted over the batch; in the backward the key/value head."""
    thread_block: Ints | None = None
    """The persistent thread block that takes each item; None: every item is a thread block of its own."""

    def __len__(self) -> int:
        return len(self.head)

    def tiles(self, schedule: Schedule) -> Ints:
        """Tiles that each item visits; in the backward, for one query head."""
        if len(self) and self.q_block[0] == WHOLE_HEAD:
            return np.full(len(self), schedule.visited)
        return schedule.visits[self.q_block]


def simulate(order: Order, costs: npt.NDArray[np.generic], slots: int) -> tuple[Floats, Floats, Ints]:
    """(start, end, slot) of each item if ``slots`` thread blocks are resident and an item takes its cost.

    Items that are thread blocks of their own start, in order, in the slot that is free first. A persistent block takes
    its items one after another, in a slot of its own.
    """
    lengths = np.asarray(costs, np.float64)
    if order.thread_block is None and len(lengths) and 0 < lengths.min() == lengths.max():
        wave, where = np.divmod(np.arange(len(order)), slots)  # all slots of a wave end together
        starts = np.concatenate([[0.0], np.cumsum(lengths[: wave[-1] + 1])])  # the sums of the loop below
        return starts[wave], starts[wave + 1], where
    if order.thread_block is None:
        free = [(0.0, slot) for slot in range(slots)]  # a heap: all free at 0, slot after slot
        taken = []
        for length in lengths.tolist():
            at, slot = place = free[0]
            taken.append(place)
            heapq.heapreplace(free, (at + length, slot))
        start = np.array([at for at, _ in taken], np.float64)
        return start, start + lengths, np.array([slot for _, slot in taken], np.int64)
    block = order.thread_block
    by_block = np.argsort(block, kind="stable")
    ends = np.cumsum(lengths[by_block])
    first = np.searchsorted(block[by_block], np.arange(block.max(initial=0) + 1))
    before = ends[first] - lengths[by_block][first]
    end = np.empty(len(order))
    end[by_block] = ends - before[block[by_block]]
    return end - lengths, end, block


def makespan(order: Order, costs: npt.NDArray[np.generic], slots: int) -> float:
    """The end of the last item; costs less than :func:`simulate`."""
    if order.thread_block is not None:
        return float(np.bincount(order.thread_block, costs).max(initial=0.0))
    free = [0.0] * slots
    for length in np.asarray(costs, np.float64).tolist():
        heapq.heapreplace(free, free[0] + length)
    return max(free)


# --- The orders of our kernels ----------------------------------------------------------------------------


def whole_heads(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per head (FA1)."""
    heads = np.arange(problem.batch * problem.heads)
    return Order(np.full(len(heads), WHOLE_HEAD), heads)


def query_blocks(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per query block and head (FA2): ``work_item`` of block_order.cuh."""
    heads = problem.batch * problem.heads
    block, head = head_blocks(problem, schedule.num_q_blocks, heads, head_bytes(problem))
    return Order(block, head)


def head_blocks(problem: Problem, rows: int, heads: int, of_head: int) -> tuple[Ints, Ints]:
    """(block, head) of each thread block: ``ordered_block`` of block_order.cuh. All blocks of a head read the same
    ``of_head`` bytes."""
    index = np.arange(rows * heads)
    if not problem.later_rows_see_more:
        head, block = np.divmod(index, rows)
        return block, head
    # Long blocks in head batches, then the shortest 3/8 of all heads.
    short = rows * 3 // 8
    long = rows - short
    group_heads = even_groups(heads, of_head)
    group, rest = np.divmod(index, group_heads * long)
    members = np.clip(heads - group * group_heads, 1, group_heads)
    filling = index - long * heads
    is_long = filling < 0
    head = np.where(is_long, group * group_heads + rest % members, filling % heads)
    return np.where(is_long, rows - 1 - rest // members, short - 1 - filling // heads), head


def even_groups(heads: int, of_head: int, share: int = L2_SHARE) -> int:
    """Heads of a head batch: as many as fit in the L2 cache together, or fewer if batches are then equal."""
    num_groups = -(-heads // max(1, min(heads, share // max(of_head, 1))))
    return -(-heads // num_groups)


def persistent(problem: Problem, schedule: Schedule, device: Device, config: object = None) -> Order:
    """Persistent blocks, one per SM, which share the query blocks (FA3): ``PersistentItems``. With
    listed tiles, a block that is free takes the next item, as if items were thread blocks of their own. ``config`` is
    not read."""
    heads = problem.batch * problem.heads
    num_blocks = min(device.num_sms, schedule.num_q_blocks * heads)
    if not problem.later_rows_see_more:
        head, q_block = np.divmod(np.arange(schedule.num_q_blocks * heads), schedule.num_q_blocks)
        return Order(q_block, head, _taker(np.arange(len(head)), num_blocks))
    group = group_of_heads(problem, schedule, num_blocks, device.slow_memory)
    found = items_in_groups(schedule.num_q_blocks, heads, num_blocks, group, longest_first(problem, schedule))
    return dataclasses.replace(found, thread_block=None) if problem.tiles_are_listed else found


def head_bytes(problem: Problem) -> int:
    """Keys and values of one head."""
    return problem.seqlen_k * problem.head_dim * (problem.k_element.itemsize + problem.v_element.itemsize)


def longest_first(problem: Problem, schedule: Schedule) -> Ints | None:
    """Query blocks from the longest to the shortest, if the host knows an irregular mask that all heads share. None if
    that is from the last to the first, the kernels' own order."""
    one = problem.mask.spread == (1, 1) and problem.lengths.kind == "dense" and problem.known
    return _longest_first(schedule) if problem.mask.irregular_kind and one else None


def _longest_first(schedule: Schedule) -> Ints | None:
    backwards = schedule.visits[::-1]
    if (backwards[1:] <= backwards[:-1]).all():
        return None
    return schedule.num_q_blocks - 1 - np.argsort(-backwards, kind="stable")


def items_in_groups(
    num_q_blocks: int, heads: int, num_blocks: int, group: int, longest: Ints | None = None
) -> Order:
    """Within each head batch from the last block to the first, or in the order of ``longest``: query blocks from the
    longest to the shortest."""
    index = np.arange(num_q_blocks * heads)
    number, rest = np.divmod(index, group * num_q_blocks)
    members = np.minimum(group, heads - number * group)
    place = rest // members
    blocks = num_q_blocks - 1 - place if longest is None else longest[place]
    return Order(blocks, number * group + rest % members, _taker(index, num_blocks))


def _taker(index: Ints, num_blocks: int) -> Ints:
    """The persistent block that takes each item: every second round is reversed."""
    wave, place = np.divmod(index, num_blocks)
    return np.where(wave % 2 == 0, place, num_blocks - 1 - place)


def group_of_heads(problem: Problem, schedule: Schedule, num_blocks: int, slow_memory: bool) -> int:
    """:func:`heads_per_group` of a problem."""
    by_length = longest_first(problem, schedule) is not None
    heads = problem.batch * problem.heads
    slow = slow_memory and problem.head_dim > 128  # measured for wide heads
    return heads_per_group(schedule, heads, num_blocks, head_bytes(problem), by_length, slow)


@functools.lru_cache(maxsize=256)
def heads_per_group(
    schedule: Schedule,
    heads: int,
    num_blocks: int,
    head_bytes: int,
    by_length: bool = False,
    slow_memory: bool = False,
) -> int:
    """The size of a head batch with the least idle time of blocks. A batch whose keys and values fit in the L2 cache is
    preferred if it costs at most one part in fifty; of equal sizes, the largest.

    If memory is slow (:attr:`~cufa.gpu.architectures.Device.slow_memory`), a batch that fits may cost one part in
    twenty-five. Of the batches within one in fifty of the best that fits, the smallest is taken: small batches spread
    the reads of keys and values over time. Measurements: cuda_src/forward/fa3/NOTES.md.

    ``heads`` counts over the batch; ``head_bytes`` is the size of one head's keys and values. ``by_length``: query
    blocks are taken in the order of :func:`longest_first`.
    """
    fitting = max(1, min(heads, L2_SHARE // max(head_bytes, 1)))
    items = schedule.num_q_blocks * heads
    if items <= num_blocks or items > _MOST_ITEMS:
        return fitting
    # Sizes that divide the blocks evenly are the likely ones; a trial takes a tenth of a millisecond.
    step = max(1, num_blocks // 12)
    likely = {*range(step, min(fitting, 8 * step) + 1, step), 1, 2, 3, 4, 6, 8, 12, 24, 48, fitting, heads}
    idle: dict[int, float] = {}
    longest = _longest_first(schedule) if by_length else None
    for group in likely:
        if group <= heads:
            order = items_in_groups(schedule.num_q_blocks, heads, num_blocks, group, longest)
            idle[group] = makespan(order, order.tiles(schedule) + ITEM_COST, num_blocks)
    cached = [n for n in idle if n <= fitting]
    best = min(idle.values())
    if min(idle[n] for n in cached) <= (_CACHED_SLOW if slow_memory else _CACHED) * best:
        best = min(idle[n] for n in cached)
        if slow_memory:
            return min(n for n in cached if idle[n] <= _SMALLER_SLOW * best)
        return max(n for n in cached if idle[n] <= 1.001 * best)
    return max(n for n in idle if idle[n] <= 1.001 * best)
