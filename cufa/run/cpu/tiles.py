"""What the CPU paths of forward and backward share: stacks of heads cut into the schedule's tiles, and threads.

A tile is a stack of one or more heads, (..., rows, columns): the algebra is written for the last two axes,
and heads too short to fill a tile share one. Stacks run side by side on threads, as NumPy lets go of the
interpreter inside products and ufuncs; every result comes of the same operations in the same order
however many threads there are.

float16, bfloat16 and float32 are computed in float32, float64 in float64.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...kernels import TileConfig
from ...problem.problem import Problem
from ...problem.scores import distances
from ...problem.tile_classes import TileClass
from ...schedule.schedule import Schedule

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

MIN_STACKS = 8
"""Heads share a tile only while this many stacks remain to run in parallel."""
_SERIAL_FLOPS = 1 << 22
"""Work too small to be worth starting threads for."""


@dataclasses.dataclass(frozen=True)
class TileStep:
    """What one tile did to the rows of one head, for those who watch: copies, in the compute dtype."""

    batch: int
    head: int
    """Decode: of keys and values; a row is one of its query heads and tokens."""
    q_block: int
    kv_block: int
    S: Array
    """Scores, (rows, columns): scaled, capped, and -inf where the mask hides them."""
    P: Array
    """exp(S - m_after), the same shape."""
    m_before: Array
    """Running maximum, (rows,)."""
    l_before: Array
    """Running sum, (rows,)."""
    m_after: Array
    l_after: Array
    alpha: Array
    """exp(m_before - m_after), (rows,): what brings earlier sums to the new maximum."""
    O: Array
    """The output after this tile, (rows, head_dim): FA1's is divided by ``l_after``, that of others is not yet."""


Observer = Callable[[TileStep], None]


class Heads:
    """A stack of heads (batch, kv_heads, group), its tiles and the mask over them."""

    def __init__(self, schedule: Schedule, problem: Problem, heads: tuple[int, ...]) -> None:
        self.dtype: type[Any] = compute_dtype(problem)
        self.scale, self.softcap = self.dtype(problem.scale), problem.softcap
        self.schedule, self.heads, self.head_dim = schedule, heads, problem.head_dim
        self.slopes: Array | None = None
        """Of ALiBi, (batch, kv_heads, group, 1, 1); the sink likewise."""
        self.sink: Array | None = None
        self._classes = schedule.classes
        self.block_q = min(schedule.block_q, schedule.seqlen_q)
        self.block_kv = min(schedule.block_kv, schedule.seqlen_k)

    def empty(self, rows: int, columns: int) -> Array:
        return np.empty((*self.heads, rows, columns), self.dtype)

    def rows(self, i: int) -> slice:
        """Query block i."""
        return slice(i * self.schedule.block_q, min((i + 1) * self.schedule.block_q, self.schedule.seqlen_q))

    def columns(self, j: int) -> slice:
        """Key/value block j."""
        tiling = self.schedule
        return slice(j * tiling.block_kv, min((j + 1) * tiling.block_kv, tiling.seqlen_k))

    def visits(self, block: int) -> list[int]:
        """Tiles that a block visits: of keys, or where keys visit queries, of queries."""
        visited: list[int] = np.flatnonzero(self._classes[block]).tolist()
        return visited

    def is_masked(self, block: int, tile: int) -> bool:
        return bool(self._classes[block, tile] != TileClass.CLEAR)

    def hidden(self, i: int, j: int) -> Bools:
        """Where the mask lets nothing through, (rows, columns)."""
        rows, columns = self.rows(i), self.columns(j)
        row, column = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        return ~self.schedule.mask.visible(row, column, self.schedule.seqlen_q, self.schedule.seqlen_k)

    def distances(self, i: int, j: int) -> Array:
        """Of ALiBi, (rows, columns)."""
        rows, columns, s = self.rows(i), self.columns(j), self.schedule
        row, column = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        found: Array = distances(row, column, s.mask.shift(s.seqlen_q, s.seqlen_k), self.dtype)
        return found


def compute_dtype(problem: Problem) -> type[Any]:
    return np.float64 if problem.dtype == "float64" else np.float32


def hide(S: Array, hidden: Bools, value: float = -np.inf) -> None:
    """``value`` where ``hidden``, (rows, columns); columns that every row sees are not touched."""
    columns = np.flatnonzero(hidden.any(axis=0))
    if len(columns):
        part = slice(columns[0], columns[-1] + 1)
        np.copyto(S[..., part], value, where=hidden[:, part])


def row_sums(P: Array) -> Array:
    """(..., rows, 1). A product with ones takes a third of np.sum's time."""
    return (P @ np.ones(P.shape[-1], P.dtype))[..., None]


def product_of_seen(P: Array, V: Array, hidden: Bools | None, out: Array) -> Array:
    """P V over what each row of P sees, which is all unless ``hidden``, (rows, columns), says otherwise: a value
    that is not seen plays no part even if it is inf or NaN; but 0 · inf is NaN. (Where V is finite, hidden=None
    does the same in less time.)"""
    if hidden is None:
        return np.matmul(P, V, out=out)
    for row, unseen in enumerate(hidden):
        out[..., row, :] = (P[..., row : row + 1, ~unseen] @ V[..., ~unseen, :])[..., 0, :]
    return out


def operand(x: Array, dtype: type[Any]) -> Array:
    """x in the compute dtype with rows that BLAS can step over; itself when it is so already."""
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


# --- Sharing out the work --------------------------------------------------------------------------------

Cuts = tuple[list[slice], list[slice], list[slice]]


def cut(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def cuts(problem: Problem, schedule: Schedule, config: TileConfig, one_head: bool) -> Cuts:
    """Slices of batch, kv_heads and group: heads that share a tile of ``config``'s size."""
    tile = min(schedule.block_q, problem.seqlen_q) * min(schedule.block_kv, problem.seqlen_k)
    room = min(config.block_q * config.block_kv // tile, problem.batch * problem.heads // MIN_STACKS)
    heads = 1 if one_head else max(1, room)
    of_group = min(heads, problem.group_size)
    of_kv = min(heads // of_group, problem.kv_heads)
    of_batch = min(heads // (of_group * of_kv), problem.batch)
    return cut(problem.batch, of_batch), cut(problem.kv_heads, of_kv), cut(problem.group_size, of_group)


Task = TypeVar("Task")
Result = TypeVar("Result")


def num_workers(problem: Problem, num_threads: int | None, available: int) -> int:
    return num_threads or (available if problem.flops > _SERIAL_FLOPS else 1)


def in_threads(work: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Results in the order of the tasks. Raises what a thread raised."""

    def quietly(task: Task) -> Result:
        with np.errstate(all="ignore"):  # inf and NaN in the inputs follow IEEE (the setting is the thread's)
            return work(task)

    if min(workers, len(tasks)) == 1:
        yield from map(quietly, tasks)
        return
    with concurrent.futures.ThreadPoolExecutor(min(workers, len(tasks))) as pool:
        yield from pool.map(quietly, tasks)


def extra_memory(call: Callable[[], None]) -> int:
    """Run once and return the most memory, in bytes, that was held at one time beyond what was there before, all
    threads together. NumPy reports its buffers to tracemalloc; BLAS keeps some of its own, of a fixed size.
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
