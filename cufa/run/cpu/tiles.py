"""Shared by the CPU paths of forward and backward: stacks of heads, the schedule's tiles, and threads.

A tile is a stack of one or more heads, (..., rows, columns): the algebra is written for the last two axes, and heads
too short to fill a tile share one. Stacks run in parallel threads, because NumPy releases the GIL in products and
ufuncs. Every result comes from the same operations in the same order, whatever the number of threads.

float16, bfloat16 and float32 are computed in float32, float64 in float64.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import tracemalloc
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...kernels import TileConfig
from ...problem.problem import Problem
from ...problem.scores import distances
from ...problem.tile_classes import TileClass
from ...schedule.schedule import Schedule
from .scores import DroppedWeights, ScoreFunction, positions

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

MIN_STACKS = 8
"""Heads share a tile only while this many stacks remain to run in parallel."""
_SERIAL_FLOPS = 1 << 22
"""A problem of fewer operations starts no threads."""


@dataclasses.dataclass(frozen=True)
class TileStep:
    """One tile's effect on the rows of one head, for an observer: copies, in the compute dtype."""

    batch: int
    head: int
    """Decode: the key/value head; a row is a pair of a query head and a token."""
    q_block: int
    kv_block: int
    S: Array
    """Scores, (rows, columns): scaled, capped, and -inf if hidden by the mask."""
    P: Array
    """exp(S - m_after), the same shape."""
    m_before: Array
    """Running maximum, (rows,)."""
    l_before: Array
    """Running sum, (rows,)."""
    m_after: Array
    l_after: Array
    alpha: Array
    """exp(m_before - m_after), (rows,): rescales earlier sums to the new maximum."""
    O: Array
    """The output after this tile, (rows, head_dim): FA1's is divided by ``l_after``, other kernels' not yet."""


Observer = Callable[[TileStep], None]


class Heads:
    """A stack of heads (batch, kv_heads, group), its tiles and the mask over them."""

    def __init__(self, schedule: Schedule, problem: Problem, heads: tuple[int, ...]) -> None:
        self.dtype: type[Any] = compute_dtype(problem)
        self.scale, self.softcap = self.dtype(problem.scale), problem.softcap
        self.schedule, self.heads, self.head_dim = schedule, heads, problem.head_dim
        self.slopes: Array | None = None
        """ALiBi slopes, (batch, kv_heads, group, 1, 1); the sink has the same shape."""
        self.sink: Array | None = None
        self.score: ScoreFunction | None = None
        self.dropped: DroppedWeights | None = None
        self._classes = schedule.classes
        self.block_q = min(schedule.block_q, schedule.seqlen_q)
        self.block_kv = min(schedule.block_kv, schedule.seqlen_k)

    def empty(self, rows: int, columns: int) -> Array:
        return np.empty((*self.heads, rows, columns), self.dtype)

    def rows(self, i: int) -> slice:
        """Query block i."""
        s = self.schedule
        return slice(i * s.block_q, min((i + 1) * s.block_q, s.seqlen_q))

    def columns(self, j: int) -> slice:
        """Key/value block j."""
        s = self.schedule
        return slice(j * s.block_kv, min((j + 1) * s.block_kv, s.seqlen_k))

    def visits(self, block: int) -> list[int]:
        """Tiles that a block visits: key tiles, or in the backward query tiles."""
        visited: list[int] = np.flatnonzero(self._classes[block]).tolist()
        return visited

    def is_masked(self, block: int, tile: int) -> bool:
        return bool(self._classes[block, tile] != TileClass.CLEAR)

    def hidden(self, i: int, j: int) -> Bools:
        """Whether the mask hides each score, (rows, columns)."""
        row, column, s = positions(self.rows(i)), positions(self.columns(j)), self.schedule
        return ~s.mask.visible(row, column, s.seqlen_q, s.seqlen_k)

    def distances(self, i: int, j: int) -> Array:
        """ALiBi's distances, (rows, columns)."""
        row, column, s = positions(self.rows(i)), positions(self.columns(j)), self.schedule
        found: Array = distances(row, column, s.mask.shift(s.seqlen_q, s.seqlen_k), self.dtype)
        return found


