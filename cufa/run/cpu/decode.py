"""Decoding in NumPy: the splits of :mod:`cufa.schedule.decode`, tile by tile, then their merge.

A split is computed for a stack of key/value heads: Q is (heads, rows, head_dim) with all query heads and tokens of a
key/value head in its rows, so that a tile of keys and values is read and widened once. Only the current tile is copied.
Stacks and splits run in parallel on threads; a result has the same operations in the same order for any number of
threads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...kernels.decode import row_blocks
from ...plan.decode import ragged_shares
from ...plan.operation import SCORE_ARRAYS, Arrays
from ...plan.planner import Plan
from ...problem.mask import Band
from ...problem.score_change import changed
from ...problem.scores import bound_limits, distances, safe_sums, softcapped, with_sink
from ...problem.tree import ancestors
from ...schedule.decode import balanced_shares, chunk_ranges, split_range, used_splits
from .blas import single_threaded_blas
from .cache import CacheTiles, KeyScales
from .cache import append as append
from .combine import combine
from .forward import normalise, online_softmax
from .tiles import (
    MIN_STACKS,
    Array,
    Bools,
    Observer,
    TileStep,
    compute_dtype,
    cut,
    in_threads,
    product_of_seen,
    row_sums,
)

_STACK_ELEMENTS = 1 << 18
"""Elements of a stack's tile of keys; with its values 2 MiB in float32."""
_SERIAL_ELEMENTS = 1 << 20
"""Fewer keys and values are not worth starting threads."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One split of one stack: keys first_key … last_key - 1 of a sequence, for some heads and query rows."""

    batch: int
    heads: slice
    """Key/value heads."""
    rows: slice
    """Packed query rows of each key/value head: query head within the group times tokens, plus token."""
    first_key: int
    last_key: int

    @property
    def item(self) -> tuple[int, int, int]:
        """The work item; splits of one work item are merged."""
        return self.batch, self.heads.start, self.rows.start


def run(
    plan: Plan, operands: Arrays, *, observer: Observer | None = None, num_threads: int | None = None
) -> None:
    """Execute a plan made for the CPU: append new tokens to the caches, write ``operands["out"]`` and ``lse``.

    :mod:`cufa.calls.decode_checks` has checked lengths and block table. ``observer`` is called for every tile, from one
    thread. The default of ``num_threads`` is the number that NumPy's BLAS would use.
    """
    problem = plan.problem
    if problem.cache.new_tokens:
        append(operands)
    lengths = valid_keys(plan, operands)
    work = list(works(plan, lengths))
    with single_threaded_blas() as available:
        keys = problem.kv_heads * problem.head_dim * sum(min(n, problem.visible_capacity) for n in lengths)
        workers = num_threads or (available if keys > _SERIAL_ELEMENTS else 1)
        attend = functools.partial(_attend, plan, operands, lengths, observer)
        parts = list(in_threads(attend, work, workers if observer is None else 1))
    of_item: dict[tuple[int, int, int], list[int]] = {}
    for n, w in enumerate(work):
        of_item.setdefault(w.item, []).append(n)
    for members in of_item.values():
        _store(plan, operands, work[members[0]], *_merged([parts[n] for n in members]))


def valid_keys(plan: Plan, operands: Arrays) -> list[int]:
    """Keys of each sequence, including appended keys."""
    problem = plan.problem
    if operands["cache_seqlens"] is None:
        return [problem.seqlen_k] * problem.batch
    return [problem.valid_keys(n) for n in operands["cache_seqlens"].tolist()]


# --- Tasks of threads ------------------------------------------------------------------------------------


def works(plan: Plan, lengths: Sequence[int]) -> Iterator[Work]:
    """The plan's splits. Heads with the same keys to read are stacked, which changes no result."""
    assert plan.split is not None
    return (_fixed if plan.split.kind == "fixed" else _balanced)(plan, lengths)


