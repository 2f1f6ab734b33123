"""What the tiles of a plan ask of the GPU in all, masked parts included, derived from the loops of the kernels that
keep scores on chip. Pure: no GPU.

Counted: products, over head_dim rounded up to 16 where it is what is summed over; an exponential per score, and two
more operations of the same unit where a soft cap takes its tanh; what is read from and written to shared memory. Tests
hold the counts against those of the kernels' source when it is executed (:mod:`cufa.run.emulate`).

FlashAttention-3: every consumer warpgroup multiplies 64 query rows with one key tile at a time; rows past the end of
the queries and rows that see no key are left out. The tensor cores read K, V and Q (Q only once when it is kept in
registers), the copy engine writes, and O passes through on its way out. FlashAttention-2 and the backward: warps load
fragments of the tiles that copies have written, those that share rows or keys only their own part. The backward on
Hopper is counted product by product in :mod:`cufa.measure.backward_parts`.
"""

from __future__ import annotations

import dataclasses

from ..kernels.backward.fa2 import STRIP, BackwardConfig
from ..kernels.backward.fa3_config import Fa3BackwardConfig
from ..kernels.base import ceil_div
from ..kernels.forward.fa2 import Fa2Config
from ..kernels.forward.fa3 import Fa3Config
from ..plan.planner import Plan
from ..problem.problem import Problem
from ..problem.tile_classes import TileClass
from ..schedule.schedule import Schedule
from . import backward_parts

#: Query rows of a consumer warpgroup.
GROUP_ROWS = 64
_ATOM_COLUMNS, _ATOM_ROW_BYTES = 64, 128
_ITEM = 2
"""Bytes of a number in the tiles: kernels of float32 are not derived."""
_FLOAT = 4
_WAVEFRONT = 128
_CAP_OPERATIONS = 2
"""Of tanh: an exponential and a reciprocal."""


@dataclasses.dataclass(frozen=True)
class Work:
    """In all of a call."""

    flops: int
    exponentials: int
    """And what else their unit does."""
    shared_bytes: int
    memory_bytes: int
    """Compulsory: every operand once."""
    further_bytes: int = 0
    """Of device memory, by launches before and after that of the tiles."""
    own_bytes: int = 0
    """On Hopper, of shared memory: what threads read and write themselves, and neither tensor cores nor copies do."""
    added_bytes: int = 0
    """Of float32 sums that thread blocks add to in the L2 cache."""


def covers(plan: Plan) -> bool:
    """Whether the counts hold for the plan's kernel. Of split keys they leave out the parts and their merge."""
    known = type(plan.config) in _FAMILIES and plan.problem.itemsize == _ITEM
    return known and plan.device is not None and plan.order is not None and plan.split is None


def work_of(plan: Plan) -> Work:
    """For a plan that :func:`covers`."""
    return _FAMILIES[type(plan.config)](plan)


def _score_operations(problem: Problem, scores: int) -> int:
    return scores * (1 if problem.softcap is None else 1 + _CAP_OPERATIONS)


def _depth(problem: Problem) -> int:
    return ceil_div(problem.head_dim, 16) * 16


def _fa3(plan: Plan) -> Work:
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa3Config)
    heads, depth = problem.batch * problem.heads, _depth(problem)
    groups = Schedule.of(problem, GROUP_ROWS, config.block_kv, plan.spec.skip_masked_tiles)
    steps, tiles = groups.visited * heads, plan.schedule.visited * heads
    items = plan.schedule.num_q_blocks * heads
    row_bytes = ceil_div(problem.head_dim, _ATOM_COLUMNS) * _ATOM_ROW_BYTES
    reads = steps * config.block_kv * (depth + problem.head_dim) * _ITEM
    q_bytes = items * config.block_q * row_bytes
    reads += (items * config.block_q if config.q_in_registers else steps * GROUP_ROWS) * depth * _ITEM
    writes = tiles * 2 * config.block_kv * row_bytes + q_bytes
    # O takes the place of Q on its way out, where a buffer of Q is free by then.
    if config.store_by_tma and (config.q_in_registers or config.q_stages > 1):
        reads, writes = reads + q_bytes, writes + q_bytes
    return Work(
        flops=steps * 2 * GROUP_ROWS * config.block_kv * (depth + problem.head_dim),
        exponentials=_score_operations(problem, steps * GROUP_ROWS * config.block_kv),
        shared_bytes=reads + writes,
        memory_bytes=problem.io_bytes,
    )


