"""What the tiles of Hopper's backward ask of a GPU, product by product, for what each reads of shared memory decides.

``wgmma`` reads an operand A of 64 rows and an operand B from shared memory for every 64 rows of results, unless A lies
in registers. A tile is ``block_q`` queries of one head and ``block_kv`` keys:

- narrow heads: each of two warpgroups has 64 of the keys. Pᵀ and dSᵀ are operands of dV and dK in registers, and so
  are, as far as there is room, columns of V and K of dP and S. dS goes to shared memory once, for dQ, which the
  warpgroups share out by rows or by columns;
- wide heads: a pair of thread blocks, with 64 of the keys each. One warpgroup computes S and dV, the other dP and dK;
  P goes from the one to the other through shared memory, and dS to the other block, too. Each of the four warpgroups
  computes a quarter of the columns of dQ, of all keys.

An item (a key block of a key/value head) of narrow heads computes one dQ more than it has tiles, since dQ is that of
the tile before; or a thread block does for all of its items, where it goes from the last tile of one to the first of
the next (and once more behind an item of a single tile, which is not counted here).
"""

from __future__ import annotations

import dataclasses

from ..kernels.backward.fa3_config import GROUP_KEYS, Fa3BackwardConfig
from ..kernels.base import ceil_div
from ..plan.planner import Plan
from ..problem.problem import Problem

_ATOM_COLUMNS, _ATOM_ROW_BYTES = 64, 128
_GROUP_ROWS = 64
"""Of a warpgroup's product."""
_FLOAT = 4
_WAVEFRONT = 128
"""Bytes that shared memory moves at once, also where lanes ask for the same ones."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One product, or one movement, of a call."""

    name: str
    multiply_adds: int
    shared_bytes: int
    by_threads: bool = False
    """Threads read or write it themselves, and neither tensor cores nor the copy engine do."""

    @property
    def bytes_per_product(self) -> float | None:
        """Of shared memory for each multiply-add; None of what multiplies nothing."""
        return self.shared_bytes / self.multiply_adds if self.multiply_adds else None


def tiles_of(plan: Plan) -> int:
    """Tiles that are visited, of all query heads."""
    return plan.schedule.visited * plan.problem.batch * plan.problem.heads


