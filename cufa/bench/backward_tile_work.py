"""What the tiles of Hopper's backward ask of a GPU, product by product: what each reads of shared memory is what decides.

``wgmma`` reads an operand A of 64 rows and an operand B from shared memory for every 64 rows of results, unless A lies
in registers. A tile is ``block_q`` queries of one head and ``block_kv`` keys:

- narrow heads: each of two warpgroups has 64 of the keys. Pᵀ and dSᵀ are operands of dV and dK in registers; dS goes to
  shared memory once, for dQ, which the warpgroups share out by rows or by columns;
- wide heads: one warpgroup computes S and dV, the other dP and dK, each a half of the columns of dQ, in two runs. P goes
  from the one to the other through shared memory.

An item (a key block of a key/value head) of narrow heads computes one S and one dQ more than it has tiles, since dQ is
that of the tile before.
"""

from __future__ import annotations

import dataclasses

from ..core.problem import Problem
from ..kernels.backward import STRIP
from ..kernels.fa3_backward import GROUP_KEYS, Fa3BackwardConfig
from ..planner import Plan
from .tile_work import ATOM_COLUMNS, GROUP_ROWS, Work, depth_of, row_bytes

_FLOAT = 4
_WAVEFRONT = 128
"""Bytes that shared memory moves at once, also where lanes ask for the same ones."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One product, or one movement, of a call."""

    name: str
    multiply_adds: int
    shared_bytes: int

    @property
    def bytes_per_product(self) -> float | None:
        """Of shared memory for each multiply-add; None of what multiplies nothing."""
        return self.shared_bytes / self.multiply_adds if self.multiply_adds else None


def backward_work(plan: Plan) -> Work:
    problem, config = plan.problem, _config(plan)
    found = parts(plan)
    tiles = _tiles(plan)
    return Work(
        flops=2 * sum(part.multiply_adds for part in found),
        exponentials=tiles * config.block_q * config.block_kv,
        shared_bytes=sum(part.shared_bytes for part in found),
        memory_bytes=problem.io_bytes,
        added_bytes=tiles * config.block_q * problem.head_dim * _FLOAT,
        pass_bytes=_pass_bytes(problem, config),
    )


def parts(plan: Plan) -> tuple[Part, ...]:
    """The five products, then what is moved besides."""
    problem, config = plan.problem, _config(plan)
    of_kernel = _narrow if config.block_kv > GROUP_KEYS else _wide
    tiles, items = _tiles(plan), _items_with_tiles(plan)
    row = row_bytes(problem.head_dim)
    loaded = tiles * 2 * config.block_q * (row + _FLOAT) + items * 2 * config.block_kv * row
    return (*of_kernel(problem, config, tiles, items), Part("loads of Q, dO, K, V", 0, loaded))


def _narrow(problem: Problem, config: Fa3BackwardConfig, tiles: int, items: int) -> tuple[Part, ...]:
    groups, queries, head_dim = config.block_kv // GROUP_KEYS, config.block_q, problem.head_dim
    item, depth = problem.itemsize, depth_of(head_dim)
    columns = _dq_columns(config, head_dim)
    score = GROUP_KEYS * queries * depth, (GROUP_KEYS + queries) * depth * item
    gradient = GROUP_KEYS * queries * head_dim, queries * head_dim * item
    dq = GROUP_ROWS * columns * config.block_kv, (GROUP_ROWS + columns) * config.block_kv * item
    staged = tiles * (groups * GROUP_ROWS * columns + queries * head_dim) * _FLOAT
    return (
        _part("S", (tiles + items) * groups, score),
        _part("dP", tiles * groups, score),
        _part("dV", tiles * groups, gradient),
        _part("dK", tiles * groups, gradient),
        _part("dQ", (tiles + items) * groups, dq),
        Part("dS, stored", 0, (tiles + items) * queries * config.block_kv * item),
        Part("LSE and D, read", 0, 2 * tiles * groups * _numbers(queries)),
        Part("dQ, staged", 0, staged if config.bulk_add else 0),
    )


def _wide(problem: Problem, config: Fa3BackwardConfig, tiles: int, items: int) -> tuple[Part, ...]:
    queries, keys, head_dim, item = config.block_q, config.block_kv, problem.head_dim, problem.itemsize
    depth = depth_of(head_dim)
    scores = queries * keys * item
    # Both runs of the second half lie in one array of registers then, and take zeros to the end of the last atom of K.
    columns = 4 * ATOM_COLUMNS if head_dim > 3.5 * ATOM_COLUMNS else head_dim
    score = keys * queries * depth, (keys + queries) * depth * item
    gradient = keys * queries * head_dim, queries * head_dim * item
    return (
        _part("S", tiles, score),
        _part("dP", tiles, score),
        _part("dV", tiles, gradient),
        _part("dK", tiles, gradient),
        _part("dQ", tiles, (queries * columns * keys, (4 * queries + columns) * keys * item)),
        Part("dS, stored", 0, tiles * scores),
        Part("P, stored and read", 0, 2 * tiles * scores),
        Part("LSE and D, read", 0, 2 * tiles * _numbers(queries)),
    )


def _part(name: str, times: int, each: tuple[int, int]) -> Part:
    multiply_adds, shared_bytes = each
    return Part(name, times * multiply_adds, times * shared_bytes)


def _numbers(queries: int) -> int:
    """A number of each query, read by a warpgroup: every warp takes two of them a lane, for 8 queries at a time, and
    8 bytes a lane are two wavefronts."""
    return queries // 8 * 4 * 2 * _WAVEFRONT


def _dq_columns(config: Fa3BackwardConfig, head_dim: int) -> int:
    """Of a warpgroup: all, of 64 rows each; or a share, within an atom of K."""
    groups = config.block_kv // GROUP_KEYS
    if config.block_q == GROUP_ROWS * groups:
        return head_dim
    return -(-head_dim // (8 * groups)) * 8 if head_dim <= ATOM_COLUMNS else ATOM_COLUMNS


def _config(plan: Plan) -> Fa3BackwardConfig:
    assert isinstance(plan.config, Fa3BackwardConfig)
    return plan.config


def _tiles(plan: Plan) -> int:
    return plan.schedule.visited * plan.problem.batch * plan.problem.heads


def _items_with_tiles(plan: Plan) -> int:
    return int((plan.schedule.visits > 0).sum()) * plan.problem.batch * plan.problem.kv_heads


def _pass_bytes(problem: Problem, config: Fa3BackwardConfig) -> int:
    """Before: dO, O and LSE are read, zeros for dQ in float32 and two numbers of each row written, in whole tiles. After: dQ
    in float32 is read, and written rounded."""
    heads, rows = problem.batch * problem.heads, problem.seqlen_q
    whole = -(-rows // config.block_q) * config.block_q
    strips = -(-rows // STRIP) * STRIP
    before = rows * (2 * problem.head_dim * problem.itemsize + _FLOAT) + whole * (problem.head_dim + 2) * _FLOAT
    after = strips * problem.head_dim * _FLOAT + rows * problem.head_dim * problem.out_element.itemsize
    return heads * (before + after)