def _fa2(plan: Plan) -> Work:
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa2Config)
    heads, depth, row_bytes = problem.batch * problem.heads, _depth(problem), problem.head_dim * _ITEM
    tiles, items = plan.schedule.visited * heads, plan.schedule.num_q_blocks * heads
    scores, parts = config.block_q * config.block_kv, config.column_warps
    columns = parts * ceil_div(problem.head_dim // 8, parts) * 8  # of O, which warps of a pair split
    fragments = config.num_warps // parts * config.block_kv * (depth + columns) * _ITEM
    fragments += 0 if _q_in_registers(problem, config) else config.block_q * parts * depth * _ITEM
    exchanged = 2 * scores * _ITEM if parts > 1 else 0  # P, written and read by the other warp of a pair
    per_tile = fragments + exchanged + 2 * config.block_kv * row_bytes
    return Work(
        flops=tiles * 2 * scores * (depth + columns),
        exponentials=_score_operations(problem, tiles * scores),
        # Q and O are written and read once.
        shared_bytes=tiles * per_tile + items * 4 * config.block_q * row_bytes,
        memory_bytes=problem.io_bytes,
    )


def _q_in_registers(problem: Problem, config: Fa2Config) -> bool:
    """``Q_IN_REGISTERS`` of fa2_forward.cu."""
    rows = config.block_q // (config.num_warps // config.column_warps) // 16
    s_tiles = config.block_kv // config.column_warps // 8
    o_tiles = ceil_div(problem.head_dim // 8, config.column_warps)
    limit = min(255, 65536 // (config.num_warps * 32 * config.blocks_per_sm))
    return rows * 4 * (_depth(problem) // 16 + s_tiles + o_tiles) + 64 <= limit


def _fa2_backward(plan: Plan) -> Work:
    """Five products per tile: S, dP, and dV, dK, dQ. A launch before reads dO and O and makes zeros of dQ in float32,
    one after rounds it."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, BackwardConfig)
    heads, depth, row_bytes = problem.batch * problem.heads, _depth(problem), problem.head_dim * _ITEM
    queries, keys = config.block_q, config.block_kv
    tiles, items = (
        plan.schedule.visited * heads,
        plan.schedule.num_kv_blocks * problem.batch * problem.kv_heads,
    )
    copied = 2 * queries * row_bytes + queries * 8
    exchanged = (
        keys * queries * _ITEM * (2 if config.shared_keys else 1)
    )  # dS, and P among warps of the same keys
    per_tile = config.num_warps * _backward_fragments(problem, config) + exchanged + copied
    rows = heads * problem.seqlen_q
    return Work(
        flops=tiles * 2 * queries * keys * (2 * depth + 3 * problem.head_dim),
        exponentials=_score_operations(problem, tiles * queries * keys),
        # K and V come in, dK and dV go out in their place.
        shared_bytes=tiles * per_tile + items * 8 * keys * row_bytes,
        memory_bytes=problem.io_bytes,
        further_bytes=rows * (3 * row_bytes + 2 * problem.head_dim * _FLOAT + 12),
        added_bytes=heads * _rows_added_to(plan) * problem.head_dim * _FLOAT,
    )


def _rows_added_to(plan: Plan) -> int:
    """Of dQ of one head, by all key blocks, in whole strips."""
    visited = plan.schedule.classes != TileClass.SKIP
    beyond = -(ceil_div(plan.problem.seqlen_q, STRIP) * STRIP) % plan.config.block_q
    return plan.schedule.visited * plan.config.block_q - beyond * int(visited[:, -1].sum())


def _backward_fragments(problem: Problem, config: BackwardConfig) -> int:
    """Bytes that one warp reads per tile: the constants at the head of fa2_backward.cu."""
    depth, d_tiles = _depth(problem), problem.head_dim // 8
    parts = config.num_warps // (config.block_kv // config.warp_keys)
    own = config.block_q // parts
    chunk = min(own, 32)
    o_tiles = ceil_div(d_tiles, parts)
    dq_tiles = (
        ceil_div(d_tiles, config.num_warps // (config.block_q // 32)) if config.block_q >= 32 else d_tiles
    )
    dq_runs = 2 if dq_tiles > 4 and dq_tiles % 2 == 0 else 1
    scores = 2 * (own // chunk) * (config.warp_keys + chunk) * depth * _ITEM  # K and Q, V and dO
    of_others = 2 * config.warp_keys * (config.block_q - own) * _ITEM  # P and dS
    key_gradients = 2 * config.block_q * o_tiles * 8 * _ITEM  # dO and Q
    query_gradients = (32 * dq_runs + dq_tiles * 8) * config.block_kv * _ITEM  # dS and K
    numbers = (
        2 * own // 8 * 4 * _WAVEFRONT
    )  # L and D of two queries per lane, 16 bytes, once for P and once for dS
    return scores + of_others + key_gradients + query_gradients + numbers


def _fa3_backward(plan: Plan) -> Work:
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa3BackwardConfig)
    found, tiles = backward_parts.parts(plan), backward_parts.tiles_of(plan)
    return Work(
        flops=2 * sum(part.multiply_adds for part in found),
        exponentials=_score_operations(problem, tiles * config.block_q * config.block_kv),
        shared_bytes=sum(part.shared_bytes for part in found),
        memory_bytes=problem.io_bytes,
        further_bytes=sum(backward_parts.passes(problem, config)),
        own_bytes=sum(part.shared_bytes for part in found if part.by_threads),
        added_bytes=tiles * config.block_q * problem.head_dim * _FLOAT,
    )


_FAMILIES = {
    Fa3Config: _fa3,
    Fa2Config: _fa2,
    BackwardConfig: _fa2_backward,
    Fa3BackwardConfig: _fa3_backward,
}
