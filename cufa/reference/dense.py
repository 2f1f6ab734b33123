"""The definition of attention: float64, whole rows of scores, no tiles. Every kernel is tested against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calls.shapes import check_mask, check_rows
from ..problem.checks import check_not_masked
from ..problem.dropout import Dropout, dropout_of, resolve_dropout
from ..problem.evaluation import Clamping
from ..problem.mask import Mask
from ..problem.options import check_scale, check_softcap, resolve_mask
from ..problem.score_change import add_gradients, changed, product
from ..problem.score_function import Score, check_gradients, resolve_score
from ..problem.scores import bounded, distances, softcap_derivative, softcapped
from ..problem.typing import AnyMask
from ..problem.where import Where

Array = npt.NDArray[np.float64]

#: Query rows worked on at once: limits memory to 512 · seqlen_k scores.
_ROWS = 512


@np.errstate(all="ignore")
def attention_reference(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: npt.ArrayLike | None = None,
    sink: npt.ArrayLike | None = None, seqlens_q: npt.ArrayLike | None = None,
    seqlens_k: npt.ArrayLike | None = None, score: Score | None = None, bias: npt.ArrayLike | None = None,
    dropout: float | Dropout | None = None, seed: Any = None, return_lse: bool = False, layout: str = "bhsd",
) -> Array | tuple[Array, Array]:  # fmt: skip
    """``softmax(scale · q kᵀ) v`` in float64, one head at a time.

    q has shape (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim), where v's head_dim
    may differ. With ``layout="bshd"`` the two middle axes are swapped. Any dtype that converts to float64 is possible.
    Query head ``h`` reads key/value head ``h // (heads // kv_heads)``. ``scale`` defaults to 1/√head_dim of q.

    ``causal``, ``window`` and ``mask`` say which keys a query sees, as for :func:`cufa.flash_attention`;
    ``softcap`` replaces a scaled score s by ``softcap · tanh(s / softcap)``; ``alibi_slopes``, ``sink``,
    ``seqlens_q``, ``seqlens_k``, ``score``, ``bias``, ``dropout`` and ``seed`` are as for
    :func:`cufa.flash_attention`: a score function is called as it is, with float64 scores. A row ignores keys that it
    does not see, whatever their values. A row that sees no key, or only scores of -inf, gives zeros and lse -inf; a
    score of +inf or NaN gives a row of NaN. (Kernels multiply whole tiles: their hidden keys and values must be finite,
    except in the padding after a sequence.)

    Returns o in float64, with q's layout and shape but v's head_dim. ``return_lse`` adds the natural logarithm of each
    row's sum of exponentials, float64 (batch, heads, seqlen_q).

    Raises ValueError for an unknown layout or shapes that do not fit together, TypeError for NumPy's masked arrays.
    """
    q, k, v = (as_bhsd(name, x, layout) for name, x in (("q", q), ("k", k), ("v", v)))
    parts = _parts(
        q, k, v, resolve_mask(causal, window, mask), alibi_slopes, sink, seqlens_q, seqlens_k,
        resolve_score(score, bias), _random(dropout, seed, q.shape[1]), {},
    )  # fmt: skip
    scores: tuple[Any, ...] = check_scale(scale, q.shape[-1]), check_softcap(softcap)
    o, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for rows, keys, *changes in parts:
        o[rows], lse[rows] = _attend(q[rows], k[keys], v[keys], *changes, *scores)
    if layout == "bshd":
        o = o.swapaxes(1, 2)
    return (o, lse) if return_lse else o


@np.errstate(all="ignore")
def attention_reference_backward(
    dout: npt.ArrayLike, q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: npt.ArrayLike | None = None,
    sink: npt.ArrayLike | None = None, seqlens_q: npt.ArrayLike | None = None,
    seqlens_k: npt.ArrayLike | None = None, score: Score | None = None, bias: npt.ArrayLike | None = None,
    gradients: tuple[str, ...] = (), dropout: float | Dropout | None = None, seed: Any = None,
    dlse: npt.ArrayLike | None = None, layout: str = "bhsd",
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of a loss with respect to q, k and v in float64. ``dout`` is the gradient with respect to o; ``dlse``,
    (batch, heads, seqlen_q), is the gradient with respect to the log-sum-exp, if the loss depends on it.

    The other arguments are those of :func:`attention_reference`, the differentiated function, whose results are
    recomputed. Query heads that share a key/value head add up in dk and dv. Queries that see no key, and keys that no
    query sees, have gradients of 0.

    Returns (dq, dk, dv) with the shapes of q, k and v. dsink (heads,) follows if there is a sink, then the gradients of
    the score function's arrays in ``gradients``.
    """
    dout, q, k, v = (as_bhsd(name, x, layout) for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v)))
    if dout.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(
            f"dout {dout.shape} must have the shape of q {q.shape} with v's head_dim {v.shape[3]}"
        )
    check_not_masked("dlse", dlse)
    dlse = np.zeros(q.shape[:3]) if dlse is None else _numbers("dlse", dlse)
    check_rows("dlse", dlse.shape, q.shape[:3], layout)
    score = resolve_score(score, bias)
    names = check_gradients(score, gradients)
    totals = {name: np.zeros(score.arrays[name].shape) for name in names if score is not None}
    parts = _parts(
        q, k, v, resolve_mask(causal, window, mask), alibi_slopes, sink, seqlens_q, seqlens_k, score,
        _random(dropout, seed, q.shape[1]), totals,
    )  # fmt: skip
    scores: tuple[Any, ...] = check_scale(scale, q.shape[-1]), check_softcap(softcap)
    dq, dk, dv, dsink = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(q.shape[1])
    for rows, keys, *changes in parts:
        row_arrays, kv_arrays = (dout[rows], dlse[rows], q[rows]), (k[keys], v[keys])
        found = _gradients(*row_arrays, *kv_arrays, *changes, *scores)
        dq[rows] = found[0]
        for total, place, part in zip((dk, dv, dsink), (keys, keys, rows[1]), found[1:], strict=True):
            total[place] += part
    if layout == "bshd":
        dq, dk, dv = (x.swapaxes(1, 2) for x in (dq, dk, dv))
    return (dq, dk, dv, *((dsink,) * (sink is not None)), *totals.values())


