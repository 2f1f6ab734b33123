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
from typing import Any

import numpy as np

from ...kernels import TileConfig
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
    """Packed query rows of each of them: query head within the group times tokens, plus token."""
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
    """Normalised O (heads, rows, head_dim) and lse (heads, rows) over the keys of one split. With a fixed maximum, rows
    whose sums leave the safe range are computed again, each with its own maximum."""
    if plan.problem.softmax_max == "":
        O, m, l = _pass(plan, operands, lengths, observer, work, None)
        return normalise(O, l), (m + np.log(l))[..., 0]
    low, high = (2.0**x for x in safe_sums(_half_weights(plan)))
    with np.errstate(all="ignore"):
        fixed = _fixed_maxima(plan, operands, lengths, work)
        O, m, l = _pass(plan, operands, lengths, observer, work, fixed)
        wrong = ~((l >= low) & (l <= high))  # NaN too: the row has no fixed maximum, or saw one
    if wrong.any():
        found = _pass(plan, operands, lengths, None, work, None)
        O, m, l = (np.where(wrong, own, x) for own, x in zip(found, (O, m, l), strict=True))
    return normalise(O, l), (m + np.log(l))[..., 0]


def _half_weights(plan: Plan) -> bool:
    """Whether a GPU would round weights to float16."""
    return "float16" in (plan.problem.dtype, *["float16"] * (plan.problem.k_element.name == "float8_e4m3"))


def _fixed_maxima(plan: Plan, operands: Arrays, lengths: Sequence[int], work: Work) -> Array:
    """The subtracted maximum of each row, (heads, rows, 1); NaN where the bound of its scores is too large."""
    problem, dtype = plan.problem, compute_dtype(plan.problem)
    shape = work.heads.stop - work.heads.start, work.rows.stop - work.rows.start
    bound = np.zeros(shape, dtype)
    if problem.softmax_max == "bound" and problem.softcap is not None:
        bound += dtype(problem.softcap)
    elif problem.softmax_max == "bound":
        q = operands["q"][work.batch].reshape(problem.kv_heads, problem.rows, -1)[work.heads, work.rows]
        norms = np.sqrt(np.square(q.astype(dtype)).sum(axis=2))
        bound += norms * operands["key_norms"][work.batch, work.heads, None] * dtype(problem.scale)
    if problem.alibi:
        slopes = operands["alibi_slopes"]
        of_batch = slopes if slopes.ndim == 1 else slopes[work.batch]
        bound += np.abs(_of_rows(plan, of_batch, work)) * lengths[work.batch]
    below, most = (x * math.log(2) for x in bound_limits(_half_weights(plan)))
    m = bound - below
    if problem.softmax_max == "heads":
        m = _of_rows(plan, operands["softmax_max"], work)
    elif problem.softmax_max != "bound":
        m = np.full(shape, problem.softmax_max)
    return np.where(bound <= most, m, np.nan).astype(dtype)[..., None]


def _pass(
    plan: Plan, operands: Arrays, lengths: Sequence[int], observer: Observer | None, work: Work, fixed: Array | None
) -> tuple[Array, Array, Array]:  # fmt: skip
    """O, not yet divided by l, and m and l of each row; ``fixed`` in place of the maxima."""
    problem = plan.problem
    dtype = compute_dtype(problem)
    Q = _queries(plan, operands, work, dtype)
    K, V = (
        CacheTiles(operands[cache], operands["block_table"], work.batch, work.heads, dtype)
        for cache in ("k_cache", "v_cache")
    )
    k_scale, v_scale = (KeyScales(operands, x, work.batch, work.heads) for x in ("k_scale", "v_scale"))
    O = np.zeros((*Q.shape[:2], problem.v_dim), dtype)
    l = np.zeros((*Q.shape[:2], 1), dtype)
    m = np.full(l.shape, -np.inf, dtype)
    for start in range(work.first_key, work.last_key, plan.config.block_kv):
        stop = min(start + plan.config.block_kv, work.last_key)
        S = Q @ K.load(start, stop).mT
        if problem.scales:
            S *= k_scale.load(start, stop)[:, None]
        if problem.score is not None:
            S = _changed(plan, operands, work, start, stop, lengths[work.batch], S)
        if problem.softcap is not None:
            S = softcapped(S, problem.softcap)
        if problem.alibi:
            S = S - _penalty(plan, operands, work, start, stop, lengths[work.batch]).astype(dtype)
        hidden = _hidden(plan, operands, work, start, stop, lengths[work.batch])
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
            _tell(observer, work, plan.config, start, before, (P, m, l, alpha, O))
    if operands["v_scale"] is not None and not problem.scales:
        O *= operands["v_scale"][work.heads, None, None].astype(dtype)
    return O, m, l


def _tell(
    observer: Observer,
    work: Work,
    config: TileConfig,
    start: int,
    before: tuple[Array, Array, Array],
    after: tuple[Array, Array, Array, Array, Array],
) -> None:
    """Calls the observer for each head of a tile: S, m and l before it; P, m, l, alpha and O after it."""
    place = work.rows.start // config.block_q, start // config.block_kv
    for n, head in enumerate(range(work.heads.start, work.heads.stop)):
        S, m, l = (x[n].copy() for x in before)
        P, m_new, l_new, alpha, O = (x[n].copy() for x in after)
        m, l, m_new, l_new, alpha = (x[:, 0] for x in (m, l, m_new, l_new, alpha))
        observer(TileStep(work.batch, head, *place, S, P, m, l, m_new, l_new, alpha, O))


