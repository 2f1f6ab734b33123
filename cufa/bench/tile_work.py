"""What the tiles of a plan ask of a GPU in all, masked parts included: derived from its loops. Pure: no GPU.

Every consumer warpgroup of FA3 multiplies 64 query rows with one key tile at a time. Counted per such step:

- products: S = Q Kᵀ over head_dim rounded up to 16, and O += P V;
- exponentials: one per score;
- shared memory: what the tensor cores read (K, V and Q; Q only once when it is kept in registers), what TMA
  writes, and O on its way out.

Rows past the end of the queries and rows that see no key are left out; a query block may compute some of them
all the same. The backward is in :mod:`cufa.bench.backward_parts`.
"""

from __future__ import annotations

import dataclasses

from ..core.schedule import Schedule
from ..kernels.backward import STRIP
from ..kernels.fa3 import Fa3Config
from ..kernels.fa3_backward import Fa3BackwardConfig
from ..planner import Plan
from . import backward_parts

_FLOAT = 4

#: Rows of a consumer warpgroup.
GROUP_ROWS = 64
ATOM_COLUMNS, ATOM_ROW_BYTES = 64, 128


@dataclasses.dataclass(frozen=True)
class Work:
    flops: int
    exponentials: int
    shared_bytes: int
    memory_bytes: int
    """Compulsory: every operand once."""
    further_bytes: int = 0
    """Of device memory, by launches before and after that of the tiles."""
    added_bytes: int = 0
    """Of float32 sums in the L2 cache."""


def row_bytes(head_dim: int) -> int:
    """Of a row in shared memory, in whole pieces of 128."""
    return -(-head_dim // ATOM_COLUMNS) * ATOM_ROW_BYTES


def depth_of(head_dim: int) -> int:
    """Of a product over the head dim."""
    return -(-head_dim // 16) * 16


def forward_work(plan: Plan) -> Work:
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa3Config)
    heads = problem.batch * problem.heads
    groups = Schedule.of(problem, GROUP_ROWS, config.block_kv, plan.spec.skip_masked_tiles)
    steps, tiles = groups.visited * heads, plan.schedule.visited * heads
    items = plan.schedule.num_q_blocks * heads
    depth, row, operand = depth_of(problem.head_dim), row_bytes(problem.head_dim), problem.k_element.itemsize
    reads = steps * config.block_kv * (depth + problem.head_dim) * operand
    q_bytes = items * config.block_q * row
    reads += q_bytes if config.q_in_registers else steps * GROUP_ROWS * depth * operand
    writes = tiles * 2 * config.block_kv * row + q_bytes
    # O takes the place of Q on its way out, where a buffer of Q is free by then.
    if config.store_by_tma and (config.q_in_registers or config.q_stages > 1):
        reads, writes = reads + q_bytes, writes + q_bytes
    return Work(
        flops=steps * 2 * GROUP_ROWS * config.block_kv * (depth + problem.head_dim),
        exponentials=steps * GROUP_ROWS * config.block_kv,
        shared_bytes=reads + writes,
        memory_bytes=problem.io_bytes,
    )


def fa3_backward_work(plan: Plan) -> Work:
    """Products and shared memory are those of :mod:`cufa.bench.backward_parts`. A launch before reads dO and O and
    makes zeros of dQ in float32, in whole tiles; one after rounds it."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, Fa3BackwardConfig)
    found, tiles = backward_parts.parts(plan), backward_parts.tiles_of(plan)
    rows, row = problem.seqlen_q, problem.head_dim * problem.itemsize
    whole = -(-rows // config.block_q) * config.block_q
    strips = -(-rows // STRIP) * STRIP
    passes = (
        rows * (3 * row + _FLOAT)
        + whole * (problem.head_dim + 2) * _FLOAT
        + strips * problem.head_dim * _FLOAT
    )
    return Work(
        flops=2 * sum(part.multiply_adds for part in found),
        exponentials=tiles * config.block_q * config.block_kv,
        shared_bytes=sum(part.shared_bytes for part in found),
        memory_bytes=problem.io_bytes,
        further_bytes=problem.batch * problem.heads * passes,
        added_bytes=tiles * config.block_q * problem.head_dim * _FLOAT,
    )
