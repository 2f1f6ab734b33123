"""In what order thread blocks take work items, and when each would run: the one simulation of launches.

A work item is a query block of a head (FA1: a whole head; decode: a part of the keys of a sequence; backward: a key
block of a key/value head: :mod:`cufa.schedule.key_order`). Items are numbered in the order in which they are taken. The
device side is ``work_item`` (``cuda_src/shared/block_order.cuh``) and ``PersistentItems``
(``cuda_src/forward/fa3/persistent_items.cuh``); a test executes the kernels and compares.

Where query blocks are about equally long (full and band masks) items go head after head. Where later rows see more
keys they go from long query blocks to short ones within a group of heads: small groups keep their keys and values in
the L2 cache, and the size of a group also decides how evenly the last rounds fill the thread blocks. Of masks beyond
bands kernels take the last query blocks for the longest, unless they are told (:func:`longest_first`). Persistent
block b of G takes numbers b, 2G-1-b, 2G+b, …
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
"""As ``q_block``: the thread block does every query block of its head."""

#: Time that an item takes besides its tiles, in tiles: Q, the first scores, the store. With this value the
#: predicted end of the last block and times measured on an H200 (13 group sizes, 3 tilings) correlate best.
ITEM_COST = 0.5

#: Bytes of keys and values that stay in the L2 cache of a GPU (H200: 50 MB) beside everything else.
L2_SHARE = 24 << 20

#: How much longer than with the best group size work may take with one whose keys and values fit in the L2 cache, or,
#: where memory is slow, with a smaller one.
_CACHED, _CACHED_SLOW, _SMALLER_SLOW = 1.02, 1.04, 1.02

_MOST_ITEMS = 1 << 16  # beyond, rounds are so many that the last one does not matter


@dataclasses.dataclass(frozen=True)
class Order:
    """Work items in the order in which they are taken; arrays have one entry per item."""

    q_block: Ints
    """:data:`WHOLE_HEAD` where an item is a whole head; the key block where keys visit queries."""
    head: Ints
    """Counted over the batch; of keys and values where keys visit queries."""
    thread_block: Ints | None = None
    """The persistent thread block that takes each item; None: every item is a thread block of its own."""

    def __len__(self) -> int:
        return len(self.head)

    def tiles(self, schedule: Schedule) -> Ints:
        """Tiles that each item visits; where keys visit queries, of one query head."""
        if len(self) and self.q_block[0] == WHOLE_HEAD:
            return np.full(len(self), schedule.visited)
        return schedule.visits[self.q_block]


def simulate(order: Order, costs: npt.NDArray[np.generic], slots: int) -> tuple[Floats, Floats, Ints]:
    """(start, end, slot) of each item when ``slots`` thread blocks run at once and an item takes its cost.

    Items that are thread blocks of their own start, in order, wherever one has ended; a persistent thread block
    takes its own items one after another, in a slot of its own.
    """
    lengths = np.asarray(costs, np.float64)
    if order.thread_block is None and len(lengths) and 0 < lengths.min() == lengths.max():
        turn, where = np.divmod(np.arange(len(order)), slots)  # all slots end together, again and again
        turns = np.concatenate([[0.0], np.cumsum(lengths[: turn[-1] + 1])])  # added up as below
        return turns[turn], turns[turn + 1], where
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
    """When the last item ends. There is no need to know when, and where, each begins."""
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
    """(block, head) of each thread block: ``ordered_block`` of block_order.cuh. ``of_head`` bytes of a head are read by
    all of its blocks."""
    index = np.arange(rows * heads)
    if not problem.later_rows_see_more:
        head, block = np.divmod(index, rows)
        return block, head
    # Long blocks in groups of heads, then the shortest 3/8 of all heads.
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
    """Heads of a group, as many as fit in the L2 cache together, or fewer so that groups are alike."""
    num_groups = -(-heads // max(1, min(heads, share // max(of_head, 1))))
    return -(-heads // num_groups)


def persistent(problem: Problem, schedule: Schedule, device: Device, config: object = None) -> Order:
    """Persistent thread blocks, one per SM, that share out query blocks (FA3): ``PersistentItems``.
    Where tiles are listed, a block takes the next when it is ready for it, as a thread block of its own would come.
    ``config`` makes no difference."""
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
    """Query blocks from the longest to the shortest, where the host knows a mask beyond bands that all heads share.
    None where that is from the last to the first, as in kernels that are told nothing."""
    one = problem.mask.spread == (1, 1) and problem.lengths.kind == "dense" and problem.known
    return _longest_first(schedule) if problem.mask.beyond_band and one else None


def _longest_first(schedule: Schedule) -> Ints | None:
    backwards = schedule.visits[::-1]
    if (backwards[1:] <= backwards[:-1]).all():
        return None
    return schedule.num_q_blocks - 1 - np.argsort(-backwards, kind="stable")


def items_in_groups(
    num_q_blocks: int, heads: int, num_blocks: int, group: int, longest: Ints | None = None
) -> Order:
    """Within each group of heads from the last block to the first, or as ``longest`` says: of query blocks, from
    longest to shortest."""
    index = np.arange(num_q_blocks * heads)
    number, rest = np.divmod(index, group * num_q_blocks)
    members = np.minimum(group, heads - number * group)
    place = rest // members
    blocks = num_q_blocks - 1 - place if longest is None else longest[place]
    return Order(blocks, number * group + rest % members, _taker(index, num_blocks))


def _taker(index: Ints, num_blocks: int) -> Ints:
    """The persistent block that takes each item: forwards and backwards by turns."""
    turn, place = np.divmod(index, num_blocks)
    return np.where(turn % 2 == 0, place, num_blocks - 1 - place)


def group_of_heads(problem: Problem, schedule: Schedule, num_blocks: int, slow_memory: bool) -> int:
    """:func:`heads_per_group` of a problem."""
    by_length = longest_first(problem, schedule) is not None
    heads = problem.batch * problem.heads
    slow = slow_memory and problem.head_dim > 128  # of wide heads it was measured
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
    """The group size that leaves the blocks least idle, among those whose keys and values fit in the L2 cache
    where that costs no more than one part in fifty; of equals the largest.

    Where memory is slow (:attr:`~cufa.gpu.architectures.Device.slow_memory`) keys and values that fit may cost one
    part in twenty-five, and of those within one in fifty of the best that fits it is the smallest, as small groups
    spread reads of keys and values over time. Measured on an H100 (2026-11-25, bf16, causal, batch × heads × length),
    speed over that with the group chosen otherwise:

    - d256, 16 × 8 × 1,024 (otherwise 12): groups of 1 and 2 1.07 and 1.09; of 11 and 22 1.05; of 44 0.90
    - d256, 4 × 8 × 4,096 (otherwise 32, none of which fits): of 1 and 3 1.05; of 2, uneven, 0.74
    - d256, 1 × 8 × 16,384 (otherwise 8, as now: what fits is 1.8 times as long): of 3 and 6 0.84 and 0.83
    - d128, 16 × 16 × 1,024 (otherwise 44): of 6, 11 and 22 1.01 to 1.02; of 66 0.94

    ``heads`` counts over the batch; ``head_bytes`` is the size of one head's keys and values. ``by_length``: query
    blocks are taken as :func:`longest_first` says.
    """
    fitting = max(1, min(heads, L2_SHARE // max(head_bytes, 1)))
    items = schedule.num_q_blocks * heads
    if items <= num_blocks or items > _MOST_ITEMS:
        return fitting
    # Numbers that divide the blocks evenly are the likely ones; each costs a tenth of a millisecond to try.
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
