"""The order in which thread blocks of the backward take key blocks of key/value heads, and the head batches.

Device side: ``key_item`` of ``cuda_src/backward/common/schedule.cuh``, and ``HeadBatches`` of
``workspace.cuh`` beside it; a test executes the kernels and compares. Measurements: cuda_src/backward/common/NOTES.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..gpu.architectures import Device
from ..problem.problem import Problem
from .order import L2_SHARE, Order, even_groups, head_blocks, items_in_groups
from .schedule import Schedule


def key_blocks(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per key block and key/value head (backward): ``key_item`` of backward/common/schedule.cuh."""
    heads, columns = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    if problem.deterministic:  # from right to left: a block waits for the blocks at its right
        in_turn = items_in_groups(columns, heads, 1, heads_in_turn(problem))
        return dataclasses.replace(in_turn, thread_block=None)
    block, head = head_blocks(problem, columns, heads, _bytes_of_queries(problem))
    # If later rows see more keys, more rows see early key blocks: the same order reversed.
    return Order(columns - 1 - block if problem.later_rows_see_more else block, head)


def heads_in_turn(problem: Problem) -> int:
    """Key/value heads of a head batch with a fixed addition order: their queries take ``L2_SHARE`` bytes, or less if
    batches are then equal. Packed sequences are in the same heads.

    With larger batches fewer blocks of a head wait, and less of dQ stays in the L2 cache.
    """
    heads = problem.kv_heads * (1 if problem.lengths.kind == "packed" else problem.batch)
    return even_groups(max(heads, 1), _bytes_of_queries(problem), L2_SHARE)


def _bytes_of_queries(problem: Problem) -> int:
    """Bytes of Q, dO, and dQ in float32, of one query head."""
    row_bytes = problem.q_element.itemsize + problem.out_element.itemsize + 4
    return problem.seqlen_q * problem.head_dim * row_bytes


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """Head batches of the backward on Hopper: ``HeadBatches`` of backward/common/workspace.cuh."""

    size: int
    """Key/value heads of each batch but the last."""
    whole: int
    """Batches before the last. The last batch has all remaining heads: a few work items of many tiles would leave most
    SMs idle."""
    before: int
    """Batches prepared by the preceding pass; the others are prepared while key blocks are computed."""
    converted: int
    """Batches converted while key blocks are computed; the others are converted by the following pass."""

    def scalars(self) -> dict[str, int]:
        """Fields of the kernels' parameters."""
        return {
            "heads_per_head_batch": self.size,
            "whole_head_batches": self.whole,
            "head_batches_before": self.before,
            "head_batches_converted": self.converted,
        }


#: Bytes of dQ in float32 of a head batch. Query heads of one query group are computed in sequence: one counts.
_GROUP_BYTES = 12 << 20
#: Least key blocks of a batch that is not small: slightly more than the SMs of an H200 or H100, so that no SM waits for
#: the next batch. And of the last batch.
_GROUP_ITEMS, _LAST_ITEMS = 140, 400
#: Heads of a small batch: see :func:`in_small_groups`.
_SMALL_GROUP = 2
#: Least batches prepared before the first key block. If key blocks differ in length, additions to a batch go on long
#: after the next batch has begun: it is converted too late for the preparation of the batch after that.
_LEAD, _UNEVEN_LEAD = 1, 2
#: Keys that a query must see, on average, so that its tiles hide the preparation and conversion of its dQ. Second: for
#: head dims up to 64.
_BUSY_KEYS, _NARROW_BUSY_KEYS = 1200, 800


def in_groups(problem: Problem) -> bool:
    """Whether the backward on Hopper has head batches: ``BY_HEAD_BATCHES`` of backward/common/workspace.cuh."""
    return not (problem.deterministic or problem.mask.irregular_kind or problem.lengths.ragged)


def in_small_groups(problem: Problem, device: Device) -> bool:
    """Whether head batches have at most two heads, if each thread block takes one key block. The conditions: slow
    memory, the longest key blocks of a batch come first, head dims above 96, and no query groups.

    With small batches dQ stays in the L2 cache, and no block waits for the previous batch.
    """
    alone = problem.group_size == 1 and problem.later_rows_see_more
    return device.slow_memory and alone and problem.head_dim > 96 and in_groups(problem)


def head_groups(problem: Problem, key_blocks: int, small: bool = False) -> HeadGroups:
    """``key_blocks``: thread blocks of a head. ``small``: :func:`in_small_groups`, never for persistent blocks."""
    heads = problem.batch * problem.kv_heads
    of_head = problem.seqlen_q * problem.head_dim * 4
    least, last = (min(heads, -(-x // max(key_blocks, 1))) for x in (_GROUP_ITEMS, _LAST_ITEMS))
    size = max(1, least, min(heads, _GROUP_BYTES // max(of_head, 1)))
    if small:
        size = min(size, _SMALL_GROUP)
    whole = (heads - last) // size
    queries = max(problem.batch * problem.heads * problem.seqlen_q, 1)
    busy = _NARROW_BUSY_KEYS if problem.head_dim <= 64 else _BUSY_KEYS
    share = min(1.0, problem.all_visible_scores / queries / busy)
    aside = int(share * heads) // size
    lead = _UNEVEN_LEAD if problem.later_rows_see_more else _LEAD
    return HeadGroups(size, whole, max(min(lead, whole + 1), whole + 1 - aside), min(whole, aside))


def key_blocks_in_groups(
    problem: Problem, schedule: Schedule, small: bool = False, cluster: int = 1
) -> Order:
    """Key blocks of the backward on Hopper, in head batches (:func:`head_groups`): one thread block for each,
    persistent blocks, or ``cluster`` blocks for each."""
    heads, columns = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    groups = head_groups(problem, columns * cluster, small)
    size, whole = groups.size, groups.whole
    index = np.arange(columns * heads)
    first = np.minimum(index // (size * columns), whole) * size
    rest = index - first * columns
    if not problem.later_rows_see_more:
        return Order(rest % columns, first + rest // columns)
    members = np.where(first == whole * size, heads - first, size)
    return Order(rest // members, first + rest % members)
