"""What attention means here: float64, whole rows of scores, no tiles. Every kernel is tested against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..core.mask import Mask
from ..core.problem import default_scale
from ..core.scores import check_softcap, softcap_derivative, softcapped
from .arrays import check_not_masked
from .mask_arguments import decode_mask, resolve_mask

Array = npt.NDArray[np.float64]

#: Query rows worked on at once: bounds memory at 512 · seqlen_k scores, and changes no result's meaning.
_ROWS = 512


def attention_reference(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Array | tuple[Array, Array]:
    """``softmax(scale · q kᵀ) v`` in float64, one head at a time.

    q has shape (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim), or with
    ``layout="bshd"`` the two middle axes swapped; any dtype that converts to float64. Query head ``h``
    reads key/value head ``h // (heads // kv_heads)``. ``scale`` defaults to 1/√head_dim.

    ``causal``, ``window`` and ``mask`` say which keys a query sees, as for :func:`cufa.flash_attention`;
    ``softcap`` replaces a scaled score s by ``softcap · tanh(s / softcap)``. A key
    that is not seen plays no part, whatever its value. A row that sees no key, or only scores of -inf,
    gives zeros and lse -inf; a score of +inf or NaN gives a row of NaN. (The kernels multiply whole tiles:
    there, what is not seen must be finite, unless it lies past a sequence's length.)

    Returns o in q's shape and layout, and with ``return_lse`` also the natural logarithm of each row's sum
    of exponentials, shape (batch, heads, seqlen_q). Both are float64.

    Raises ValueError for an unknown layout or shapes that do not fit together, TypeError for NumPy's masked arrays.
    """
    q, k, v = (_bhsd(name, x, layout) for name, x in (("q", q), ("k", k), ("v", v)))
    seen_by = resolve_mask(causal, window, mask)
    scores = default_scale(q.shape[-1]) if scale is None else scale, check_softcap(softcap)
    o = np.empty_like(q)
    lse = np.empty(q.shape[:3])
    for rows, keys, seen in _parts(q, k, v, seen_by):
        o[rows], lse[rows] = _attend(q[rows], k[keys], v[keys], seen, *scores)
    if layout == "bshd":
        o = o.swapaxes(1, 2)
    return (o, lse) if return_lse else o


def attention_reference_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dlse: npt.ArrayLike | None = None,
    layout: str = "bhsd",
) -> tuple[Array, Array, Array]:
    """Gradients of a loss with respect to q, k and v in float64, from that with respect to o, ``dout``, and
    if the loss depends on it to the log-sum-exp, ``dlse`` (batch, heads, seqlen_q).

    The other arguments are those of :func:`attention_reference`, which is what is differentiated; its results
    are computed anew. Query heads that share a key/value head add up in dk and dv. A query that sees no key
    has no gradient, and neither has a key that no query sees.

    Returns (dq, dk, dv), with the shapes of q, k and v.
    """
    dout, q, k, v = (_bhsd(name, x, layout) for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v)))
    if dout.shape != q.shape:
        raise ValueError(f"dout {dout.shape} and q {q.shape} (as bhsd) must have one shape")
    check_not_masked("dlse", dlse)
    dlse = np.zeros(q.shape[:3]) if dlse is None else np.asarray(dlse).astype(np.float64)
    seen_by = resolve_mask(causal, window, mask)
    scores = default_scale(q.shape[-1]) if scale is None else scale, check_softcap(softcap)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for rows, keys, seen in _parts(q, k, v, seen_by):
        of_rows, of_keys, of_values = _gradients(
            dout[rows], dlse[rows], q[rows], k[keys], v[keys], seen, *scores
        )
        dq[rows] = of_rows
        dk[keys] += of_keys
        dv[keys] += of_values
    if layout == "bshd":
        dq, dk, dv = (x.swapaxes(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def decode_reference(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """What :func:`cufa.flash_decode` means, in float64; the caches are not written to.

    Arguments are those of :func:`cufa.flash_decode`, as NumPy arrays (or numbers or lists, where it takes
    them). Each sequence is the first ``cache_seqlens[b]`` tokens of its cache, or of its pages one after
    another, then its new tokens; its queries are the last of it: attention aligned bottom-right.

    Returns o in q's shape and layout, and with ``return_lse`` also lse (batch, heads, tokens); both float64.
    """
    for name, x in {
        "k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new, "cache_seqlens": cache_seqlens,
        "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale,
    }.items():  # fmt: skip
        check_not_masked(name, x)
    q = _bhsd("q", q, layout)
    k_cache, v_cache, k_new, v_new = (_as_bhsd(x, layout) for x in (k_cache, v_cache, k_new, v_new))
    table = None if block_table is None else np.asarray(block_table)
    capacity = k_cache.shape[2] * (1 if table is None else table.shape[1])
    lengths = np.broadcast_to(capacity if cache_seqlens is None else cache_seqlens, len(q)).tolist()
    o, lse = np.empty(q.shape), np.empty(q.shape[:3])
    for b, length in enumerate(lengths):
        k = _sequence(b, length, k_cache, table, k_new, k_scale)
        v = _sequence(b, length, v_cache, table, v_new, v_scale)
        one = slice(b, b + 1)
        o[one], lse[one] = attention_reference(
            q[one], k, v, mask=decode_mask(window), softcap=softcap, scale=scale, return_lse=True
        )
    if layout == "bshd":
        o = o.swapaxes(1, 2)
    return (o, lse) if return_lse else o


def _sequence(b: int, length: int, cache: Any, table: Any, new: Any, factor: Any) -> Array:
    """Keys, or values, of sequence b: (1, kv_heads, length + new, head_dim). Bytes are e4m3 times factor."""
    if table is None:
        tokens = cache[b, :, :length]
    else:
        _, kv_heads, page_size, head_dim = cache.shape
        pages = cache[table[b, : -(-length // page_size)]]
        tokens = pages.swapaxes(0, 1).reshape(kv_heads, len(pages) * page_size, head_dim)[:, :length]
    if new is not None:
        tokens = np.concatenate([tokens, new[b]], axis=1)
    if tokens.dtype == np.uint8:
        tokens = tokens.view(ml_dtypes.float8_e4m3fn)
    wide: Array = tokens.astype(np.float64)[None]
    if factor is None:
        return wide
    return wide * np.broadcast_to(np.asarray(factor, np.float64), wide.shape[1])[:, None, None]


def _as_bhsd(x: Any, layout: str) -> Any:
    return x if x is None else np.asarray(x).swapaxes(1, 2) if layout == "bshd" else np.asarray(x)


def _parts(q: Array, k: Array, v: Array, mask: Mask) -> Iterator[tuple[Any, Any, npt.NDArray[np.bool_]]]:
    """Rows of one query head at a time, its key/value head, and which of its keys each row sees."""
    batch, heads, seqlen_q, head_dim = q.shape
    if k.shape != v.shape or k.shape[::3] != (batch, head_dim) or heads % max(k.shape[1], 1):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} (as bhsd) do not fit together")
    kv_heads, seqlen_k = k.shape[1:3]
    misfit = mask.misfit(batch, kv_heads, seqlen_k)
    if misfit is not None:
        raise ValueError(f"mask, {mask}, {misfit}")
    for b, h in np.ndindex(batch, heads):
        for start in range(0, seqlen_q, _ROWS):
            part = slice(start, min(start + _ROWS, seqlen_q))
            row, key = np.arange(part.start, part.stop), np.arange(seqlen_k)
            kv_head = h // (heads // kv_heads)
            yield (b, h, part), (b, kv_head), mask.visible(row, key, seqlen_q, seqlen_k, b, kv_head)


# --- The semantics: rows of one head, q (rows, d), k and v (keys, d), seen (rows, keys) ----------------------


def _attend(
    q: Array, k: Array, v: Array, seen: npt.NDArray[np.bool_], scale: float, cap: float | None
) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        s = scale * (q @ k.T)
        s = np.where(seen, s if cap is None else softcapped(s, cap), -np.inf)
        m = s.max(axis=1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(m == -np.inf, 0, m))
        l = p.sum(axis=1, keepdims=True)
        o = np.where(l == 0, 0, _product(p, v, seen) / l)
        return o, (m + np.log(l))[:, 0]


def _gradients(
    do: Array,
    dlse: Array,
    q: Array,
    k: Array,
    v: Array,
    seen: npt.NDArray[np.bool_],
    scale: float,
    cap: float | None,
) -> tuple[Array, Array, Array]:
    """Of dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O) + dLSE), with P = exp(S - LSE)."""
    o, lse = _attend(q, k, v, seen, scale, cap)
    with np.errstate(all="ignore"):
        s = scale * (q @ k.T)
        capped = s if cap is None else softcapped(s, cap)
        slope = 1 if cap is None else softcap_derivative(capped, cap)
        weighs = seen & (lse != -np.inf)[:, None]
        p = np.where(weighs, np.exp(capped - lse[:, None]), 0)
        ds = np.where(weighs, p * (do @ v.T - ((do * o).sum(axis=1) - dlse)[:, None]) * slope, 0)
        dq, dk = scale * _product(ds, k, seen), scale * _product(ds.T, q, seen.T)
        return dq, dk, _product(p.T, do, seen.T)


def _product(p: Array, v: Array, seen: npt.NDArray[np.bool_]) -> Array:
    """p v over the seen keys alone. It matters when an unseen value is inf or NaN, as 0 · inf is NaN."""
    if np.isfinite(v).all() or not len(p):
        return p @ v
    return np.stack([p_row[seen_row] @ v[seen_row] for p_row, seen_row in zip(p, seen, strict=True)])


def _bhsd(name: str, x: npt.ArrayLike, layout: str) -> Array:
    check_not_masked(name, x)
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout={layout!r} is not known; use 'bhsd' or 'bshd'")
    array = np.asarray(x).astype(np.float64)
    if array.ndim != 4:
        raise ValueError(f"arrays of queries, keys and values have 4 axes, not {array.ndim}")
    return array.swapaxes(1, 2) if layout == "bshd" else array
