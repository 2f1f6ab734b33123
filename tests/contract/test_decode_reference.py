"""The float64 reference of decoding against its words: each sequence by hand, from where its tokens lie."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cufa import attention_reference, decode_reference, flash_decode, masks


def by_hand(q, tokens_k, tokens_v, scale, left=None):
    """One sequence in Python floats: q (heads, tokens, d), tokens_* lists of (kv_heads, d). Token t of T sees keys
    n - T + t - left … n - T + t of n."""
    heads, tokens = q.shape[:2]
    o, lse = np.zeros(q.shape), np.full((heads, tokens), -math.inf)
    for h, i in np.ndindex(heads, tokens):
        last = max(len(tokens_k) - tokens + i + 1, 0)
        first = 0 if left is None else max(last - 1 - left, 0)
        keys = [
            (k[h * len(k) // heads], v[h * len(v) // heads]) for k, v in zip(tokens_k, tokens_v, strict=True)
        ]
        seen = keys[first:last]
        weights = [math.exp(scale * math.fsum(q[h, i] * k)) for k, _ in seen]
        if weights:
            lse[h, i] = math.log(math.fsum(weights))
            o[h, i] = sum(w * v for w, (_, v) in zip(weights, seen, strict=True)) / math.fsum(weights)
    return o, lse


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("left", [None, 0, 3])
def test_definition(layout, paged, new, left):
    rng = np.random.default_rng(0)
    batch, heads, kv_heads, tokens, head_dim, page_size = 4, 4, 2, 3, 8, 4
    lengths = [0, 1, 7, 10]
    table = rng.permutation(12).reshape(4, 3).astype(np.int32)
    shape = (12, kv_heads, page_size, head_dim) if paged else (batch, kv_heads, 12, head_dim)
    cache = [rng.standard_normal(shape) for _ in "kv"]
    added = [rng.standard_normal((batch, kv_heads, new, head_dim)) for _ in "kv"]
    q = rng.standard_normal((batch, heads, tokens, head_dim))

    def token(x, n, b, t):
        if t >= lengths[b]:
            return n[b, :, t - lengths[b]]
        return x[table[b, t // page_size], :, t % page_size] if paged else x[b, :, t]

    arrays = [q, *cache, *(added if new else [None, None])]
    if layout == "bshd":
        arrays = [x if x is None else x.swapaxes(1, 2) for x in arrays]
    q_, k_, v_, k_new, v_new = arrays
    o, lse = decode_reference(
        q_, k_, v_, cache_seqlens=lengths, block_table=table if paged else None, k_new=k_new, v_new=v_new,
        scale=0.4, window=None if left is None else (left, 0), layout=layout, return_lse=True,
    )  # fmt: skip
    o = o.swapaxes(1, 2) if layout == "bshd" else o
    for b in range(batch):
        k, v = (
            [token(x, n, b, t) for t in range(lengths[b] + new)] for x, n in zip(cache, added, strict=True)
        )
        expected, expected_lse = by_hand(q[b], k, v, 0.4, left)
        np.testing.assert_allclose(o[b], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[b], expected_lse, rtol=1e-12, atol=1e-13)


def test_without_lengths_the_whole_capacity_counts():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, h, s, 8)) for h, s in ((4, 3), (2, 9), (2, 9)))
    np.testing.assert_array_equal(decode_reference(q, k, v), attention_reference(q, k, v, causal=True))


def test_bytes_are_e4m3_times_the_heads_scale():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 2, 1, 8))
    k, v = (rng.standard_normal((1, 2, 5, 8)).astype(ml_dtypes.float8_e4m3fn) for _ in "kv")
    scale = np.float32([0.5, 3])
    wide = [x.astype(np.float64) * scale[:, None, None] for x in (k, v)]
    got = decode_reference(q, k.view(np.uint8), v.view(np.uint8), k_scale=scale, v_scale=scale)
    np.testing.assert_array_equal(got, decode_reference(q, *wide))


def test_numbers_serve_every_sequence_and_head():
    """As flash_decode takes them."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 2, n, 8)) for n in (1, 9, 9))
    expected = decode_reference(q, k, v, cache_seqlens=np.array([5, 5]))
    np.testing.assert_array_equal(decode_reference(q, k, v, cache_seqlens=5), expected)
    each = decode_reference(q, k, v, k_scale=np.full(2, 0.5), v_scale=np.full(2, 2.0))
    np.testing.assert_array_equal(decode_reference(q, k, v, k_scale=0.5, v_scale=2), each)


def test_what_is_not_valid_is_not_looked_at():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, s, 8)) for s in (1, 9, 9))
    expected = decode_reference(q, k, v, cache_seqlens=[6])
    k[:, :, 6:], v[:, :, 6:] = np.nan, np.inf
    np.testing.assert_array_equal(decode_reference(q, k, v, cache_seqlens=[6]), expected)
    pages = k.reshape(3, 3, 1, 8).swapaxes(1, 2), v.reshape(3, 3, 1, 8).swapaxes(1, 2)
    wild = np.array([[0, 1, 2**31 - 1, -(2**31)]], np.int32)
    got = decode_reference(q, *pages, cache_seqlens=[6], block_table=wild)
    np.testing.assert_array_equal(got, expected)


_NEW = np.ones((2, 2, 1, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cache_seqlens": 9}, ValueError, r"cache_seqlens\[0\] is 9, but k_cache holds 5 .*a longer cache"),
        ({"cache_seqlens": [5, -1]}, ValueError, r"cache_seqlens\[1\] is -1: a length is at least 0"),
        ({"cache_seqlens": [1, 2, 3]}, ValueError, r"cache_seqlens has shape \(3,\): it takes .* \(2,\)"),
        ({"cache_seqlens": [1.5, 2]}, TypeError, "cache_seqlens is float64: it takes int32"),
        ({"block_table": [[0], [1]], "cache_seqlens": 6}, ValueError, "1 pages of 5 .* it takes 2 columns"),
        (
            {"cache_seqlens": 5, "k_new": _NEW, "v_new": _NEW},
            ValueError,
            r"is 5 and k_new appends 1, but k_cache holds 5",
        ),
    ],
)
def test_lengths_beyond_the_cache_are_refused_as_by_the_call(changes, error, message):
    q, k, v = (np.ones((2, 2, n, 8), np.float32) for n in (1, 5, 5))
    for call in (decode_reference, flash_decode):
        with pytest.raises(error, match=message):
            call(q, k, v, **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"k_cache": None}, "k_cache"), ({"v_cache": _NEW[0]}, "v_cache"), ({"k_new": _NEW}, "v_new")],
)
def test_caches_and_tokens_without_four_axes_are_refused(changes, name):
    caches = dict.fromkeys(("k_cache", "v_cache"), np.ones((2, 2, 5, 8), np.float32))
    with pytest.raises(ValueError, match=f"{name} has shape .*: four axes are needed"):
        decode_reference(_NEW, **(caches | changes))


def test_a_mask_of_other_sequences_is_refused():
    q, k, v = (np.zeros((2, 2, n, 8)) for n in (1, 9, 9))
    with pytest.raises(ValueError, match="is of 3 sequences but k has 2"):
        decode_reference(q, k, v, mask=masks.streaming([1, 2, 3], 4))
