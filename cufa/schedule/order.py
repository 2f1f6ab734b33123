"""The order in which thread blocks take work items, and a simulation of when each item starts and ends.

A work item of the forward is a query block of a head; of FA1, a whole head. A work item of the backward is a key block
of a key/value head (:mod:`cufa.schedule.key_order`). Items are numbered in the order in which they are taken.
Device side: ``work_item`` (``cuda_src/shared/block_order.cuh``) and ``PersistentItems``
(``cuda_src/forward/fa3/persistent_items.cuh``); a test executes the kernels and compares.

If query blocks visit about equally many tiles (full masks, sliding windows), blocks take head after head. If later
rows see more keys, blocks take long query blocks before short ones within each head batch. A small head batch keeps its
keys and values in the L2 cache; the batch size also decides how evenly the last round fills the thread blocks. Under an
irregular mask, kernels assume that the last query blocks are the longest, unless the host passes an order
(:func:`longest_first`). Persistent block b of G takes items b, 2G-1-b, 2G+b, …
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

#: Time that an item takes in addition to its tiles, in tiles: the load of Q, the first scores, the store. Of the values
#: tried, this one predicts the measured end of the last block best (cuda_src/forward/fa3/NOTES.md).
ITEM_COST = 0.5

#: Items visit about equally many tiles if the longest visits at most this many times the tiles of the shortest.
ALIKE = 1.1

#: Bytes of keys and values that stay in the L2 cache of a GPU (H200: 50 MB) among all other data.
L2_SHARE = 24 << 20

#: A head batch that fits in the L2 cache is preferred up to this time, relative to the best batch: on fast memory; on
#: slow memory or for wide heads that read much; for heads that read much and share no keys. Fourth: on slow memory, a
#: smaller batch is preferred up to this time, relative to the best that fits.
_CACHED, _CACHED_SLOW, _CACHED_MUCH, _SMALLER_SLOW = 1.02, 1.04, 1.12, 1.02

#: Heads read much if keys and values of all take more than this many times L2_SHARE: in one head batch each query
#: block would read them from memory, which takes up to 1.19 times as long.
_MUCH = 8

#: With more work items, the last of the many rounds does not matter: the size of a head batch is not searched.
_MOST_ITEMS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Order:
    """Work items in the order in which they are taken; arrays have one entry per item."""

    q_block: Ints
    """:data:`WHOLE_HEAD` if an item is a whole head; in the backward the key block."""
    head: Ints
    """Counted over the batch; in the backward the key/value head."""
    thread_block: Ints | None = None
    """The persistent block that takes each item; None: each item has its own thread block."""

    def __len__(self) -> int:
        return len(self.head)

    def tiles(self, schedule: Schedule) -> Ints:
        """Tiles that each item visits; in the backward, for one query head."""
        if len(self) and self.q_block[0] == WHOLE_HEAD:
            return np.full(len(self), schedule.visited)
        return schedule.visits[self.q_block]


def simulate(order: Order, costs: npt.NDArray[np.generic], slots: int) -> tuple[Floats, Floats, Ints]:
    """(start, end, slot) of each item if ``slots`` thread blocks are resident. ``costs``: duration of each item.

    Items with their own thread block start in order, each in the slot that is free first. A persistent block has its
    own slot, and takes its items one after another.
    """
    lengths = np.asarray(costs, np.float64)
    if order.thread_block is None and len(lengths) and 0 < lengths.min() == lengths.max():
        wave, where = np.divmod(np.arange(len(order)), slots)  # all slots of a wave end together
        starts = np.concatenate(
            [[0.0], np.cumsum(lengths[: wave[-1] + 1])]
        )  # same rounding as the loop below
        return starts[wave], starts[wave + 1], where
    if order.thread_block is None:
        free = [(0.0, slot) for slot in range(slots)]  # a heap
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
    """The end of the last item; faster than :func:`simulate`."""
    if order.thread_block is not None:
        return float(np.bincount(order.thread_block, costs).max(initial=0.0))
    free = [0.0] * slots
    for length in np.asarray(costs, np.float64).tolist():
        heapq.heapreplace(free, free[0] + length)
    return max(free)


# --- The orders of the kernels ----------------------------------------------------------------------------


def whole_heads(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per head (FA1)."""
    heads = np.arange(problem.batch * problem.heads)
    return Order(np.full(len(heads), WHOLE_HEAD), heads)


