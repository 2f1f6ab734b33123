"""The definition of decoding: attention of the last tokens of each sequence to its cache, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from ..calls.cache_checks import check_integers, check_length
from ..calls.shapes import check_mask
from ..problem.checks import check_not_masked
from ..problem.float8 import key_tile
from ..problem.lengths import Cached
from ..problem.options import decode_mask
from ..problem.score_function import Score, resolve_score
from ..problem.tree import ancestors
from ..problem.typing import AnyMask
from .dense import Array, as_bhsd, attention_reference


@np.errstate(all="ignore")
def decode_reference(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any = None, block_table: Any = None,
    k_new: Any = None, v_new: Any = None, k_scale: Any = None, v_scale: Any = None,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    layout: str = "bhsd", tree: Any = None, score: Score | None = None, bias: Any = None, return_lse: bool = False,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The definition of :func:`cufa.flash_decode`, in float64; the caches are not written to.

    Arguments are those of :func:`cufa.flash_decode`, as NumPy arrays (or numbers or lists, where it takes
    them). Each sequence is the first ``cache_seqlens[b]`` tokens of its cache, or of its pages one after
    another, then its new tokens; its queries are its last tokens: attention is aligned bottom-right.

    Returns o in q's shape and layout, and with ``return_lse`` also lse (batch, heads, tokens); both float64.
    """
    for name, x in {
        "k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new, "cache_seqlens": cache_seqlens,
        "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale,
    }.items():  # fmt: skip
        check_not_masked(name, x)
    new = {} if k_new is None and v_new is None else {"k_new": k_new, "v_new": v_new}
    for name, x in {"k_cache": k_cache, "v_cache": v_cache, **new}.items():
        if np.ndim(x) != 4:
            raise ValueError(f"{name} has shape {np.shape(x)}: four axes are needed, as for flash_decode")
    q = as_bhsd("q", q, layout)
    k_cache, v_cache, k_new, v_new = (_as_bhsd(x, layout) for x in (k_cache, v_cache, k_new, v_new))
    table = None if block_table is None else np.asarray(block_table)
    lengths = _lengths(cache_seqlens, len(q), k_cache, table, 0 if k_new is None else k_new.shape[2])
    seen_by, changed_by = decode_mask(window, mask), resolve_score(score, bias)
    check_mask(seen_by, len(q), k_cache.shape[1])
    o, lse = np.empty((*q.shape[:3], v_cache.shape[3])), np.empty(q.shape[:3])
    for b, length in enumerate(lengths):
        k = _sequence(b, length, k_cache, table, k_new, k_scale)
        v = _sequence(b, length, v_cache, table, v_new, v_scale)
        one = slice(b, b + 1)
        own = changed_by and dataclasses.replace(changed_by, sequence=b)
        if bias is not None:
            own_bias = np.asarray(bias)[b % len(bias), ..., : k.shape[2]]
            own = resolve_score(None, own_bias[None])
        slopes = alibi_slopes[b] if np.ndim(alibi_slopes) == 2 else alibi_slopes
        if tree is not None:  # token by token, each over the keys that it sees
            old = length + (0 if k_new is None else k_new.shape[2]) - q.shape[2]
            for i, seen in enumerate(ancestors(np.asarray(tree)[one])[0]):
                keys = np.r_[: max(old, 0), old + np.flatnonzero(seen)]
                keys = keys[keys >= 0]
                o[one, :, i : i + 1], lse[one, :, i : i + 1] = attention_reference(
                    q[one, :, i : i + 1], k[:, :, keys], v[:, :, keys], softcap=softcap, scale=scale, sink=sink,
                    return_lse=True,
                )  # fmt: skip
            continue
        o[one], lse[one] = attention_reference(
            q[one], k, v, mask=seen_by.at(b, 0), softcap=softcap, scale=scale, alibi_slopes=slopes, sink=sink,
            score=own, return_lse=True,
        )  # fmt: skip
    if layout == "bshd":
        o = o.swapaxes(1, 2)
    return (o, lse) if return_lse else o


def _lengths(given: Any, batch: int, cache: Any, table: Any, new_tokens: int) -> list[int]:
    """Cached tokens of each sequence. Raises as :func:`cufa.flash_decode` if they do not fit in the cache."""
    size, pages = cache.shape[2], 0 if table is None else table.shape[1]
    capacity = size if table is None else size * pages
    if given is None:
        return [capacity] * batch
    lengths: list[int] = check_integers("cache_seqlens", np.asarray(given), (batch,)).tolist()
    cached = Cached(page_size=0 if table is None else size, max_pages=pages, new_tokens=new_tokens)
    for b, length in enumerate(lengths):
        check_length(b, length, cached, capacity)
    return lengths


def _sequence(b: int, length: int, cache: Any, table: Any, new: Any, factor: Any) -> Array:
    """Keys, or values, of sequence b: (1, kv_heads, length + new, head_dim). Bytes are e4m3 times factor; new tokens of
    more bits are taken as they are."""
    if table is None:
        tokens = cache[b, :, :length]
    else:
        _, kv_heads, page_size, head_dim = cache.shape
        pages = cache[table[b, : -(-length // page_size)]]
        tokens = pages.swapaxes(0, 1).reshape(kv_heads, len(pages) * page_size, head_dim)[:, :length]
    wide: Array = _wide(tokens)
    rounded = new is not None and new.dtype != np.uint8 == cache.dtype
    if new is not None and not rounded:
        wide = np.concatenate([wide, _wide(new[b])], axis=1)
    if factor is not None:
        wide *= _key_factors(np.asarray(factor, np.float64), b, wide.shape[1], cache, table)[..., None]
    return (np.concatenate([wide, _wide(new[b])], axis=1) if rounded else wide)[None]


def _wide(x: Any) -> Array:
    found: Array = (x.view(ml_dtypes.float8_e4m3fn) if x.dtype == np.uint8 else x).astype(np.float64)
    return found


def _key_factors(factor: Array, b: int, length: int, cache: Any, table: Any) -> Array:
    """The factor of each of the first keys of sequence b, (kv_heads, length or 1)."""
    _, kv_heads, slots, head_dim = cache.shape
    if factor.ndim < 2:
        return np.broadcast_to(factor, kv_heads)[:, None]
    if table is None:
        block = 1 if factor.shape[2] == slots else key_tile(head_dim)
        return np.repeat(factor[b], block, axis=1)[:, :length]
    pages = factor[table[b, : -(-length // slots)]].reshape(-(-length // slots), kv_heads, -1)
    found = np.repeat(pages, slots // pages.shape[2], axis=2)
    return found.swapaxes(0, 1).reshape(kv_heads, -1)[:, :length]


def _as_bhsd(x: Any, layout: str) -> Any:
    return x if x is None else np.asarray(x).swapaxes(1, 2) if layout == "bshd" else np.asarray(x)