def compute_dtype(problem: Problem) -> type[Any]:
    return np.float64 if problem.dtype == "float64" else np.float32


def hide(S: Array, hidden: Bools, value: float = -np.inf) -> None:
    """Sets hidden scores to ``value``; ``hidden`` is (rows, columns). Columns that every row sees are not touched."""
    columns = np.flatnonzero(hidden.any(axis=0))
    if len(columns):
        part = slice(columns[0], columns[-1] + 1)
        np.copyto(S[..., part], value, where=hidden[:, part])


def row_sums(P: Array) -> Array:
    """(..., rows, 1). A product with ones takes a third of np.sum's time."""
    return (P @ np.ones(P.shape[-1], P.dtype))[..., None]


def product_of_seen(P: Array, V: Array, hidden: Bools | None, out: Array) -> Array:
    """P V over the columns that each row of P sees: all columns, or the columns that are not ``hidden``, (rows,
    columns). A hidden value does not contribute even if it is inf or NaN, although 0 · inf is NaN. (If V is finite,
    hidden=None gives the same in less time.)"""
    if hidden is None:
        return np.matmul(P, V, out=out)
    for row, unseen in enumerate(hidden):
        out[..., row, :] = (P[..., row : row + 1, ~unseen] @ V[..., ~unseen, :])[..., 0, :]
    return out


def operand(x: Array, dtype: type[Any]) -> Array:
    """x in the compute dtype with row strides that BLAS takes; x itself if it has both."""
    row_stride, stride = x.strides[-2:]
    if x.dtype == dtype and x.flags.aligned and stride == x.itemsize and row_stride >= x.shape[-1] * stride:
        return x
    return np.ascontiguousarray(x, dtype)


def group_heads(x: Array, group: int) -> Array:
    """View of (batch, heads, …) as (batch, kv_heads, group, …)."""
    return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:])


def numbers_of_heads(problem: Problem, x: Array | None) -> Array | None:
    """(heads,) or (batch, heads) as (batch, kv_heads, group), in the compute dtype."""
    if x is None:
        return None
    spread = np.broadcast_to(x.astype(compute_dtype(problem)), (problem.batch, problem.heads))
    return group_heads(spread, problem.group_size)


# --- Threads ---------------------------------------------------------------------------------------------

Cuts = tuple[list[slice], list[slice], list[slice]]


def cut(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def cuts(problem: Problem, schedule: Schedule, config: TileConfig, one_head: bool) -> Cuts:
    """Slices of batch, kv_heads and query group: the heads that share a tile of ``config``'s size."""
    tile = min(schedule.block_q, problem.seqlen_q) * min(schedule.block_kv, problem.seqlen_k)
    room = min(config.block_q * config.block_kv // tile, problem.batch * problem.heads // MIN_STACKS)
    heads = 1 if one_head else max(1, room)
    group_step = min(heads, problem.group_size)
    kv_step = min(heads // group_step, problem.kv_heads)
    batch_step = min(heads // (group_step * kv_step), problem.batch)
    return cut(problem.batch, batch_step), cut(problem.kv_heads, kv_step), cut(problem.group_size, group_step)


Task = TypeVar("Task")
Result = TypeVar("Result")


def num_workers(problem: Problem, num_threads: int | None, available: int) -> int:
    return num_threads or (available if problem.flops > _SERIAL_FLOPS else 1)


def in_threads(
    work: Callable[[Task], Result], tasks: Sequence[Task], workers: int
) -> Generator[Result, None, None]:
    """Results in the order of the tasks. Raises a thread's exception."""

    def quietly(task: Task) -> Result:
        # inf and NaN in the inputs follow IEEE; the setting belongs to the thread.
        with np.errstate(all="ignore"):
            return work(task)

    if min(workers, len(tasks)) <= 1:  # a decode with a sink and no key has no task
        yield from map(quietly, tasks)
        return
    with concurrent.futures.ThreadPoolExecutor(min(workers, len(tasks))) as pool:
        yield from pool.map(quietly, tasks)


def extra_memory(call: Callable[[], None]) -> int:
    """Run once and return the peak of additional memory, in bytes, of all threads together. NumPy reports its buffers
    to tracemalloc; BLAS has buffers of its own, of a fixed size, which do not count.
    """
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
