"""Gradients of attention in NumPy: Algorithm 2 of the FlashAttention-2 paper, tile by tile in the kernels' schedule.
Tiles and threads are in :mod:`cufa.run.cpu.tiles`.

Memory beyond the results, for each stack of heads: dQ in the compute dtype, two numbers per query and a few tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...plan.operation import Arrays
from ...plan.planner import Plan
from ...problem import scores
from ...problem.problem import Problem
from ...problem.scores import softcap_derivative, softcapped_in_place
from ...schedule.schedule import Schedule
from .blas import single_threaded_blas
from .scores import DroppedWeights, ScoreFunction
from .tiles import (
    MIN_STACKS,
    Array,
    Bools,
    Heads,
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


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """One tile's contribution to the gradients of one head, for an observer: copies, in the compute dtype."""

    batch: int
    head: int
    q_block: int
    kv_block: int
    lse: Array
    """(rows,); inf for a row that sees no key."""
    delta: Array
    """rowsum(dO ∘ O) - dLSE, (rows,)."""
    P: Array
    """exp(S - lse), (rows, columns)."""
    dP: Array
    dS: Array
    """P ∘ (dP - delta); with a soft cap, times the cap's slope."""
    dQ: Array
    """Sum of the tiles so far, (rows, head_dim)."""
    dK: Array
    """Sum of the tiles so far over the heads of the query group, (columns, head_dim); not yet multiplied by the
    scale."""
    dV: Array


Observer = Callable[[GradientStep], None]
_ALL = slice(None)

_QUERY_ARRAYS = ("dout", "q", "out", "dq", "lse", "dlse")
_KEY_ARRAYS = ("k", "v", "dk", "dv")


def run(
    plan: Plan, given: Arrays, *, score: ScoreFunction | None = None, dropped: DroppedWeights | None = None,
    observer: Observer | None = None, num_threads: int | None = None,
) -> None:  # fmt: skip
    """Execute a plan made for the CPU; dq, dk and dv are written in place.

    Arrays are those of the operation's operands, in "bhsd", in the problem's dtype, with any strides and no empty
    axis; lse and dlse are (batch, heads, seqlen_q). ``observer`` receives every tile, in one thread. The default of
    ``num_threads`` is the number that NumPy's BLAS would use.
    """
    problem, schedule = plan.problem, plan.schedule
    query_arrays: dict[str, Any] = {
        name: None if given[name] is None else group_heads(given[name], problem.group_size)
        for name in _QUERY_ARRAYS
    }
    key_arrays = {name: given[name][:, :, None] for name in _KEY_ARRAYS}  # one head for its whole group
    slopes = numbers_of_heads(problem, given.get("alibi_slopes"))
    *stack_cuts, members = cuts(problem, schedule, plan.config, one_head=observer is not None)
    stacks = list(itertools.product(*stack_cuts))
    shares = 1 if observer is not None else _shares(schedule, len(stacks))

    def work(task: tuple[tuple[slice, ...], int]) -> Array | None:
        heads, share = task
        arrays: dict[str, Any] = {
            name: None if x is None else x[heads] for name, x in (query_arrays | key_arrays).items()
        }
        stack = _Stack(schedule, problem, arrays, members)
        stack.slopes = None if slopes is None else slopes[heads][..., None, None]
        stack.score = None if score is None else score.at(heads)
        stack.dropped = None if dropped is None else dropped.at(heads)
        if observer is not None:
            stack.watch(observer, heads, problem.group_size)
        dQ = _gradients(stack, range(share, schedule.num_kv_blocks, shares))
        if shares > 1:
            return dQ
        arrays["dq"][...] = dQ
        return None  # a returned array would stay in memory until all earlier stacks are done

    with single_threaded_blas() as available, np.errstate(all="ignore"):
        in_order = observer is not None or (score is not None and score.totals)
        workers = 1 if in_order else num_workers(problem, num_threads, available)
        tasks = list(itertools.product(stacks, range(shares)))
        with contextlib.closing(
            in_threads(work, tasks, workers)
        ) as dQs:  # a Ctrl-C while threads end is not lost
            for heads in stacks:  # shares of a stack arrive, and are summed, in order
                total: Array | None = None
                for part in itertools.islice(dQs, shares):
                    if part is not None:
                        total = part if total is None else np.add(total, part, out=total)
                if total is not None:
                    query_arrays["dq"][heads] = total


def _shares(schedule: Schedule, num_stacks: int) -> int:
    """Parts of a stack's key blocks, more than one if there are too few stacks to run in parallel. Each part sums its
    own dQ: the number depends on the problem alone, and so do the bits of the sum."""
    return min(schedule.num_kv_blocks, math.ceil(MIN_STACKS / num_stacks))


