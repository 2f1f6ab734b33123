"""Attention in NumPy: the papers' algorithms, tile by tile in the kernels' schedule. Tiles and threads are in
:mod:`cufa.run.cpu.tiles`."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ...plan.planner import Plan
from ...problem.float8 import LARGEST, round_to_e4m3
from ...problem.problem import Problem
from ...problem.scores import softcapped_in_place, with_sink
from ...schedule.schedule import Schedule
from .blas import single_threaded_blas
from .scores import DroppedWeights, ScoreFunction
from .tiles import (
    Array,
    Heads,
    Observer,
    TileStep,
    cuts,
    group_heads,
    hide,
    in_threads,
    num_workers,
    numbers_of_heads,
    operand,
    product_of_seen,
    row_sums,
)


def run(
    plan: Plan, q: Array, k: Array, v: Array, out: Array, lse: Array | None, *,
    alibi_slopes: Array | None = None, sink: Array | None = None, score: ScoreFunction | None = None,
    dropped: DroppedWeights | None = None, observer: Observer | None = None, num_threads: int | None = None,
) -> None:  # fmt: skip
    """Execute a plan made for the CPU, of one part; ``out`` and ``lse`` are written in place.

    q and out have shape (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim). v and out
    may have another head_dim. All have the problem's dtype, any strides and no empty axis. Inputs of e4m3 come in
    float32, times their scales. lse is float32 (batch, heads, seqlen_q) or None, alibi_slopes (heads,) or (batch,
    heads), sink (heads,).

    ``plan.spec.algorithm`` names the loop nest: "fa1" and "naive" have their own, all others use FA2's. The plan's
    schedule says whether masked tiles are skipped. ``observer`` receives every tile, in one thread ("naive" has none).
    The default of ``num_threads`` is the number that NumPy's BLAS would use.
    """
    loop_nest = {"fa1": _fa1, "naive": _naive}.get(plan.spec.algorithm, _fa2)
    problem, schedule = plan.problem, plan.schedule
    if loop_nest is _naive:
        schedule = Schedule.of(problem, problem.seqlen_q, problem.seqlen_k, skip_masked_tiles=False)
    group = problem.group_size
    q, out = group_heads(q, group), group_heads(out, group)
    k, v = k[:, :, None], v[:, :, None]  # one head for its whole group: broadcast, never copied
    lse = None if lse is None else group_heads(lse, group)
    head_numbers = [numbers_of_heads(problem, x) for x in (alibi_slopes, sink)]

    def work(task: _Task) -> None:
        heads, q_blocks = task
        operands = q[heads], k[heads[:2]], v[heads[:2]], out[heads], None if lse is None else lse[heads]
        stack = (_Float8Stack if problem.scales else _Stack)(schedule, problem, *operands)
        stack.score = None if score is None else score.at(heads)
        stack.dropped = None if dropped is None else dropped.at(heads)
        stack.slopes, stack.sink = (None if x is None else x[heads][..., None, None] for x in head_numbers)
        if observer is not None:
            batch, kv_head, member = (x.start for x in heads)
            stack.watch(observer, batch, kv_head * group + member)
        loop_nest(stack, q_blocks)

    with single_threaded_blas() as available:
        workers = 1 if observer is not None else num_workers(problem, num_threads, available)
        tasks = _tasks(plan, schedule, workers if loop_nest is _fa2 else 1, one_head=observer is not None)
        for _ in in_threads(work, tasks, workers):
            pass


# --- The algorithms --------------------------------------------------------------------------------------


def online_softmax(S: Array, m: Array, l: Array) -> tuple[Array, Array, Array, Array]:
    """One more tile of scores, S (..., rows, columns), for rows with running maximum m and sum l
    (..., rows, 1).

    Returns P = exp(S - m_new) in S's memory, m_new, l_new, and exp(m - m_new), the factor that rescales earlier sums
    to the new maximum. Rows that have seen no key keep m = -inf and l = 0.
    """
    m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
    shift = np.where(m_new == -np.inf, 0, m_new)  # exp(-inf - 0) = 0, where exp(-inf + inf) would be NaN
    # exp, not exp2 with log2(e) in the scale as on a GPU: before AVX-512, NumPy has no SIMD exp2.
    P = np.exp(np.subtract(S, shift, out=S), out=S)
    alpha = np.exp(m - shift)
    return P, m_new, alpha * l + row_sums(P), alpha


def _fa2(heads: _Stack, q_blocks: range) -> None:
    """Algorithm 1 of the FlashAttention-2 paper: queries outermost, O unnormalised until its last tile."""
    for i in q_blocks:  # l. 3
        Q = heads.load_queries(i)  # l. 4
        O, l, m = heads.initial(heads.rows(i))  # l. 5
        for j in heads.visits(i):  # l. 6
            S = heads.scores(Q, i, j)  # l. 7-8
            P, m_new, l_new, alpha = online_softmax(S, m, l)  # l. 9
            O *= alpha  # l. 10
            O += heads.weighted_values(P, i, j)
            heads.observe(i, j, P, m, l, m_new, l_new, alpha, O)
            m, l = m_new, l_new
        heads.store(heads.rows(i), normalise(O, l), m, l)  # l. 12-15


def _fa1(heads: _Stack, q_blocks: range) -> None:
    """Algorithm 1 of the FlashAttention paper: keys outermost. O, l and m of all queries are kept throughout (in the
    compute dtype), and O is normalised in every step.

    Departure: P is computed relative to the new maximum. The paper's P is relative to its tile's, and corrected later.
    """
    every_row = slice(0, heads.schedule.seqlen_q)
    O, l, m = heads.initial(every_row)  # l. 2
    for j in range(heads.schedule.num_kv_blocks):  # l. 5-6
        for i in q_blocks:  # l. 7
            Q = heads.load_queries(i)  # l. 8
            O_i, l_i, m_i = (x[..., heads.rows(i), :] for x in (O, l, m))
            S = heads.scores(Q, i, j)  # l. 9
            P, m_new, l_new, alpha = online_softmax(S, m_i, l_i)  # l. 10-11
            O_i *= alpha * l_i  # l. 12
            O_i += heads.weighted_values(P, i, j)
            normalise(O_i, l_new)
            heads.observe(i, j, P, m_i, l_i, m_new, l_new, alpha, O_i)
            l_i[...], m_i[...] = l_new, m_new  # l. 13
    heads.store(every_row, O, m, l)


def _naive(heads: _Stack, q_blocks: range) -> None:
    """Algorithm 0 of the FlashAttention paper: the whole of S, the whole of P, then O. There is one tile."""
    S = heads.scores(heads.load_queries(0), 0, 0)  # l. 1
    m = S.max(axis=-1, keepdims=True)  # l. 2
    P = np.subtract(S, np.where(m == -np.inf, 0, m))
    np.exp(P, out=P)
    l = row_sums(P)
    if heads.sink is not None:
        m_new, l = with_sink(m, l, heads.sink)
        P *= np.exp(m - np.where(m_new == -np.inf, 0, m_new))
        m = m_new
    P /= np.where(l == 0, 1, l)
    O = heads.weighted_values(P, 0, 0)  # l. 3
    np.copyto(O, 0, where=l == 0)  # 0 · inf is NaN
    heads.store(heads.rows(0), O, m, l)


def normalise(O: Array, l: Array) -> Array:
    """diag(l)⁻¹ O in place. Rows that have seen no key, or only scores of -inf, are zeros."""
    O /= l
    np.copyto(O, 0, where=l == 0)
    return O


# --- Heads and their tiles -------------------------------------------------------------------------------


class _Stack(Heads):
    """Operands of a stack in the compute dtype, and scratch for one tile."""

    def __init__(
        self, schedule: Schedule, problem: Problem, q: Array, k: Array, v: Array, out: Array,
        lse: Array | None,
    ) -> None:  # fmt: skip
        super().__init__(schedule, problem, q.shape[:-2])
        self.q, self.out, self.lse = q, out, lse
        self.K, self.V = operand(k, self.dtype), operand(v, self.dtype)
        self._observer: Observer | None = None
        self._S, self._PV = self.empty(self.block_q, self.block_kv), self.empty(self.block_q, problem.v_dim)

    def watch(self, observer: Observer, batch: int, head: int) -> None:
        """Pass every tile to ``observer``. The stack is one head."""
        self._observer, self._place = observer, (batch, head)

    def observe(self, i: int, j: int, P: Array, m: Array, l: Array, m_new: Array, l_new: Array, alpha: Array,
                O: Array) -> None:  # fmt: skip
        """Tile (i, j) is done: m and l are from before the tile, m_new, l_new and O from after it."""
        if self._observer is not None:
            m, l, m_new, l_new, alpha = (x.flatten() for x in (m, l, m_new, l_new, alpha))
            P, O = (x.reshape(x.shape[-2:]).copy() for x in (P, O))
            self._observer(TileStep(*self._place, i, j, self._S_before, P, m, l, m_new, l_new, alpha, O))

    def initial(self, rows: slice) -> tuple[Array, Array, Array]:
        """O = 0, l = 0, m = -inf for these rows; with a sink, m and l include it."""
        count = rows.stop - rows.start
        O, l, m = self.empty(count, self.V.shape[-1]), self.empty(count, 1), self.empty(count, 1)
        O[...], l[...], m[...] = 0, 0, -np.inf
        if self.sink is not None:
            m, l = (x.astype(self.dtype) for x in with_sink(m, l, self.sink))
        return O, l, m

    def load_queries(self, i: int) -> Array:
        """scale · Q_i: the scale costs a pass over Q, not one over S."""
        Q: Array = np.multiply(self.q[..., self.rows(i), :], self.scale, dtype=self.dtype)
        return Q

    def scores(self, Q: Array, i: int, j: int) -> Array:
        """S_ij, masked scores -inf. Scratch: valid until the next call."""
        K = self.K[..., self.columns(j), :]
        S: Array = np.matmul(Q, K.mT, out=self._S[..., : Q.shape[-2], : K.shape[-2]])
        if self.score is not None:
            self.score.change_in_place(S, self.rows(i), self.columns(j))
        if self.softcap is not None:
            softcapped_in_place(S, self.softcap)
        if self.slopes is not None:
            S -= self.slopes * self.distances(i, j)
        if self.is_masked(i, j):
            hide(S, self.hidden(i, j))
        if self._observer is not None:
            self._S_before = S.reshape(S.shape[-2:]).copy()  # P takes its place
        return S

    def weighted_values(self, P: Array, i: int, j: int) -> Array:
        """P_ij V_j, P's dropped weights 0. Scratch: valid until the next call."""
        if self.dropped is not None:
            self.dropped.drop(P, self.rows(i), self.columns(j))
        V = self.V[..., self.columns(j), :]
        hidden = None if not self.is_masked(i, j) or np.isfinite(V).all() else self.hidden(i, j)
        return product_of_seen(P, V, hidden, self._PV[..., : P.shape[-2], :])

    def store(self, rows: slice, O: Array, m: Array, l: Array) -> None:
        self.out[..., rows, :] = O
        if self.lse is not None:
            self.lse[..., rows] = (m + np.log(l))[..., 0]


