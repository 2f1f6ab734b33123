"""Bytes that a kernel's tiles move between the SMs and the L2 cache, and within shared memory, derived from its
loops. Pure: no GPU.

What device memory itself has to move is less, as tiles share keys and values in the L2 cache: at the least every
operand once (:attr:`cufa.problem.problem.Problem.io_bytes`). Tests hold the derivation against what the kernels' source
asks for when it is executed (:mod:`cufa.run.emulate`), in sectors of 32 bytes where lanes ask for the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..kernels import Kernel, TileConfig
from ..kernels.backward.fa3_config import Fa3BackwardConfig
from ..kernels.base import ceil_div
from ..kernels.config import SplitConfig
from ..kernels.forward.fa1 import Fa1Config
from ..plan.planner import make_plan
from ..problem.problem import Problem
from ..problem.tile_classes import TileClass
from ..schedule.schedule import Schedule
from . import backward_parts
from .tile_work import covers, work_of

_FLOAT = 4
_STRIP = 32
"""Rows of FlashAttention-1's steps: what it keeps between key blocks is that of whole strips."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one call."""

    read: int
    """From the L2 cache to the SMs."""
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def l2_traffic(problem: Problem, spec: Kernel, config: TileConfig) -> Traffic | None:
    """Of a forward kernel that keeps scores on chip, its log-sum-exp written too, and of the backward on Hopper; None
    of others, and of split keys."""
    if isinstance(config, SplitConfig) and config.split_keys:
        return None
    if isinstance(config, Fa3BackwardConfig):
        return _backward_on_hopper(problem, _schedule(problem, spec, config), config)
    device = Device.typical(max(90, spec.min_capability))
    if (
        problem.operation != "forward"
        or spec.order(problem, _schedule(problem, spec, config), device, config) is None
    ):
        return None
    if isinstance(config, Fa1Config):
        head = _keys_outside(problem, config)
    else:
        head = _queries_outside(problem, _schedule(problem, spec, config))
    heads = problem.batch * problem.heads
    return Traffic(heads * head.read, heads * head.written)


def shared_bytes(problem: Problem, spec: Kernel, config: TileConfig) -> int | None:
    """Bytes that a kernel reads and writes in shared memory; None where they are not derived
    (:mod:`cufa.measure.tile_work`)."""
    try:
        plan = make_plan(problem, Device.typical(max(90, spec.min_capability)), spec.algorithm, config)
    except ValueError:  # does not fit there
        return None
    return work_of(plan).shared_bytes if covers(plan) else None


def _schedule(problem: Problem, spec: Kernel, config: TileConfig) -> Schedule:
    return Schedule.of(problem, config.block_q, config.block_kv, spec.skip_masked_tiles)


def _queries_outside(problem: Problem, schedule: Schedule) -> Traffic:
    """A head, FlashAttention-2's and 3's loops: Q once, then K and V of every tile that a query block visits; O and
    its log-sum-exp once. Rows past the end are not read."""
    keys = schedule.visited * schedule.block_kv
    if beyond := -problem.seqlen_k % schedule.block_kv:  # of the last tile
        keys -= beyond * int((schedule.classes[:, -1] != TileClass.SKIP).sum())
    return Traffic(
        problem.seqlen_q * _row(problem) + keys * _key(problem),
        problem.seqlen_q * (problem.head_dim * problem.out_element.itemsize + _FLOAT),
    )


def _backward_on_hopper(problem: Problem, schedule: Schedule, config: Fa3BackwardConfig) -> Traffic:
    """All heads: Q, dO and two numbers of each row for every tile that a key block visits, and an addition to dQ; K and
    V once, dK and dV once. Then what the launches before and after move. Rows past the end are added to, not read."""
    heads, key_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    visited = schedule.classes != TileClass.SKIP
    rows = schedule.visited * config.block_q
    rows -= (-problem.seqlen_q % config.block_q) * int(visited[:, -1].sum())
    seen = visited.any(axis=1)
    keys = int(seen.sum()) * config.block_kv - (-problem.seqlen_k % config.block_kv) * int(seen[-1])
    read, written = backward_parts.passes(problem, config)
    numbers = schedule.visited * config.block_q * _FLOAT
    queries = heads * config.cluster * (rows * 2 * _row(problem) + 2 * numbers)
    others = _other_keys(problem, config, seen) if config.paired else 0
    return Traffic(
        queries + key_heads * (keys * _key(problem) + others) + read,
        heads * numbers * problem.head_dim + key_heads * problem.seqlen_k * _key(problem) + written,
    )


def _other_keys(problem: Problem, config: Fa3BackwardConfig, seen: npt.NDArray[np.bool_]) -> int:
    """A head, bytes of K that blocks of pairs read beside their own: the second one's keys to their 128th column, the
    first one's from the last but one multiple of 64 columns on."""
    own = config.block_kv // config.cluster
    keys = np.clip(problem.seqlen_k - np.arange(len(seen)) * config.block_kv, 0, config.block_kv)[seen]
    first = np.minimum(keys, own)
    last_columns = problem.head_dim - (ceil_div(problem.head_dim, 64) - 2) * 64
    columns = (keys - first) * config.other_columns + first * last_columns
    return int(columns.sum()) * problem.itemsize


def _keys_outside(problem: Problem, config: Fa1Config) -> Traffic:
    """A head, FlashAttention-1's loops: K and V once; Q per key block, and one query block ahead; O, l and m in float32
    to memory after each key block but the last and back before each but the first. Every warp that shares a row's
    keys reads its l and m."""
    num_key_blocks = -(-problem.seqlen_k // config.block_kv)
    ahead = min(problem.seqlen_q, config.block_q)
    columns = -(-problem.head_dim // 16) * 16
    rows = -(-problem.seqlen_q // _STRIP) * _STRIP
    kept = (num_key_blocks - 1) * rows * _FLOAT
    return Traffic(
        problem.seqlen_k * _key(problem)
        + (num_key_blocks * problem.seqlen_q + ahead) * _row(problem)
        + kept * (columns + 2 * config.key_warps),
        kept * (columns + 2) + problem.seqlen_q * (problem.head_dim * problem.out_element.itemsize + _FLOAT),
    )


def _row(problem: Problem) -> int:
    return problem.head_dim * problem.q_element.itemsize


def _key(problem: Problem) -> int:
    """Bytes of a key and its value."""
    return problem.head_dim * (problem.k_element.itemsize + problem.v_element.itemsize)