def _gradients(heads: _Stack, key_blocks: range) -> Array:
    """Algorithm 2 of the FlashAttention-2 paper: keys outermost. Stores dK and dV of these key blocks, and returns
    their contribution to dQ. K is multiplied by the softmax scale, and at the end dK."""
    dQ = np.zeros_like(heads.Q, order="C")  # l. 5
    for j in key_blocks:  # l. 6
        K, V = heads.load_keys(j)  # l. 7
        dK, dV = np.zeros_like(K, order="C"), np.zeros_like(V, order="C")  # l. 8
        for members, i in heads.visited_queries(j):  # l. 9
            rows = heads.rows(i)
            Q, dO = heads.Q[:, :, members, rows], heads.dO[:, :, members, rows]  # l. 10
            delta = heads.delta[:, :, members, rows]
            hidden = heads.hidden(i, j) if heads.is_masked(j, i) else None
            penalty = None if heads.slopes is None else heads.slopes[:, :, members] * heads.distances(i, j)
            score = None if heads.score is None else heads.score.at((_ALL, _ALL, members))
            change = None if score is None else lambda S, f=score: f.derivatives(S, rows, heads.columns(j))  # noqa: B023
            lse = heads.lse[:, :, members, rows]
            P, slope, score_slopes = heads.weights(Q, K, lse, hidden, penalty, change)  # l. 11-12
            # A hidden inf or NaN must not contribute: 0 · NaN is NaN. If all is finite, zero weights suffice.
            unseen = None if hidden is None or _finite(Q, dO, K, V, delta) else hidden
            seen_by = None if unseen is None else unseen.T
            kept = None if heads.dropped is None else heads.dropped.at((_ALL, _ALL, members))
            P_kept = P if kept is None else P.copy()
            if kept is not None:
                kept.drop(P_kept, rows, heads.columns(j))
            dV += heads.column_product(P_kept.mT, dO, seen_by)  # l. 13
            dS = heads.product(dO, V)  # l. 14
            if kept is not None:
                kept.drop(dS, rows, heads.columns(j))
            dS -= delta
            dS *= P  # l. 15
            if slope is not None:
                dS *= slope
            if unseen is not None:
                hide(dS, unseen, 0)
            if score is not None:
                score.go_back(dS, score_slopes, rows, heads.columns(j))
            dQ[:, :, members, rows] += heads.row_product(dS, K, unseen)  # l. 16
            dK += heads.column_product(dS.mT, Q, seen_by)  # l. 17
            heads.observe(members, i, j, P, dS, dQ[:, :, members, rows], dK, dV)
        dK *= heads.scale
        heads.store(j, dK, dV)  # l. 19
    return dQ


def sink_gradient(given: Arrays) -> Array:
    """dsink of each query head, in float64, summed sequence by sequence; parts without keys included."""
    sink = given["sink"].astype(np.float64)
    total = np.zeros(sink.shape)
    for batch in range(len(given["lse"])):
        lse, dlse = given["lse"][batch], given["dlse"]
        delta = np.einsum("hrd,hrd->hr", given["dout"][batch], given["out"][batch], dtype=np.float64)
        delta = delta if dlse is None else delta - dlse[batch]
        total += scores.sink_gradient(sink, lse.astype(np.float64), delta)
    return total


def _finite(*arrays: Array) -> bool:
    return all(np.isfinite(x).all() for x in arrays)