def _parts(
    q: Array, k: Array, v: Array, mask: Mask, alibi_slopes: npt.ArrayLike | None, sink: npt.ArrayLike | None,
    seqlens_q: npt.ArrayLike | None, seqlens_k: npt.ArrayLike | None, score: Score | None, random: Dropout | None,
    totals: Mapping[str, Array],
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """For rows of one query head at a time: index of the rows, index of their keys, which keys each row sees, ALiBi's
    penalty of each score, the head's sink, the score function for these rows, and dropout's factor of each weight.
    ``totals``: gradients of the score function's arrays, added to by each part."""
    (batch, heads, most_q, head_dim), (_, kv_heads, most_k, _) = q.shape, k.shape
    fits = k.shape[:3] == v.shape[:3] and k.shape[::3] == (batch, head_dim)
    if not fits or heads % max(kv_heads, 1):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} (as bhsd) do not fit together")
    if isinstance(mask, Where):
        mask = mask.bound(batch, heads, kv_heads, most_q, most_k)
    check_mask(mask, batch, kv_heads, most_q, most_k, heads)
    if score is not None:
        score.change().check_indexes(batch, heads, most_q, most_k)
    slopes = _per_head("alibi_slopes", alibi_slopes, 0.0, (batch, heads))
    logits = _per_head("sink", sink, -np.inf, (heads,))
    queries, keys = (
        _lengths("seqlens_q", seqlens_q, batch, most_q),
        _lengths("seqlens_k", seqlens_k, batch, most_k),
    )
    for b, h in np.ndindex(batch, heads):
        seqlen_q, seqlen_k = int(queries[b]), int(keys[b])
        shift, key = mask.shift(seqlen_q, seqlen_k), np.arange(seqlen_k)
        kv_index = b, h // (heads // kv_heads), slice(0, seqlen_k)
        for start in range(0, seqlen_q, _ROWS):
            row = np.arange(start, min(start + _ROWS, seqlen_q))
            seen = mask.visible(row, key, seqlen_q, seqlen_k, b, mask.head_of(h, heads))
            penalty = slopes[b, h] * distances(row, key, shift, np.float64) if slopes[b, h] else 0.0
            there = None
            if score is not None:
                place = {"b": b + score.sequence, "h": h, "i": row[:, None], "j": key[None], "delta": shift}
                there = _RowScore(score, place, totals)
            weight: Array | float = 1.0  # factor of weights under dropout
            if random is not None:
                kept = random.kept(b, h, range(start, start + len(row)), range(seqlen_k))
                weight = np.where(kept, random.factor, 0.0)
            rows = b, h, slice(start, start + len(row))
            yield rows, kv_index, seen, penalty, float(logits[h]), there, weight


@dataclasses.dataclass(frozen=True)
class _RowScore:
    """A score function for some rows of a head."""

    score: Score
    there: dict[str, Any]
    """b, h, i, j and delta."""
    totals: Mapping[str, Array]

    def new(self, s: Array) -> Array:
        """The new scores, by the function itself: its integers and floats have 64 bits."""
        arrays = {
            name: Clamping(x.astype(np.float64) if x.dtype.kind in "fV" else x)
            for name, x in self.score.arrays.items()
        }
        *place, shift = self.there.values()
        delta = {"delta": shift} if self.score.takes_delta else {}
        found = self.score.function(s, *place, **arrays, **delta)
        return np.broadcast_to(found, s.shape).astype(np.float64)

    def go_back(self, s: Array, ds: Array) -> Array:
        """The gradient of the old scores s, from the gradient ``ds`` of the new scores."""
        change, arrays = self.score.change(tuple(self.totals)), [*self.score.arrays.values()]
        inputs = {"s": s, **self.there}
        _, slope, *load_slopes = changed(change, inputs, arrays, np.float64, derivatives=True)
        add_gradients(change, inputs, arrays, ds, load_slopes, self.totals)
        found: Array = product(ds, slope)
        return found


