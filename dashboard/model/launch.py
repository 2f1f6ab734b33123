"""Which thread block does what, in launch order, and a prediction of when: list scheduling.

The order is that of ``work_item`` in ``cuda_src/tiles/schedule.cuh``, and of :mod:`cufa.core.order` for
persistent blocks; a test executes the kernels and compares. The prediction is deliberately simple:
every SM holds ``blocks_per_sm`` blocks at a time, the next block goes to the place that is free first, and a
block takes as long as the tiles it visits. It knows nothing of clocks, memory or the work around the loop;
what it gets right is the shape: waves, and SMs that wait at the end.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

from cufa.core import order as item_order
from cufa.core.problem import Problem
from cufa.core.schedule import Schedule
from cufa.kernels import KERNELS, KernelSpec

Ints = npt.NDArray[np.int64]

_L2_SHARE = 24 << 20
"""Bytes of keys and values that causal launches keep together: ``L2_SHARE`` of schedule.cuh."""
_TENSOR_ROWS = 2  # a key row and a value row

_KNOWN = ("fa1", "fa2_noskip", "fa2", "fa3")
"""Algorithms whose launch order is written down here."""

WHOLE_HEAD = -1
"""As ``q_block``: the thread block does every query block of its head."""

KEYS = -2
"""As ``q_block``: the thread block does part of the keys of a sequence, for all its queries (decoding)."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Thread blocks in launch order; every array has one entry a block."""

    q_block: Ints
    """:data:`WHOLE_HEAD` where a block does a whole head, :data:`KEYS` where it does part of the keys."""
    head: Ints
    batch: Ints
    tiles: Ints
    """Key/value tiles visited."""
    thread_block: Ints | None = None
    """Which persistent thread block takes the item; None: every item is a thread block of its own."""

    def __len__(self) -> int:
        return len(self.tiles)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each thread block ran, and where. Times count from the first start."""

    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    sm: Ints
    slot: Ints
    """Place on its SM: blocks that run at the same time have different ones."""
    blocks: Blocks
    num_sms: int
    slots_per_sm: int
    unit: str
    """"tiles" when predicted, "µs" when measured."""

    @property
    def span(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def sm_end(self) -> npt.NDArray[np.float64]:
        """When each SM finished its last block, (num_sms,); 0 for one that never had any."""
        last = np.zeros(self.num_sms)
        np.maximum.at(last, self.sm, self.end)
        return last

    @property
    def tail(self) -> float:
        """Share of SM time idle at the end: after an SM's last block, before the kernel's end. 0 to 1."""
        return 1 - float(self.sm_end.sum()) / (self.num_sms * self.span) if self.span else 0.0

    @property
    def busy_sms(self) -> int:
        """SMs that had work at all."""
        return len(np.unique(self.sm))

    @property
    def mean_blocks(self) -> float:
        """Thread blocks resident on an SM, averaged over all SMs and the whole run. A persistent block is one
        from its first item to its last, though an item may begin before the one before it has ended."""
        if not self.span:
            return 0.0
        start, end, block = self.start, self.end, self.blocks.thread_block
        if block is not None:
            count = int(block.max(initial=0)) + 1
            start, end = np.full(count, np.inf), np.zeros(count)
            np.minimum.at(start, block, self.start)
            np.maximum.at(end, block, self.end)
            start = np.minimum(start, end)  # a number that no block has
        return float((end - start).sum()) / (self.num_sms * self.span)


def algorithms() -> dict[str, KernelSpec]:
    """The papers' 16-bit kernels by algorithm: those whose launch order :func:`thread_blocks` knows."""
    found: dict[str, KernelSpec] = {}
    for spec in KERNELS.values():
        if spec.algorithm in _KNOWN and "bfloat16" in spec.dtypes:
            found.setdefault(spec.algorithm, spec)
    return {name: found[name] for name in _KNOWN if name in found}