def query_blocks(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per query block and head (FA2): ``work_item`` of block_order.cuh."""
    heads = problem.batch * problem.heads
    block, head = head_blocks(problem, schedule.num_q_blocks, heads, head_bytes(problem))
    return Order(block, head)


def head_blocks(problem: Problem, rows: int, heads: int, bytes_per_head: int) -> tuple[Ints, Ints]:
    """(block, head) of each thread block: ``ordered_block`` of block_order.cuh. ``rows``: blocks of a head.
    ``bytes_per_head``: bytes that all blocks of a head read."""
    index = np.arange(rows * heads)
    if not problem.later_rows_see_more:
        head, block = np.divmod(index, rows)
        return block, head
    # First the longest 5/8 of the blocks, in head batches; then the shortest 3/8 of the blocks of all heads.
    short = rows * 3 // 8
    long = rows - short
    size = even_batch(heads, bytes_per_head)
    batch, rest = np.divmod(index, size * long)
    members = np.clip(heads - batch * size, 1, size)
    filling = index - long * heads
    is_long = filling < 0
    head = np.where(is_long, batch * size + rest % members, filling % heads)
    return np.where(is_long, rows - 1 - rest // members, short - 1 - filling // heads), head


def even_batch(heads: int, bytes_per_head: int, share: int = L2_SHARE) -> int:
    """Heads of a head batch. The heads' bytes fit in ``share``, and all batches have about the same size.
    ``bytes_per_head``: bytes of one head."""
    num_batches = -(-heads // max(1, min(heads, share // max(bytes_per_head, 1))))
    return -(-heads // num_batches)


def persistent(problem: Problem, schedule: Schedule, device: Device, config: object = None) -> Order:
    """Persistent blocks, one per SM, which share the query blocks (FA3): ``PersistentItems``. With listed tiles, a
    block that is free takes the next item, as if each item had its own thread block. ``config`` is not read."""
    heads = problem.batch * problem.heads
    num_blocks = min(device.num_sms, schedule.num_q_blocks * heads)
    if not problem.later_rows_see_more:
        head, q_block = np.divmod(np.arange(schedule.num_q_blocks * heads), schedule.num_q_blocks)
        return Order(q_block, head, _taker(np.arange(len(head)), num_blocks))
    size = head_batch_size(problem, schedule, num_blocks, device.slow_memory)
    found = items_in_batches(schedule.num_q_blocks, heads, num_blocks, size, longest_first(problem, schedule))
    return dataclasses.replace(found, thread_block=None) if problem.tiles_are_listed else found


def head_bytes(problem: Problem) -> int:
    """Bytes of the keys and values of one head."""
    return problem.seqlen_k * problem.key_bytes


def longest_first(problem: Problem, schedule: Schedule) -> Ints | None:
    """Query blocks from the longest to the shortest, for an irregular mask that the host knows and all heads share.
    None: the kernels' own order, from the last query block to the first."""
    one = problem.mask.spread == (1, 1) and problem.lengths.kind == "dense" and problem.known
    return _longest_first(schedule) if problem.mask.irregular_kind and one else None


def _longest_first(schedule: Schedule) -> Ints | None:
    backwards = schedule.visits[::-1]
    if (backwards[1:] <= backwards[:-1]).all():
        return None
    return schedule.num_q_blocks - 1 - np.argsort(-backwards, kind="stable")


def items_in_batches(
    num_q_blocks: int, heads: int, num_blocks: int, size: int, longest: Ints | None = None
) -> Order:
    """Items of ``num_blocks`` persistent blocks, in head batches of ``size`` heads. In a batch, query blocks go from
    the last to the first, or in the order ``longest`` (:func:`longest_first`)."""
    index = np.arange(num_q_blocks * heads)
    batch, rest = np.divmod(index, size * num_q_blocks)
    members = np.minimum(size, heads - batch * size)
    place = rest // members
    blocks = num_q_blocks - 1 - place if longest is None else longest[place]
    return Order(blocks, batch * size + rest % members, _taker(index, num_blocks))


def _taker(index: Ints, num_blocks: int) -> Ints:
    """The persistent block that takes each item: every second round is reversed."""
    wave, place = np.divmod(index, num_blocks)
    return np.where(wave % 2 == 0, place, num_blocks - 1 - place)


def head_batch_size(problem: Problem, schedule: Schedule, num_blocks: int, slow_memory: bool) -> int:
    """Heads of a head batch of ``num_blocks`` persistent blocks: :func:`best_head_batch` for a problem."""
    by_length = longest_first(problem, schedule) is not None
    heads, wide = problem.batch * problem.heads, problem.head_dim > 128
    much = heads * head_bytes(problem) > _MUCH * L2_SHARE
    # Narrower heads on slow memory gain nothing from the other rules: cuda_src/forward/fa3/NOTES.md.
    limit = _CACHED_SLOW if wide and (slow_memory or much) else _CACHED
    if much and problem.group_size == 1:
        limit = _CACHED_MUCH
    return best_head_batch(
        schedule, heads, num_blocks, head_bytes(problem), by_length, wide and slow_memory, limit
    )


@functools.lru_cache(maxsize=256)
def best_head_batch(
    schedule: Schedule, heads: int, num_blocks: int, head_bytes: int, by_length: bool = False,
    slow_memory: bool = False, limit: float = _CACHED,
) -> int:  # fmt: skip
    """The head batch size with the shortest simulated run. A batch whose keys and values fit in the L2 cache is
    preferred if the run takes at most ``limit`` times as long. Of sizes with equal times, the largest is chosen.

    On slow memory (:attr:`~cufa.gpu.architectures.Device.slow_memory`), of the batches within 2% of the best that fits,
    the smallest is chosen: small batches spread the reads of keys and values over time. Measurements:
    cuda_src/forward/fa3/NOTES.md.

    ``heads``: query heads of all sequences. ``head_bytes``: bytes of one head's keys and values. ``by_length``: query
    blocks go in the order of :func:`longest_first`.
    """
    fitting = max(1, min(heads, L2_SHARE // max(head_bytes, 1)))
    items = schedule.num_q_blocks * heads
    if items <= num_blocks or items > _MOST_ITEMS:
        return fitting
    # Only likely sizes are simulated, mostly divisors of the number of blocks: each simulation takes 0.1 ms.
    step = max(1, num_blocks // 12)
    likely = {*range(step, min(fitting, 8 * step) + 1, step), 1, 2, 3, 4, 6, 8, 12, 24, 48, fitting, heads}
    ends: dict[int, float] = {}
    longest = _longest_first(schedule) if by_length else None
    for size in likely:
        if size <= heads:
            order = items_in_batches(schedule.num_q_blocks, heads, num_blocks, size, longest)
            ends[size] = makespan(order, order.tiles(schedule) + ITEM_COST, num_blocks)
    cached = [n for n in ends if n <= fitting]
    best = min(ends.values())
    if min(ends[n] for n in cached) <= limit * best:
        best = min(ends[n] for n in cached)
        if slow_memory:
            return min(n for n in cached if ends[n] <= _SMALLER_SLOW * best)
        return max(n for n in cached if ends[n] <= 1.001 * best)
    return max(n for n in ends if ends[n] <= 1.001 * best)
