"""The contract of ``invariant=True`` over a cache: the bits of a query's result depend on its own sequence alone:
not on the batch, nor on the pages, nor on whether its prompt comes at once, in chunks, or one by one."""

from __future__ import annotations

import numpy as np
import pytest
from backends import EMULATE, GPU, MARKS, backends
from decode_support import in_cache
from support import DTYPES

import cufa

HEADS, KV_HEADS, KEYS = 4, 2, 300
BATCHES = 100
OPTIONS = {
    "causal": {"causal": True},
    "small soft cap": {"causal": True, "softcap": 3.0},
    "soft cap": {"causal": True, "softcap": 30.0},
    "window, ALiBi": {"window": (70, 0), "alibi_slopes": np.linspace(0.1, 0.7, HEADS).astype(np.float32)},
    "sink": {"causal": True, "sink": np.linspace(-1, 3, HEADS).astype(np.float32)},
    "score": {
        "causal": True,
        "score": cufa.score(lambda s, b, h, i, j, delta: 40 * np.tanh(s / 40) - 0.01 * (i + delta - j)),
    },
}
CASES = [
    # backend, algorithm, dtype, head dim, options
    (EMULATE, "fa3", "float16", 64, "causal"),
    (EMULATE, "fa3", "bfloat16", 128, "small soft cap"),
    (EMULATE, "fa3", "float16", 64, "window, ALiBi"),
    (EMULATE, "fa2", "float16", 64, "small soft cap"),
    (EMULATE, "fa3", "float16", 64, "score"),
    (EMULATE, "fa2", "bfloat16", 64, "score"),
    *[
        (GPU, algorithm, dtype, head_dim, name)
        for algorithm in ("fa3", "fa2")
        for dtype, head_dim in (("float16", 64), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256))
        for name in OPTIONS
    ],
]


class Sequence:
    """Queries, keys and values; some keys raise every row's maximum in a late tile."""

    def __init__(self, dtype: str, head_dim: int, keys: int = KEYS) -> None:
        rng, self.keys, element = np.random.default_rng(0), keys, DTYPES[dtype]
        self.q = (3 * rng.standard_normal((HEADS, keys, head_dim))).astype(element)
        k = rng.standard_normal((KV_HEADS, keys, head_dim))
        k[:, ::37] *= 4
        self.k, self.v = k.astype(element), rng.standard_normal(k.shape).astype(element)


def operands(sequence, chunks, page_size, rng, others=()):
    """Of a call with packed queries: chunks (first, end) of the sequence's queries over its first ``end`` keys, and
    ``others`` of (keys, queries), in any order; and where each chunk's tokens are. Slots without a key are NaN."""
    dtype, head_dim = sequence.q.dtype, sequence.q.shape[2]
    entries = [(sequence.q[:, a:b], sequence.k[:, :b], sequence.v[:, :b]) for a, b in chunks]
    for keys, queries in others:
        shapes = (HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)
        entries.append(tuple((9 * rng.standard_normal((*shape, head_dim))).astype(dtype) for shape in shapes))
    order = rng.permutation(len(entries))
    entries = [entries[i] for i in order]
    keys = [k.shape[1] for _, k, _ in entries]
    counts = [-(-n // page_size) for n in keys]
    table = np.zeros((len(entries), max(counts)), np.int32)
    caches = in_cache([x[1:] for x in entries], keys, page_size, rng.permutation(sum(counts)), table)
    cu = np.append(0, np.cumsum([q.shape[1] for q, _, _ in entries])).astype(np.int32)
    found = {
        "q": np.ascontiguousarray(np.concatenate([q for q, _, _ in entries], 1).swapaxes(0, 1)),
        "k": caches[0], "v": caches[1], "cu_seqlens_q": cu, "block_table": table,
        "cache_seqlens": np.array(keys, np.int32),
    }  # fmt: skip
    places = [order.tolist().index(i) for i in range(len(chunks))]
    return found, [slice(int(cu[b]), int(cu[b + 1])) for b in places]


def call(backend, given, **options):
    """(out, lse) with tokens first."""
    if backend is EMULATE:
        done = cufa.emulate(**given, **options, invariant=True, trace=False)
        return done.out.view(np.uint16), done.lse.T
    given = {name: backend.array(x) for name, x in given.items()}
    options = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, lse = cufa.flash_attention_varlen(**given, **options, invariant=True, return_lse=True)
    return backend.host(out).view(np.uint16), backend.host(lse).T


@pytest.mark.sampled(on="gpu", fixed=8, dated=4)
@pytest.mark.parametrize(
    ("backend", "algorithm", "dtype", "head_dim", "name"),
    [pytest.param(*x, id="-".join(map(str, x)), marks=MARKS[x[0].name]) for x in CASES],
)
def test_chunks_pages_and_neighbours(backend, algorithm, dtype, head_dim, name):
    rng, sequence = np.random.default_rng(1), Sequence(dtype, head_dim)
    options = {"algorithm": algorithm, **OPTIONS[name]}
    given, (own,) = operands(sequence, [(0, KEYS)], 16, rng)
    whole = [x[own] for x in call(backend, given, **options)]
    chunks = [(0, 100), (100, 113), (113, KEYS), (KEYS - 1, KEYS)]
    for page_size, others in ((8, ()), (64, ((500, 30), (1, 1), (77, 77)))):
        given, places = operands(sequence, chunks, page_size, rng, others)
        done = call(backend, given, **options)
        for (first, end), place in zip(chunks, places, strict=True):
            for got, want in zip(done, whole, strict=True):
                np.testing.assert_array_equal(got[place], want[first:end])


@backends("gpu")
@pytest.mark.parametrize("algorithm", ["fa3", "fa2"])
def test_random_batches(backend, algorithm):
    """A sequence of 2,300 keys, its queries in two random chunks, among up to 20 others."""
    rng, sequence = np.random.default_rng(2), Sequence("bfloat16", 128, 2300)
    given, (own,) = operands(sequence, [(0, 2300)], 16, rng)
    whole = [x[own] for x in call(GPU, given, algorithm=algorithm, causal=True)]
    for _ in range(BATCHES):
        cut, first = int(rng.integers(200, 2299)), int(rng.integers(0, 200))
        others = [
            (int(n), int(min(n, rng.choice([1, 1, 1, 64]))))
            for n in rng.integers(1, 600, rng.integers(0, 20))
        ]
        chunks = [(first, cut), (cut, 2300)]
        given, places = operands(sequence, chunks, int(rng.choice([8, 16, 48, 256])), rng, others)
        done = call(GPU, given, algorithm=algorithm, causal=True)
        for (begin, end), place in zip(chunks, places, strict=True):
            for got, want in zip(done, whole, strict=True):
                np.testing.assert_array_equal(got[place], want[begin:end])


def test_errors():
    q = np.zeros((1, 2, 4, 16), np.float16)
    with pytest.raises(ValueError, match="invariant=True without cache_seqlens or block_table"):
        cufa.flash_attention(q, q, q, invariant=True)
    with pytest.raises(ValueError, match="invariant=True without cache_seqlens or block_table"):
        cufa.flash_attention_varlen(q[0], q[0], q[0], [0, 2], [0, 2], invariant=True)
    with pytest.raises(TypeError, match="invariant"):
        cufa.flash_attention(q, q, q, invariant="yes", cache_seqlens=[4])
    with pytest.raises(ValueError, match="invariant=True needs a GPU"):
        cufa.flash_attention(q, q, q, cache_seqlens=np.array([4], np.int32), invariant=True, device="cpu")