def parts(plan: Plan) -> tuple[Part, ...]:
    """The five products, then what is moved besides."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa3BackwardConfig)
    of_kernel = _wide if config.paired else _narrow
    tiles, items = tiles_of(plan), _items_with_tiles(plan)
    row = ceil_div(problem.head_dim, _ATOM_COLUMNS) * _ATOM_ROW_BYTES
    loaded = tiles * config.cluster * 2 * config.block_q * (row + _FLOAT)
    loaded += items * config.block_kv * (2 * row + config.other_columns * problem.itemsize)
    begun = plan.launches[1].grid[0] if config.k_stages > 1 else items
    return (*of_kernel(problem, config, tiles, items, begun), Part("loads of Q, dO, K, V", 0, loaded))


def passes(problem: Problem, config: Fa3BackwardConfig) -> tuple[int, int]:
    """Bytes of device memory that the launches before and after read and write. Before: dO, O and LSE are read, zeros
    for dQ in float32 and two numbers per row are written, in whole tiles. After: dQ is read in whole tiles, and written
    rounded.
    """
    heads, rows = problem.batch * problem.heads, problem.seqlen_q
    row, sums = problem.head_dim * problem.itemsize, problem.head_dim * _FLOAT
    whole = ceil_div(rows, config.block_q) * config.block_q
    return (
        heads * (rows * (2 * row + _FLOAT) + whole * sums),
        heads * (whole * (problem.head_dim + 2) * _FLOAT + rows * row),
    )


def _narrow(
    problem: Problem, config: Fa3BackwardConfig, tiles: int, items: int, begun: int
) -> tuple[Part, ...]:
    """``begun``: so many times dQ is computed without a tile before."""
    groups, queries, head_dim = config.block_kv // GROUP_KEYS, config.block_q, problem.head_dim
    item, depth = problem.itemsize, _depth(head_dim)
    columns = _dq_columns(config, head_dim)
    held_v, held_k = (
        GROUP_KEYS * 16 * steps * item if problem.softcap is None else 0
        for steps in config.held_steps(head_dim)
    )

    def score(held: int) -> tuple[int, int]:
        return GROUP_KEYS * queries * depth, (GROUP_KEYS + queries) * depth * item - held

    gradient = GROUP_KEYS * queries * head_dim, queries * head_dim * item
    dq_operands = sum(_GROUP_ROWS + x for x in columns) * config.block_kv * item
    dq = _GROUP_ROWS * sum(columns) * config.block_kv, dq_operands
    staged = tiles * _GROUP_ROWS * sum(columns) * _FLOAT if config.bulk_add else 0
    added = tiles * queries * head_dim * _FLOAT if config.bulk_add else 0
    return (
        _part("S", tiles * groups, score(held_k)),
        _part("dP", tiles * groups, score(held_v)),
        _part("dV", tiles * groups, gradient),
        _part("dK", tiles * groups, gradient),
        _part("dQ", tiles + begun, dq),
        Part("K and V, taken to registers", 0, items * groups * (held_k + held_v), by_threads=True),
        Part("dS, stored", 0, (tiles + begun) * queries * config.block_kv * item, by_threads=True),
        Part("LSE and D, read", 0, 2 * tiles * groups * _numbers(queries), by_threads=True),
        Part("dQ, staged", 0, staged, by_threads=True),
        Part("dQ, added", 0, added),
    )


def _wide(problem: Problem, config: Fa3BackwardConfig, tiles: int, *_: int) -> tuple[Part, ...]:
    queries, keys, head_dim, item = config.block_q, config.block_kv, problem.head_dim, problem.itemsize
    depth, blocks = _depth(head_dim), config.cluster
    scores = queries * keys * item
    # Two of the four runs of columns are whole atoms of K, with zeros behind the last column.
    columns = 4 * _ATOM_COLUMNS if head_dim > 3 * _ATOM_COLUMNS else 3 * _ATOM_COLUMNS
    score = keys * queries * depth, (keys + blocks * queries) * depth * item
    gradient = keys * queries * head_dim, blocks * queries * head_dim * item
    return (
        _part("S", tiles, score),
        _part("dP", tiles, score),
        _part("dV", tiles, gradient),
        _part("dK", tiles, gradient),
        _part("dQ", tiles, (queries * columns * keys, (4 * queries + columns) * keys * item)),
        Part("dS, stored", 0, tiles * scores, by_threads=True),
        Part("dS, sent to the other block", 0, 2 * tiles * scores),
        Part("P, stored and read", 0, 2 * tiles * scores, by_threads=True),
        Part("LSE and D, read", 0, 2 * tiles * blocks * _numbers(queries), by_threads=True),
    )


def _depth(head_dim: int) -> int:
    """Of a product that sums over the head dim."""
    return ceil_div(head_dim, 16) * 16


def _part(name: str, times: int, each: tuple[int, int]) -> Part:
    multiply_adds, shared_bytes = each
    return Part(name, times * multiply_adds, times * shared_bytes)


def _numbers(queries: int) -> int:
    """A number of each query, read by a warpgroup: every warp takes two of them a lane, for 8 queries at a time, and
    8 bytes a lane are two wavefronts."""
    return queries // 8 * 4 * 2 * _WAVEFRONT


def _dq_columns(config: Fa3BackwardConfig, head_dim: int) -> tuple[int, ...]:
    """Of each warpgroup's product: all, of 64 rows each; or a share, within an atom of K. The last one computes what is
    left, or as many as the others where blocks run on (``DQ_UNEVEN`` of backward_pipeline.cuh)."""
    groups = config.block_kv // GROUP_KEYS
    if config.block_q == _GROUP_ROWS * groups:
        return (head_dim,) * groups
    share = ceil_div(head_dim, 8 * groups) * 8 if head_dim <= _ATOM_COLUMNS else _ATOM_COLUMNS
    left = head_dim - (groups - 1) * share
    return (*(share,) * (groups - 1), share if config.runs_on or left <= 0 else left)


def _items_with_tiles(plan: Plan) -> int:
    return int((plan.schedule.visits > 0).sum()) * plan.problem.batch * plan.problem.kv_heads