def thread_blocks(problem: Problem, schedule: Schedule, algorithm: str, num_sms: int) -> Blocks:
    """The launch of one kernel: a block a head for FA1, a block a query block and head for FA2; for FA3 as
    many items, on a persistent block an SM."""
    heads = problem.batch * problem.heads
    if algorithm == "fa1":
        head = np.arange(heads)
        whole = np.full(heads, WHOLE_HEAD)
        return Blocks(whole, head % problem.heads, head // problem.heads, np.full(heads, schedule.visited))
    persistent = algorithm == "fa3"
    index = np.arange(schedule.num_q_blocks * heads)
    if not problem.causal:
        head, q_block = np.divmod(index, schedule.num_q_blocks)
    elif persistent:
        head, q_block = _persistent_order(index, problem, schedule, min(len(index), num_sms))
    else:
        head, q_block = _causal_order(index, problem, schedule.num_q_blocks)
    taker = item_order.taker(index, min(len(index), num_sms)) if persistent else None
    return Blocks(q_block, head % problem.heads, head // problem.heads, schedule.visits[q_block], taker)


def _heads_in_cache(problem: Problem) -> int:
    """Heads whose keys and values share the L2 cache."""
    return _L2_SHARE // (problem.seqlen_k * problem.head_dim * problem.itemsize * _TENSOR_ROWS)


def _causal_order(index: Ints, problem: Problem, rows: int) -> tuple[Ints, Ints]:
    """(head, query block): long blocks in groups of heads, then the shortest 3/8 of all heads."""
    heads = problem.batch * problem.heads
    short = rows * 3 // 8
    long = rows - short
    num_groups = -(-heads // max(1, min(heads, _heads_in_cache(problem))))
    group_heads = -(-heads // num_groups)
    group, rest = np.divmod(index, group_heads * long)
    members = np.clip(heads - group * group_heads, 1, group_heads)
    filling = index - long * heads
    is_long = filling < 0
    head = np.where(is_long, group * group_heads + rest % members, filling % heads)
    return head, np.where(is_long, rows - 1 - rest // members, short - 1 - filling // heads)


def _persistent_order(index: Ints, problem: Problem, schedule: Schedule, blocks: int) -> tuple[Ints, Ints]:
    """(head, query block) of each item, as the planner orders them."""
    heads = problem.batch * problem.heads
    head_bytes = _TENSOR_ROWS * problem.seqlen_k * problem.head_dim * problem.itemsize
    group = item_order.heads_per_group(schedule, heads, blocks, head_bytes)
    return item_order.causal_items(index, schedule.num_q_blocks, heads, group)


def predict(blocks: Blocks, num_sms: int, blocks_per_sm: int, overhead: int = 0) -> Timeline:
    """List scheduling in launch order; the unit of time is a tile, a block takes ``overhead`` more."""
    lengths = blocks.tiles + overhead
    if blocks.thread_block is not None:
        return _in_fixed_order(blocks, lengths, num_sms)
    places = num_sms * blocks_per_sm
    free = [(0.0, place) for place in range(places)]  # a heap: all free at 0, SM after SM
    start, where = np.empty(len(blocks)), np.empty(len(blocks), np.int64)
    for i, length in enumerate(lengths.tolist()):
        at, place = free[0]
        start[i], where[i] = at, place
        heapq.heapreplace(free, (at + length, place))
    slot, sm = np.divmod(where, num_sms)
    return Timeline(start, start + lengths, sm, slot, blocks, num_sms, blocks_per_sm, "tiles")


def _in_fixed_order(blocks: Blocks, lengths: Ints, num_sms: int) -> Timeline:
    """Persistent thread blocks, all resident: each takes its own items one after another."""
    assert blocks.thread_block is not None
    order = np.argsort(blocks.thread_block, kind="stable")
    ends = np.cumsum(lengths[order])
    first = np.searchsorted(blocks.thread_block[order], np.arange(blocks.thread_block.max(initial=0) + 1))
    before = ends[first] - lengths[order][first]
    end = np.empty(len(blocks))
    end[order] = ends - before[blocks.thread_block[order]]
    slot, sm = np.divmod(blocks.thread_block, num_sms)
    slots = int(slot.max(initial=0)) + 1
    return Timeline(end - lengths, end, sm, slot, blocks, num_sms, slots, "tiles")