def _queries(plan: Plan, operands: Arrays, work: Work, dtype: type[Any]) -> Array:
    """scale · k_scale · Q, (heads, rows, head_dim): scaling Q costs less than scaling S."""
    problem = plan.problem
    grouped = operands["q"][work.batch].reshape(problem.kv_heads, problem.rows, problem.head_dim)
    Q: Array = np.multiply(grouped[work.heads, work.rows], dtype(problem.scale), dtype=dtype)
    if operands["k_scale"] is not None and not problem.scales:
        Q *= operands["k_scale"][work.heads, None, None].astype(dtype)
    return Q


def _hidden(plan: Plan, operands: Arrays, work: Work, start: int, stop: int, length: int) -> Bools | None:
    """Which of the keys ``start`` … ``stop`` - 1 each row does not see; None if all rows see all of them."""
    mask, tokens = plan.problem.mask.at(work.batch, 0), plan.problem.seqlen_q
    if isinstance(mask, Band) and not (plan.problem.tree and stop > length - tokens):
        first, last = mask.edges(tokens, length)
        if (last is None or stop - 1 <= last) and (first is None or tokens - 1 + first <= start):
            return None
    hidden = ~mask.visible(_token(plan, work), np.arange(start, stop), tokens, length)
    if plan.problem.tree and stop > length - tokens:
        old = max(length - tokens, start)
        of_tree = ~ancestors(operands["tree"][work.batch : work.batch + 1])[0][_token(plan, work)]
        hidden[:, old - start :] |= of_tree[:, old - (length - tokens) : stop - (length - tokens)]
    return hidden


def _penalty(plan: Plan, operands: Arrays, work: Work, start: int, stop: int, length: int) -> Array:
    """ALiBi's penalty, (heads, rows, keys)."""
    problem, slopes = plan.problem, operands["alibi_slopes"]
    of_batch = slopes if slopes.ndim == 1 else slopes[work.batch]
    shift = problem.mask.shift(problem.seqlen_q, length)
    distance = distances(_token(plan, work), np.arange(start, stop), shift, of_batch.dtype)
    found: Array = _of_rows(plan, of_batch, work)[..., None] * distance
    return found


def _changed(plan: Plan, operands: Arrays, work: Work, start: int, stop: int, length: int, S: Array) -> Array:
    """Scores, (heads, rows, keys), after the score function."""
    problem = plan.problem
    assert problem.score is not None
    heads = _of_rows(plan, np.arange(problem.heads), work)[..., None]
    inputs = {
        "s": S, "b": work.batch, "h": heads, "i": _token(plan, work)[:, None], "j": np.arange(start, stop),
        "delta": length - problem.seqlen_q,
    }  # fmt: skip
    arrays = [operands[x.name] for x in SCORE_ARRAYS[: len(problem.score.shapes)]]
    found: Array = changed(problem.score, inputs, arrays, S.dtype.type)[0]
    return found


def _of_rows(plan: Plan, of_heads: Array, work: Work) -> Array:
    """One number per query head, expanded to (heads, rows)."""
    problem = plan.problem
    member = np.arange(work.rows.start, work.rows.stop) // problem.seqlen_q
    found: Array = of_heads.reshape(problem.kv_heads, problem.group_size)[work.heads][:, member]
    return found


def _token(plan: Plan, work: Work) -> Array:
    """The query token of each row."""
    return np.arange(work.rows.start, work.rows.stop) % plan.problem.seqlen_q


# --- The merge -------------------------------------------------------------------------------------------


def _merged(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return combine(np.stack([O for O, _ in parts]), np.stack([lse for _, lse in parts]))


def _store(plan: Plan, operands: Arrays, work: Work, O: Array, lse: Array) -> None:
    """Unpacks rows into query heads and tokens. The sink joins once, after the merge."""
    problem = plan.problem
    if problem.sink:
        O, lse = _with_sink(O, lse, _of_rows(plan, operands["sink"], work))
    row = np.arange(work.rows.start, work.rows.stop)
    kv_head = np.arange(work.heads.start, work.heads.stop)
    head = kv_head[:, None] * problem.group_size + row // problem.seqlen_q
    with np.errstate(over="ignore"):
        operands["out"][work.batch, head, row % problem.seqlen_q] = O.astype(operands["out"].dtype)
    if operands["lse"] is not None:
        operands["lse"][work.batch, head, row % problem.seqlen_q] = lse


def _with_sink(O: Array, lse: Array, sink: Array) -> tuple[Array, Array]:
    """Merges the sink as a partial result whose O is 0."""
    with np.errstate(all="ignore"):
        m, l = with_sink(lse, np.ones_like(lse), sink)
        shift = np.where(np.isneginf(m), 0, m)
        # l is 0 where no key is seen and there is no sink.
        weight = np.exp(lse - shift) / np.where(l == 0, 1, l)
        return O * weight[..., None], m + np.log(l)