class _Stack(Heads):
    """Operands of a stack in the compute dtype, with whole groups of query heads, and scratch for one tile of
    ``members`` of a group."""

    def __init__(self, schedule: Schedule, problem: Problem, arrays: Arrays, members: list[slice]) -> None:
        heads = (*arrays["k"].shape[:2], members[0].stop)
        super().__init__(schedule, problem, heads)
        self.Q, self.dO = operand(arrays["q"], self.dtype), operand(arrays["dout"], self.dtype)
        self._observer: Observer | None = None
        self._k, self._v, self._dk, self._dv = (arrays[name] for name in _KEY_ARRAYS)
        self._members = members
        self._P, self._dS = (self.empty(self.block_q, self.block_kv) for _ in range(2))
        self._product = self.empty(max(self.block_q, self.block_kv), max(self.head_dim, problem.v_dim))
        self.lse, self.delta = self._row_numbers(arrays["out"], arrays["lse"], arrays["dlse"])

    def watch(self, observer: Observer, heads: tuple[slice, ...], group: int) -> None:
        """Pass every tile to ``observer``. Members of the query group are visited one at a time."""
        batch, kv_head = (x.start for x in heads)
        self._observer, self._place = observer, (batch, kv_head * group)

    def observe(
        self, members: slice, i: int, j: int, P: Array, dS: Array, dQ: Array, dK: Array, dV: Array
    ) -> None:
        """Tile (i, j) is done: the gradients include it."""
        if self._observer is None:
            return
        lse, delta = (x[:, :, members, self.rows(i)].flatten() for x in (self.lse, self.delta))
        P, dS, dQ, dK, dV = (x.reshape(x.shape[-2:]).copy() for x in (P, dS, dQ, dK, dV))
        batch, head = self._place
        self._observer(
            GradientStep(batch, head + members.start, i, j, lse, delta, P, self._dP, dS, dQ, dK, dV)
        )

    def _row_numbers(self, out: Array, lse: Array, dlse: Array | None) -> tuple[Array, Array]:
        """LSE and rowsum(dO ∘ O) - dLSE, (..., rows, 1) (l. 4). LSE is inf for rows that see no key: weights are 0."""
        delta = np.empty((*lse.shape, 1), self.dtype)
        for i in range(self.schedule.num_q_blocks):
            rows = self.rows(i)
            delta[..., rows, :] = row_sums(
                np.multiply(self.dO[..., rows, :], out[..., rows, :], dtype=self.dtype)
            )
        if dlse is not None:
            delta[..., 0] -= dlse
        nothing = np.isneginf(lse)[..., None]
        delta[nothing] = 0
        return np.where(nothing, self.dtype(np.inf), lse[..., None].astype(self.dtype)), delta

    def visited_queries(self, j: int) -> Iterator[tuple[slice, int]]:
        """Members of the group and query tile, for each tile that key block j visits."""
        return itertools.product(self._members, self.visits(j))

    def load_keys(self, j: int) -> tuple[Array, Array]:
        """scale · K_j, V_j."""
        columns = self.columns(j)
        K: Array = np.multiply(self._k[..., columns, :], self.scale, dtype=self.dtype)
        return K, operand(self._v[..., columns, :], self.dtype)

    def weights(
        self, Q: Array, K: Array, lse: Array, hidden: Bools | None, penalty: Array | None,
        change: Callable[[Array], list[Any]] | None = None,
    ) -> tuple[Array, Array | None, list[Any]]:  # fmt: skip
        """P, with a soft cap the slope of the capped scores, and what ``change``, the score function, returns. P is
        scratch: valid until the next call. ``penalty`` is ALiBi's."""
        slope = None
        S: Array = np.matmul(Q, K.mT, out=self._tile(self._P, Q, K))
        score_slopes = [] if change is None else change(S)
        if self.softcap is not None:
            softcapped_in_place(S, self.softcap)
            slope = softcap_derivative(S, self.softcap)
        if penalty is not None:
            S -= penalty
        S -= lse
        P: Array = np.exp(S, out=S)
        if hidden is not None:
            hide(P, hidden, 0)
        return P, slope, score_slopes

    def product(self, dO: Array, V: Array) -> Array:
        """dO Vᵀ. Scratch, like the other products: valid until the next call."""
        dP: Array = np.matmul(dO, V.mT, out=self._tile(self._dS, dO, V))
        if self._observer is not None:
            self._dP = dP.reshape(dP.shape[-2:]).copy()  # dS overwrites it
        return dP

    def row_product(self, dS: Array, K: Array, unseen: Bools | None) -> Array:
        """dS K."""
        return product_of_seen(dS, K, unseen, self._product_of(dS, K))

    def column_product(self, PT: Array, dO: Array, unseen: Bools | None) -> Array:
        """Pᵀ dO, summed over the members of the group."""
        member_products = product_of_seen(PT, dO, unseen, self._product_of(PT, dO))
        summed: Array = member_products.sum(axis=2, keepdims=True) if PT.shape[2] > 1 else member_products
        return summed

    def _product_of(self, rows: Array, columns: Array) -> Array:
        """Scratch for a product of a tile with queries, keys or dO."""
        return self._product[:, :, : rows.shape[2], : rows.shape[-2], : columns.shape[-1]]

    @staticmethod
    def _tile(scratch: Array, rows: Array, columns: Array) -> Array:
        return scratch[:, :, : rows.shape[2], : rows.shape[-2], : columns.shape[-2]]

    def store(self, j: int, dK: Array, dV: Array) -> None:
        self._dk[..., self.columns(j), :], self._dv[..., self.columns(j), :] = dK, dV