def _fixed(plan: Plan, lengths: Sequence[int]) -> Iterator[Work]:
    problem, block_kv = plan.problem, plan.config.block_kv
    splits, reach = plan.num_splits, problem.reach
    stack = _heads_of_stack(plan, sum(used_splits(n, splits, block_kv, reach) for n in lengths))
    every_row = slice(0, problem.rows)
    for (b, n), heads in itertools.product(enumerate(lengths), cut(problem.kv_heads, stack)):
        used = range(used_splits(n, splits, block_kv, reach))
        ranges = [split_range(n, splits, split, block_kv, reach) for split in used]
        for first, last in chunk_ranges(n, block_kv, reach) if problem.invariant else ranges:
            yield Work(b, heads, every_row, first, last)


def _balanced(plan: Plan, lengths: Sequence[int]) -> Iterator[Work]:
    problem, config = plan.problem, plan.config
    stack = _heads_of_stack(plan, len(lengths))
    whole: Work | None = None  # adjacent heads that are not cut, collected into one stack
    assert plan.split is not None
    for span in balanced_shares(
        lengths, problem.kv_heads, plan.split.count, config.block_kv, row_blocks(problem, config),
        ragged=ragged_shares(plan), min_shares=plan.split.least, reach=problem.reach,
    ):  # fmt: skip
        first_row = span.row_block * config.block_q
        rows = slice(first_row, min(first_row + config.block_q, problem.rows))
        h = span.kv_head
        work = Work(span.batch, slice(h, h + 1), rows, span.first_key, span.last_key)
        if whole is not None:
            same = dataclasses.replace(work, heads=whole.heads) == whole
            if span.whole and same and h == whole.heads.stop and h - whole.heads.start < stack:
                whole = dataclasses.replace(whole, heads=slice(whole.heads.start, h + 1))
                continue
            yield whole
            whole = None
        if span.whole:
            whole = work
        else:
            yield work
    if whole is not None:
        yield whole