def _random(dropout: float | Dropout | None, seed: Any, heads: int) -> Dropout | None:
    return dropout if isinstance(dropout, Dropout) else dropout_of(*resolve_dropout(dropout, seed), heads)


def _numbers(name: str, given: npt.ArrayLike) -> Array:
    """A copy in float64. Raises TypeError naming the argument."""
    try:
        return np.asarray(given).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is no array of numbers: {error}") from error


def _per_head(name: str, given: npt.ArrayLike | None, default: float, shape: tuple[int, ...]) -> Array:
    found = _numbers(name, default if given is None else given)
    if given is not None and found.shape not in (shape, shape[-1:]):
        raise ValueError(
            f"{name} has shape {found.shape}: it takes {shape[-1:]}{f' or {shape}' * (len(shape) > 1)}"
        )
    return np.broadcast_to(bounded(found), shape)


def _lengths(name: str, given: npt.ArrayLike | None, batch: int, most: int) -> npt.NDArray[Any]:
    found = _numbers(name, [most] * batch if given is None else given)
    if found.shape != (batch,) or ((found < 0) | (found > most) | (found % 1 != 0)).any():
        raise ValueError(f"{name} must be {batch} integers from 0 to {most}, not {given!r}")
    return found


# --- The semantics: rows of one head, q (rows, d), k and v (keys, d), seen (rows, keys) ----------------------


def _attend(
    q: Array, k: Array, v: Array, seen: npt.NDArray[np.bool_], penalty: Array | float, sink: float,
    score: _RowScore | None, kept: Array | float, scale: float, cap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    s = scale * (q @ k.T)
    s = s if score is None else score.new(s)
    s = np.where(seen, (s if cap is None else softcapped(s, cap)) - penalty, -np.inf)
    m = s.max(axis=1, keepdims=True, initial=sink)
    shift = np.where(m == -np.inf, 0, m)
    p = np.exp(s - shift)
    l = p.sum(axis=1, keepdims=True) + np.exp(sink - shift)
    o = np.where(l == 0, 0, _product(p * kept, v, seen) / l)
    return o, (m + np.log(l))[:, 0]


def _gradients(
    do: Array, dlse: Array, q: Array, k: Array, v: Array, seen: npt.NDArray[np.bool_],
    penalty: Array | float, sink: float, score: _RowScore | None, kept: Array | float, scale: float,
    cap: float | None,
) -> tuple[Array, Array, Array, float]:  # fmt: skip
    """(dq, dk, dv, dsink) from dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O) + dLSE), P = exp(S - LSE). The sink is a score whose
    value is 0."""
    o, lse = _attend(q, k, v, seen, penalty, sink, score, kept, scale, cap)
    s = scale * (q @ k.T)
    new = s if score is None else score.new(s)
    capped = new if cap is None else softcapped(new, cap)
    slope = 1 if cap is None else softcap_derivative(capped, cap)
    some = lse != -np.inf
    weighs = seen & some[:, None]
    p = np.where(weighs, np.exp(capped - penalty - lse[:, None]), 0)
    delta = (do * o).sum(axis=1) - dlse
    ds = np.where(weighs, p * (do @ v.T * kept - delta[:, None]) * slope, 0)
    ds = ds if score is None else score.go_back(s, ds)
    dsink = -np.where(some, np.exp(sink - lse) * delta, 0).sum()
    dq, dk = scale * _product(ds, k, seen), scale * _product(ds.T, q, seen.T)
    return dq, dk, _product((p * kept).T, do, seen.T), dsink


def _product(p: Array, v: Array, seen: npt.NDArray[np.bool_]) -> Array:
    """p v over the seen keys alone: 0 · inf is NaN if an unseen value is inf or NaN."""
    if np.isfinite(v).all() or not len(p):
        return p @ v
    return np.stack([p_row[seen_row] @ v[seen_row] for p_row, seen_row in zip(p, seen, strict=True)])


def as_bhsd(name: str, x: npt.ArrayLike, layout: str) -> Array:
    check_not_masked(name, x)
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout={layout!r} is not known; use 'bhsd' or 'bshd'")
    array = _numbers(name, x)
    if array.ndim != 4:
        raise ValueError(f"arrays of queries, keys and values have 4 axes, not {array.ndim}")
    return array.swapaxes(1, 2) if layout == "bshd" else array