class _Float8Stack(_Stack):
    """Heads of e4m3, given as float32. As in ``fa3_forward_fp8``, keys go from the last tile to the first, and P is
    rounded to e4m3 after multiplication by 448; the denominator sums P unrounded."""

    def visits(self, block: int) -> list[int]:
        return super().visits(block)[::-1]

    def weighted_values(self, P: Array, i: int, j: int) -> Array:
        P *= np.float32(LARGEST)
        PV = super().weighted_values(round_to_e4m3(P), i, j)
        PV /= np.float32(LARGEST)
        return PV


# --- Tasks of threads ------------------------------------------------------------------------------------

_Task = tuple[tuple[slice, slice, slice], range]
"""Heads, as slices of (batch, kv_heads, group), and the query blocks to compute for them."""


def _tasks(plan: Plan, schedule: Schedule, workers: int, one_head: bool) -> list[_Task]:
    """Cut the problem into stacks of heads. If there are too few stacks to keep ``workers`` busy, also cut each stack's
    query blocks into shares (FA2's query blocks are independent of each other)."""
    stacks = list(itertools.product(*cuts(plan.problem, schedule, plan.config, one_head)))
    blocks = schedule.num_q_blocks
    shares = min(blocks, math.ceil(4 * workers / len(stacks))) if workers > 1 else 1
    # Every shares-th block, not neighbours: later blocks may be the longer ones.
    return [(stack, range(first, blocks, shares)) for stack in stacks for first in range(shares)]