def _heads_of_stack(plan: Plan, runs_of_keys: int) -> int:
    problem = plan.problem
    room = _STACK_ELEMENTS // (plan.config.block_kv * problem.head_dim)
    return max(1, min(room, runs_of_keys * problem.kv_heads // MIN_STACKS, problem.kv_heads))


# --- One split -------------------------------------------------------------------------------------------


def _attend(
    plan: Plan, operands: Arrays, lengths: Sequence[int], observer: Observer | None, work: Work
) -> tuple[Array, Array]:
    return _Split(plan, operands, lengths[work.batch], work).attend(observer)


class _Split:
    """Attention to the keys of one split. Arrays of scores are (heads, rows, keys)."""

    def __init__(self, plan: Plan, operands: Arrays, length: int, work: Work) -> None:
        self.plan, self.problem, self.operands, self.length, self.work = (
            plan, plan.problem, operands, length, work,
        )  # fmt: skip
        self.dtype = compute_dtype(plan.problem)
        _, self.token = _members_and_tokens(plan, work)
        self.slopes: Array | None = None
        """ALiBi slopes, (heads, rows)."""
        if plan.problem.alibi:
            slopes = operands["alibi_slopes"]
            self.slopes = _row_values(plan, slopes if slopes.ndim == 1 else slopes[work.batch], work)

    def attend(self, observer: Observer | None) -> tuple[Array, Array]:
        """Normalised O (heads, rows, head_dim) and lse (heads, rows). With a fixed maximum, rows whose sums leave the
        safe range are computed again, each with its own maximum."""
        if self.problem.softmax_max == "":
            O, m, l = self.sums(observer, None)
            return normalise(O, l), (m + np.log(l))[..., 0]
        low, high = (2.0**x for x in safe_sums(self._half_weights))
        with np.errstate(all="ignore"):
            O, m, l = self.sums(observer, self._fixed_maxima())
            wrong = ~((l >= low) & (l <= high))  # NaN too: the row has no fixed maximum, or read a NaN
        if wrong.any():
            found = self.sums(None, None)
            O, m, l = (np.where(wrong, own, x) for own, x in zip(found, (O, m, l), strict=True))
        return normalise(O, l), (m + np.log(l))[..., 0]

    @property
    def _half_weights(self) -> bool:
        """Whether a GPU would round weights to float16."""
        return self.problem.dtype == "float16" or self.problem.k_element.name == "float8_e4m3"

    def _fixed_maxima(self) -> Array:
        """The subtracted maximum of each row, (heads, rows, 1); NaN where the bound of its scores is too large."""
        problem, dtype, work = self.problem, self.dtype, self.work
        bound = np.zeros((work.heads.stop - work.heads.start, len(self.token)), dtype)
        if problem.softmax_max == "bound" and problem.softcap is not None:
            bound += dtype(problem.softcap)
        elif problem.softmax_max == "bound":
            norms = np.sqrt(np.square(self._queries.astype(dtype)).sum(axis=2))
            bound += norms * self.operands["key_norms"][work.batch, work.heads, None] * dtype(problem.scale)
        if self.slopes is not None:
            bound += np.abs(self.slopes) * self.length
        below, most = (x * math.log(2) for x in bound_limits(self._half_weights))
        m = bound - below
        if problem.softmax_max == "heads":
            m = _row_values(self.plan, self.operands["softmax_max"], work)
        elif problem.softmax_max != "bound":
            m = np.full(bound.shape, problem.softmax_max)
        return np.where(bound <= most, m, np.nan).astype(dtype)[..., None]

    def sums(self, observer: Observer | None, fixed: Array | None) -> tuple[Array, Array, Array]:
        """O, not yet divided by l, and m and l of each row. ``fixed`` replaces the running maxima."""
        problem, operands, work, dtype = self.problem, self.operands, self.work, self.dtype
        Q = self._scaled_queries()
        K, V = (
            CacheTiles(operands[cache], operands["block_table"], work.batch, work.heads, dtype)
            for cache in ("k_cache", "v_cache")
        )
        k_scale, v_scale = (KeyScales(operands, x, work.batch, work.heads) for x in ("k_scale", "v_scale"))
        O = np.zeros((*Q.shape[:2], problem.v_dim), dtype)
        l = np.zeros((*Q.shape[:2], 1), dtype)
        m = np.full(l.shape, -np.inf, dtype)
        for start in range(work.first_key, work.last_key, self.plan.config.block_kv):
            stop = min(start + self.plan.config.block_kv, work.last_key)
            S = Q @ K.load(start, stop).mT
            if problem.scales:
                S *= k_scale.load(start, stop)[:, None]
            S = self._changed(S, np.arange(start, stop))
            hidden = self._hidden(start, stop)
            if hidden is not None:
                np.copyto(S, -np.inf, where=hidden)
            before = (S if observer is None else S.copy()), m, l  # P takes the place of S
            if fixed is None:
                P, m, l, alpha = online_softmax(S, m, l)
                O *= alpha
            else:
                P = np.exp(np.subtract(S, fixed, out=S), out=S)
                m, l, alpha = fixed, l + row_sums(P), np.ones_like(l)
            if problem.scales:
                P = P * v_scale.load(start, stop)[:, None]
            tile = V.load(start, stop)
            unseen = None if hidden is None or np.isfinite(tile).all() else hidden
            O += product_of_seen(P, tile, unseen, np.empty_like(O))
            if observer is not None:
                self._show(observer, start, before, (P, m, l, alpha, O))
        if operands["v_scale"] is not None and not problem.scales:
            O *= operands["v_scale"][work.heads, None, None].astype(dtype)
        return O, m, l

    def _show(self, observer: Observer, start: int, before: Sequence[Array], after: Sequence[Array]) -> None:
        """Calls the observer for each head of a tile: S, m and l before it; P, m, l, alpha and O after it."""
        work, config = self.work, self.plan.config
        place = work.rows.start // config.block_q, start // config.block_kv
        for n, head in enumerate(range(work.heads.start, work.heads.stop)):
            S, m, l = (x[n].copy() for x in before)
            P, m_new, l_new, alpha, O = (x[n].copy() for x in after)
            m, l, m_new, l_new, alpha = (x[:, 0] for x in (m, l, m_new, l_new, alpha))
            observer(TileStep(work.batch, head, *place, S, P, m, l, m_new, l_new, alpha, O))

    @property
    def _queries(self) -> Array:
        """(heads, rows, head_dim)"""
        problem = self.problem
        grouped = self.operands["q"][self.work.batch].reshape(
            problem.kv_heads, problem.rows, problem.head_dim
        )
        found: Array = grouped[self.work.heads, self.work.rows]
        return found

    def _scaled_queries(self) -> Array:
        """scale · k_scale · Q: scaling Q costs less than scaling S."""
        Q: Array = np.multiply(self._queries, self.dtype(self.problem.scale), dtype=self.dtype)
        k_scale = self.operands["k_scale"]
        if k_scale is not None and not self.problem.scales:
            Q *= k_scale[self.work.heads, None, None].astype(self.dtype)
        return Q

    def _changed(self, S: Array, key: Array) -> Array:
        """Scores after score function, soft cap and ALiBi."""
        problem, work = self.problem, self.work
        if problem.score is not None:
            heads = _row_values(self.plan, np.arange(problem.heads), work)[..., None]
            inputs = {
                "s": S, "b": work.batch, "h": heads, "i": self.token[:, None], "j": key,
                "delta": self.length - problem.seqlen_q,
            }  # fmt: skip
            arrays = [self.operands[x.name] for x in SCORE_ARRAYS[: len(problem.score.shapes)]]
            S = changed(problem.score, inputs, arrays, S.dtype.type)[0]
        if problem.softcap is not None:
            S = softcapped(S, problem.softcap)
        if self.slopes is not None:
            shift = problem.mask.shift(problem.seqlen_q, self.length)
            penalty = self.slopes[..., None] * distances(self.token, key, shift, self.slopes.dtype)
            S = S - penalty.astype(self.dtype)
        return S

    def _hidden(self, start: int, stop: int) -> Bools | None:
        """Whether each of the keys ``start`` … ``stop`` - 1 is hidden from each row; None if no key is hidden."""
        batch, tokens, length = self.work.batch, self.problem.seqlen_q, self.length
        mask, first_token = self.problem.mask.at(batch, 0), length - tokens
        in_tree = self.problem.tree and stop > first_token
        if isinstance(mask, Band) and not in_tree:
            first, last = mask.edges(tokens, length)
            if (last is None or stop - 1 <= last) and (first is None or tokens - 1 + first <= start):
                return None
        hidden = ~mask.visible(self.token, np.arange(start, stop), tokens, length)
        if in_tree:
            old = max(first_token, start)
            not_ancestors = ~ancestors(self.operands["tree"][batch : batch + 1])[0][self.token]
            hidden[:, old - start :] |= not_ancestors[:, old - first_token : stop - first_token]
        return hidden


def _members_and_tokens(plan: Plan, work: Work) -> tuple[Array, Array]:
    """Query head within the group, and query token, of each row."""
    member, token = np.divmod(np.arange(work.rows.start, work.rows.stop), plan.problem.seqlen_q)
    return member, token


def _row_values(plan: Plan, head_values: Array, work: Work) -> Array:
    """One number per query head, expanded to (heads, rows)."""
    problem, (member, _) = plan.problem, _members_and_tokens(plan, work)
    found: Array = head_values.reshape(problem.kv_heads, problem.group_size)[work.heads][:, member]
    return found


# --- The merge -------------------------------------------------------------------------------------------


def _merged(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return combine(np.stack([O for O, _ in parts]), np.stack([lse for _, lse in parts]))


def _store(plan: Plan, operands: Arrays, work: Work, O: Array, lse: Array) -> None:
    """Unpacks rows into query heads and tokens. The sink joins once, after the merge."""
    problem = plan.problem
    if problem.sink:
        O, lse = _with_sink(O, lse, _row_values(plan, operands["sink"], work))
    member, token = _members_and_tokens(plan, work)
    head = np.arange(work.heads.start, work.heads.stop)[:, None] * problem.group_size + member
    with np.errstate(over="ignore"):
        operands["out"][work.batch, head, token] = O.astype(operands["out"].dtype)
    if operands["lse"] is not None:
        operands["lse"][work.batch, head, token] = lse


def _with_sink(O: Array, lse: Array, sink: Array) -> tuple[Array, Array]:
    """Merge the sink, as a partial result whose O is 0."""
    with np.errstate(all="ignore"):
        m, l = with_sink(lse, np.ones_like(lse), sink)
        shift = np.where(np.isneginf(m), 0, m)
        # l is 0 where no key is seen and there is no sink.
        weight = np.exp(lse - shift) / np.where(l == 0, 1, l)
        return O * weight[..., None], m + np.log(l)
