"""The order in which thread blocks of the backward take key blocks of key/value heads, and its head batches.

Device side: ``key_item`` in ``cuda_src/backward/common/schedule.cuh`` and ``HeadBatches`` in ``workspace.cuh`` of the
same folder; a test executes the kernels and compares. Measurements: cuda_src/backward/common/NOTES.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..gpu.architectures import Device
from ..problem.problem import Problem
from .order import L2_SHARE, Ints, Order, even_batch, head_blocks, items_in_batches
from .schedule import Schedule


def key_blocks(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per key block and key/value head (backward): ``key_item`` of backward/common/schedule.cuh."""
    heads, columns = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    # With a fixed addition order, from the last key block to the first: a block adds to dQ after the later key blocks.
    if has_listed_tickets(problem):
        first, members, rest = _of_head_batches(columns, heads, listed_batches(problem, columns))
        return Order(columns - 1 - rest // members, first + rest % members)
    if problem.deterministic:
        in_batches = items_in_batches(columns, heads, 1, deterministic_batch(problem))
        return dataclasses.replace(in_batches, thread_block=None)
    block, head = head_blocks(problem, columns, heads, _bytes_of_queries(problem))
    # If later rows see more keys, early key blocks visit more query tiles: reverse the order of key blocks.
    return Order(columns - 1 - block if problem.later_rows_see_more else block, head)


def deterministic_batch(problem: Problem) -> int:
    """Key/value heads of a head batch with a fixed addition order: Q, dO and dQ of a batch take at most ``L2_SHARE``
    bytes. Packed sequences are stored in the same heads.

    A larger batch makes fewer blocks wait for an earlier addition, but keeps less of dQ in the L2 cache.
    """
    heads = problem.kv_heads * (1 if problem.lengths.kind == "packed" else problem.batch)
    return even_batch(max(heads, 1), _bytes_of_queries(problem), L2_SHARE)


def _bytes_of_queries(problem: Problem) -> int:
    """Bytes of Q, dO, and dQ in float32, of one query head."""
    q_bytes = problem.head_dim * (problem.q_element.itemsize + 4)
    return problem.seqlen_q * (q_bytes + problem.v_dim * problem.out_element.itemsize)


@dataclasses.dataclass(frozen=True)
class HeadBatches:
    """Head batches of the backward on Hopper, and of every kernel with listed tickets: ``HeadBatches`` of
    backward/common/workspace.cuh."""

    size: int
    """Key/value heads of each batch but the last."""
    whole: int
    """Batches before the last. The last batch has all remaining heads: a small last batch would leave most SMs idle."""
    before: int
    """Batches that the prepare pass handles; persistent blocks prepare the others while they compute key blocks."""
    converted: int
    """Batches that persistent blocks convert while they compute key blocks; the convert pass handles the others."""

    def scalars(self) -> dict[str, int]:
        """Members of the kernels' parameter structure."""
        return {
            "heads_per_head_batch": self.size,
            "whole_head_batches": self.whole,
            "head_batches_before": self.before,
            "head_batches_converted": self.converted,
        }


#: Most bytes of dQ in float32 of a head batch. A query group's heads are computed in sequence: one of them counts.
_BATCH_BYTES = 12 << 20
#: Fewest key blocks of a batch that is not small, slightly more than the SMs of an H200 or H100: no SM waits for the
#: next batch. Second: fewest key blocks of the last batch.
_BATCH_ITEMS, _LAST_ITEMS = 140, 400
#: Most heads of a small batch: see :func:`has_small_head_batches`. Second: fewest key blocks of the last batch after
#: small ones, up to head dim 128: with more, dQ of that batch leaves the L2 cache.
_SMALL_BATCH, _LAST_SMALL_ITEMS = 2, 264
#: Fewest batches prepared before the first key block: if key blocks visit equally many tiles, and if not. If not, a
#: batch still receives additions long after the next batch begins, and is converted late: two batches must be ready.
_LEAD, _UNEVEN_LEAD = 1, 2
#: Keys that a query must see, on average, so that its tiles hide the preparation and conversion of its dQ: above head
#: dim 64, and up to 64.
_BUSY_KEYS, _NARROW_BUSY_KEYS = 1200, 800


def has_head_batches(problem: Problem) -> bool:
    """Whether the backward on Hopper uses head batches: ``BY_HEAD_BATCHES`` of backward/common/workspace.cuh."""
    return not (problem.deterministic or problem.mask.irregular_kind or problem.lengths.ragged)


def has_listed_tickets(problem: Problem) -> bool:
    """Whether the addition order is fixed and does not follow from a band: ``LISTED_TICKETS`` of
    backward/common/workspace.cuh."""
    return bool(problem.deterministic and problem.mask.irregular_kind)


def listed_batches(problem: Problem, key_blocks: int) -> HeadBatches:
    """The head batches where tickets are listed; packed sequences have none. ``key_blocks``: of a head.

    A batch has :func:`deterministic_batch` heads. If less than a quarter of the rows see a key on average (several
    documents), the last batch has at least ``_LAST_ITEMS`` key blocks: toward the end of a batch few key blocks are
    left to run beside long ones. If more rows see a key, dQ of a large batch would leave the L2 cache.
    """
    heads, size = problem.batch * problem.kv_heads, deterministic_batch(problem)
    narrow = (
        4 * problem.all_visible_scores < problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    )
    last = min(heads, -(-_LAST_ITEMS // max(key_blocks, 1))) if narrow else 1
    return HeadBatches(size, (heads - last) // size, 0, 0)


def has_small_head_batches(problem: Problem, device: Device) -> bool:
    """Whether head batches have at most two heads, provided that each thread block takes one key block. Conditions:
    slow memory, later rows see more keys, head dims above 96, and no query groups.

    With small batches dQ stays in the L2 cache, and no block waits for the previous batch.
    """
    alone = problem.group_size == 1 and problem.later_rows_see_more
    return device.slow_memory and alone and problem.head_dim > 96 and has_head_batches(problem)


def head_batches(problem: Problem, key_blocks: int, small: bool = False) -> HeadBatches:
    """The head batches of a problem. ``key_blocks``: thread blocks that compute a head. ``small``:
    :func:`has_small_head_batches`; persistent blocks never pass True."""
    heads = problem.batch * problem.kv_heads
    head_bytes = problem.seqlen_q * problem.head_dim * 4
    last_items = _LAST_SMALL_ITEMS if small and problem.head_dim <= 128 else _LAST_ITEMS
    least, last = (min(heads, -(-x // max(key_blocks, 1))) for x in (_BATCH_ITEMS, last_items))
    size = max(1, least, min(heads, _BATCH_BYTES // max(head_bytes, 1)))
    if small:
        size = min(size, _SMALL_BATCH)
    whole = (heads - last) // size
    queries = max(problem.batch * problem.heads * problem.seqlen_q, 1)
    busy = _NARROW_BUSY_KEYS if problem.head_dim <= 64 else _BUSY_KEYS
    share = min(1.0, problem.all_visible_scores / queries / busy)
    aside = int(share * heads) // size
    lead = _UNEVEN_LEAD if problem.later_rows_see_more else _LEAD
    return HeadBatches(size, whole, max(min(lead, whole + 1), whole + 1 - aside), min(whole, aside))


def key_blocks_in_batches(
    problem: Problem, schedule: Schedule, small: bool = False, cluster: int = 1
) -> Order:
    """Key blocks of the backward on Hopper, in head batches (:func:`head_batches`). ``cluster``: thread blocks that
    compute one key block together."""
    heads, columns = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    batches = head_batches(problem, columns * cluster, small)
    first, members, rest = _of_head_batches(columns, heads, batches)
    if not problem.later_rows_see_more:
        return Order(rest % columns, first + rest // columns)
    return Order(rest // members, first + rest % members)


def _of_head_batches(columns: int, heads: int, batches: HeadBatches) -> tuple[Ints, Ints, Ints]:
    """Of each item: the first head of its batch, the heads of its batch, and its index in its batch."""
    size, whole = batches.size, batches.whole
    index = np.arange(columns * heads)
    first = np.minimum(index // (size * columns), whole) * size
    return first, np.where(first == whole * size, heads - first, size), index - first * columns
