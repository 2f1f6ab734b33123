"""In what order thread blocks of the backward take key blocks of key/value heads, and which heads are worked on
together.

The device side is ``key_item`` of ``cuda_src/backward/common/schedule.cuh``, and ``HeadGroups`` of
``backward_workspace.cuh``; a test executes the kernels and compares.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..gpu.architectures import Device
from ..problem.problem import Problem
from .order import L2_SHARE, Order, even_groups, head_blocks, items_in_groups
from .schedule import Schedule


def key_blocks(problem: Problem, schedule: Schedule) -> Order:
    """A thread block per key block and key/value head (backward): ``key_item`` of backward_schedule.cuh."""
    heads, columns = problem.batch * problem.kv_heads, schedule.num_kv_blocks
    if problem.deterministic:  # from right to left: a block waits for those at its right
        in_turn = items_in_groups(columns, heads, 1, heads_in_turn(problem))
        return dataclasses.replace(in_turn, thread_block=None)
    block, head = head_blocks(problem, columns, heads, _bytes_of_queries(problem))
    # Where later rows see more, early key blocks are seen by more rows: the same order turned around.
    return Order(columns - 1 - block if problem.later_rows_see_more else block, head)


def heads_in_turn(problem: Problem) -> int:
    """Key/value heads that are worked on together where the order of additions is fixed: those whose queries are
    ``L2_SHARE`` bytes, or fewer so that groups are alike. Packed sequences lie in the same heads.

    With more of them fewer blocks of a head wait, and less of dQ stays in the L2 cache. Measured in turns (bf16,
    causal, batch × heads × length), microseconds with 48, 24, 12 and on the H100 6 MiB:

    - H200 (2026-11-26): d128, 4 × 16 × 4,096: 1,426, 1,387, 1,390, and 1,317 in any order; full 2,517, 2,487, 2,564
    - d128, 16 × 16 × 1,024: 582, 535 and 530; d64, 4 × 32 × 4,096: 1,578, 1,537 and 1,558
    - d192, 2 × 32 × 4,096: 2,441, 2,325 and 2,351; d256, 4 × 8 × 4,096: 1,600, 1,537 and 1,555
    - H100 (2026-11-25): d128, 4 × 16 × 4,096: 1,646, 1,433, 1,470 and 1,449; full 2,523, 2,497, 2,532 and 2,762
    - d128, 16 × 16 × 1,024: 801, 642, 619 and 600; d256, 4 × 8 × 4,096: 1,802, 1,604, 1,592 and 1,590
    """
    heads = problem.kv_heads * (1 if problem.lengths.kind == "packed" else problem.batch)
    return even_groups(max(heads, 1), _bytes_of_queries(problem), L2_SHARE)


def _bytes_of_queries(problem: Problem) -> int:
    """Of a head, one query head of a group at a time: Q, dO, and dQ in float32."""
    row_bytes = problem.q_element.itemsize + problem.out_element.itemsize + 4
    return problem.seqlen_q * problem.head_dim * row_bytes


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """Key/value heads that the backward on Hopper works on together: ``HeadGroups`` of backward_workspace.cuh."""

    size: int
    """Heads of each group but the last."""
    whole: int
    """Groups before the last, which has all heads that are left: with few items of many tiles left, most SMs would
    have nothing to do."""
    before: int
    """So many groups are prepared by the pass before; the others while key blocks are computed."""
    converted: int
    """So many are converted while key blocks are computed; the others by the pass behind."""

    def scalars(self) -> dict[str, int]:
        """As the kernels are given them."""
        return {
            "heads_per_group": self.size,
            "whole_groups": self.whole,
            "groups_before": self.before,
            "groups_converted": self.converted,
        }


#: Of dQ in float32, in the heads that are worked on at a time. Query heads of one group follow one another: one counts.
_GROUP_BYTES = 12 << 20
#: Key blocks of a group that is not small, at least: a few more than an H200 or H100 has SMs, none of which waits for
#: the next group then. And of the last group.
_GROUP_ITEMS, _LAST_ITEMS = 140, 400
#: Heads of a small group: see :func:`in_small_groups`.
_SMALL_GROUP = 2
#: Groups, at least, that are prepared when the first key block begins. Where key blocks differ in length, a group is
#: still added to long after the next one has begun, and is converted before the one after that would be prepared.
_LEAD, _UNEVEN_LEAD = 1, 2
#: Keys that a query must see, on average, for its dQ to be prepared and converted in the time that its tiles take; with
#: head dims up to 64.
_BUSY_KEYS, _NARROW_BUSY_KEYS = 1200, 800


def in_groups(problem: Problem) -> bool:
    """Whether the backward on Hopper works on heads in groups: ``GROUPED`` of backward_workspace.cuh."""
    return not (problem.deterministic or problem.mask.beyond_band or problem.lengths.ragged)


def in_small_groups(problem: Problem, device: Device) -> bool:
    """Whether groups are of two heads at most, where a thread block takes one key block: where memory is slow, the
    longest key blocks of all heads of a group come first, heads are wide, and they share no keys.

    No block waits there for the group before. With groups of many heads dQ does not stay in the L2 cache: with d128
    at 1,024 rows memory is then at two thirds of its peak. Measured on an H100 (2026-11-25, bf16, causal, in turns,
    batch × heads × length), microseconds with the usual groups and with groups of two:

    - d128, 16 × 16 × 1,024: 611 and 571; 8 × 16 × 2,048: 831 and 808; 4 × 16 × 4,096: 1,396 and 1,383. Groups of one
      and of three take at most 1 % more or less than of two. Blocks that run on take 637 and 870 at 1,024 and 2,048,
      and gain nothing from small groups: 649 and more at 1,024.
    - d192, 16 × 10 × 1,024: 700 and 661; 4 × 10 × 4,096: 1,660 and 1,652
    - d256, 16 × 8 × 1,024: 753 and 716; 4 × 8 × 4,096: 1,746 and 1,750; 1 × 8 × 16,384: 6,016 and 6,024
    - d96, 16 × 21 × 1,024: 660 and 621, where blocks that run on take 598 to 614. d64: 644 with groups of three, and
      608 to 615 running on.
    - d128, 2 × 32/8 × 4,096, heads that share keys: 1,506 and 1,834
    """
    alone = problem.group_size == 1 and problem.later_rows_see_more
    return device.slow_memory and alone and problem.head_dim > 96 and in_groups(problem)


def head_groups(problem: Problem, key_blocks: int, small: bool = False) -> HeadGroups:
    """``key_blocks``: thread blocks of a head. ``small``: :func:`in_small_groups`, never where blocks run on."""
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
    """Key blocks of the backward on Hopper, in groups of heads (:func:`head_groups`): a thread block each, or blocks
    that take one after another, or ``cluster`` blocks for each."""
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
