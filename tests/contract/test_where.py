"""Masks that functions define, and booleans that broadcast: the same results as from the boolean matrix itself."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from compositions import scaled
from support import make_inputs, written_out

import cufa
from cufa import masks
from cufa.problem.bits import Bits

IDS = np.sort(np.random.default_rng(2).integers(0, 4, (2, 300)), axis=1).astype(np.int32)


def documents(b, h, i, j, ids):
    return ids[b, i] == ids[b, j]


def neighbours(b, h, i, j):
    """Of tokens in rows of 16: at most 3 away."""
    return (np.abs(i // 16 - j // 16) <= 3) & (np.abs(i % 16 - j % 16) <= 3)


def made(name, ids=IDS):
    both = masks.where(documents, ids=ids)
    return {
        "documents": both,
        "neighbours": masks.where(neighbours),
        "within": masks.where(neighbours, within=masks.causal()),
        "either": both & masks.window(30, 30) | masks.where(neighbours),
        "not": ~both & masks.documents([100, 200]),
        "heads": masks.where(lambda b, h, i, j: (j <= i) & ((j % 8 != h) | (j > i - 40 * h))),
        "delta": masks.where(lambda b, h, i, j, delta: (j <= i + delta) & (j % 3 != 1)),
    }[name]


NAMES = ["documents", "neighbours", "within", "either", "not", "heads", "delta"]
SEEN = np.random.default_rng(3).random((2, 4, 300, 300)) < 0.4
SEEN[:, :, :, 0] = True
SEEN[:, 1, 100:, 64:] = SEEN[:, 0, :100, 64:] = False  # tiles that one head of a query group sees alone
BOOLEANS = {
    "keys": SEEN[:, :1, :1], "rows": SEEN[..., 200:201], "heads": SEEN[:1, ::2], "query heads": SEEN,
    "strided": SEEN[..., ::-1],
    "a window for each query head": np.array([[masks.window(9 * n, 0).dense(300, 300) for n in range(1, 5)]]),
}  # fmt: skip


def matrix(mask):
    """Of each query head."""
    if isinstance(mask, np.ndarray):
        shared = mask.repeat(2, axis=1) if mask.shape[1] == 2 else mask
        return np.broadcast_to(shared, SEEN.shape).copy()
    return np.array([[mask.dense(300, 300, b, h) for h in range(4)] for b in range(2)])


def case(head_dim=16, dtype="float64"):
    q, k, v = make_inputs(2, 4, 2, 300, 300, head_dim, dtype)
    return q, k, v, make_inputs(2, 4, 2, 300, 300, head_dim, dtype)[0]


@pytest.mark.parametrize("name", [*NAMES, *BOOLEANS])
def test_results_are_those_of_the_matrix(name):
    q, k, v, dout = case()
    mask = BOOLEANS[name] if name in BOOLEANS else made(name)
    seen = matrix(mask)
    exact, exact_lse = written_out(q, k, v, seen=seen)
    for device in ({"device": "cpu"}, None):
        call = cufa.attention_reference if device is None else cufa.flash_attention
        out, lse = call(q, k, v, mask=mask, return_lse=True, **device or {})
        np.testing.assert_allclose(out, exact, atol=1e-12)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-12)
    # As query heads that each have keys of their own.
    alone = q, k.repeat(2, 1), v.repeat(2, 1)
    dq, dk, dv = cufa.attention_reference_backward(dout, *alone, mask=seen)
    expected = dq, *(x.reshape(2, 2, 2, 300, 16).sum(axis=2) for x in (dk, dv))
    for found in (
        cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask, device="cpu"),
        cufa.attention_reference_backward(dout, q, k, v, mask=mask),
    ):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-11)


KERNELS = [("forward", x) for x in ("fa3", "fa2", "naive")] + [("backward", x) for x in ("fa3", "fa2")]


@pytest.mark.emulate
@pytest.mark.parametrize(("operation", "algorithm"), KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_executed_kernels_take_a_mask_for_each_query_head(operation, algorithm, dtype):
    if dtype == "float32" and algorithm == "fa3":
        pytest.skip("fa3 takes 16 bits")
    q, k, v, dout = (x[:, :, :150] for x in case(16, dtype))
    seen = SEEN[:, :, :150, :150]
    exact, exact_lse = written_out(q, k, v, seen=seen)
    given = {"mask": seen, "algorithm": algorithm, "mode": "checked"}
    if operation == "forward":
        done = cufa.emulate(q, k, v, **given)
        found, expected = [done.out], [exact]
    else:
        out, lse = exact.astype(q.dtype), exact_lse.astype(np.float32)
        done = cufa.emulate_backward(dout, q, k, v, out, lse, **given)
        found = done.results.values()
        expected = cufa.attention_reference_backward(dout, q, k, v, mask=seen)
    assert not done.findings
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, atol=6e-3 * abs(y).max())


@pytest.mark.parametrize(
    "band",
    [
        masks.prefix(3), masks.prefix([1, 0, 4], "top-left"), masks.streaming([2, 0, 1], 4),
        masks.global_window(3, 2, 1), masks.global_window([0, 3, 9], 2, 1, diagonal=-3),
    ],
    ids=str,
)  # fmt: skip
def test_functions_combine_with_bands_with_exempt_tokens(band):
    function = masks.where(lambda b, h, i, j: (i + 2 * j + b) % 3 != 1)
    for (rows, keys), b in itertools.product([(5, 9), (9, 5), (1, 4)], range(3)):
        of_function, of_band = (x.dense(rows, keys, b) for x in (function, band))
        np.testing.assert_array_equal((function & band).dense(rows, keys, b), of_function & of_band)
        np.testing.assert_array_equal((band | function).dense(rows, keys, b), of_function | of_band)


def test_bits_are_made_once_and_again_after_a_refresh():
    ids, (q, k, v, _) = IDS.copy(), case()
    mask = made("documents", ids)
    first = cufa.flash_attention(q, k, v, mask=mask, device="cpu")
    ids[:] = 0
    np.testing.assert_array_equal(cufa.flash_attention(q, k, v, mask=mask, device="cpu"), first)
    mask.refresh()
    np.testing.assert_array_equal(
        cufa.flash_attention(q, k, v, mask=mask, device="cpu"), cufa.flash_attention(q, k, v, device="cpu")
    )


def test_booleans_are_read_by_every_call():
    seen, (q, k, v, _) = SEEN.copy(), case()
    for _ in range(2):
        out = cufa.flash_attention(q, k, v, mask=seen, device="cpu")
        np.testing.assert_allclose(out, written_out(q, k, v, seen=seen)[0], atol=1e-12)
        seen ^= True


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (lambda: masks.where(lambda b, h, i, j: i - j), "returns an integer"),
        (lambda: masks.where(lambda b, h, i, j: i > j and j > 3), "&"),
        (lambda: masks.where(documents, i=IDS), "reserved"),
        (lambda: masks.where(lambda b, h, i, j, ids: ids[b, i + 900] > 0, ids=IDS), "outside axis 1"),
        (lambda: masks.where(documents, ids=IDS) & masks.evict(np.ones((1, 3, 300), int)), "that all heads share"),
        (lambda: np.ones((2, 3, 300, 1), bool), "each axis has size 1"),
        (lambda: np.ones((2, 2, 300, 299), bool), "299"),
    ],
)  # fmt: skip
def test_bad_input_is_named(mask, says):
    q, k, v, _ = case()
    with pytest.raises((TypeError, ValueError), match=says):
        cufa.flash_attention(q, k, v, mask=mask(), device="cpu")


EDGES = np.array(
    [[0, 100, 100, 230, 300], [0, 90, 120, 260, 333]], np.int32
)  # an empty sequence, and padding at the end
PACKED = {
    "documents": masks.where(documents, ids=np.vstack([IDS, IDS])),
    "delta": masks.where(lambda b, h, i, j, delta: (j <= i + delta) & ((i + 2 * j + b + h) % 3 != 1)),
}


def packed_case(name, head_dim=16, dtype="float64"):
    """Arrays, the mask, and results of each sequence alone in float64: out, lse, dq, dk, dv."""
    rng, mask = np.random.default_rng(5), PACKED[name]
    q, dout, k, v = (
        rng.standard_normal((n, h, head_dim)).astype(dtype)
        for n, h in ((310, 4), (310, 4), (340, 2), (340, 2))
    )
    out, lse = np.zeros(q.shape), np.full((4, 310), -np.inf)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, (rows, keys) in enumerate(zip(*(map(slice, x[:-1], x[1:]) for x in EDGES), strict=True)):
        sizes = rows.stop - rows.start, keys.stop - keys.start
        seen = np.array([[mask.dense(*sizes, b, h) for h in range(4)]])
        own = [
            x[n].swapaxes(0, 1)[None].astype(np.float64)
            for x, n in ((q, rows), (k, keys), (v, keys), (dout, rows))
        ]
        found = cufa.attention_reference(*own[:3], mask=seen, return_lse=True)
        out[rows], lse[:, rows] = found[0][0].swapaxes(0, 1), found[1][0]
        found = cufa.attention_reference_backward(own[3], *own[:3], mask=seen)
        for total, n, x in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
            total[n] = x[0].swapaxes(0, 1)
    return (q, k, v), dout, mask, (out, lse, dq, dk, dv)


def assert_close(results, expected, bound):
    for n, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=bound * (1 if n == 1 else abs(y).max()))


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_count_from_their_own_beginning(name):
    qkv, dout, mask, expected = packed_case(name)
    given = {"mask": mask, "device": "cpu"}
    out, lse = cufa.flash_attention_varlen(*qkv, *EDGES, return_lse=True, **given)
    more = cufa.flash_attention_varlen_backward(dout, *qkv, out, lse, *EDGES, **given)
    assert_close((out, lse, *more), expected, 1e-11)


@pytest.mark.emulate
@pytest.mark.parametrize("algorithm", ["fa3", "fa2"])
def test_executed_kernels_take_packed_sequences(algorithm):
    qkv, dout, mask, expected = packed_case("delta", dtype="float16")
    given = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k"), EDGES, strict=True),
        mask=mask,
        algorithm=algorithm,
        mode="checked",
    )
    done = cufa.emulate(*qkv, **given)
    out, lse = expected[0].astype(np.float16), expected[1].astype(np.float32)
    more = cufa.emulate_backward(dout, *qkv, out, lse, **given)
    assert not done.findings
    assert not more.findings
    assert_close((done.results["out"], done.results["lse"], *more.results.values()), expected, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_on_a_gpu(cp, name):
    qkv, dout, mask, expected = packed_case(name, 64, "float16")
    q, k, v, dout = map(cp.asarray, (*qkv, dout))
    edges = cp.asarray(EDGES)
    for places in ([*EDGES], [*edges]):
        out, lse = cufa.flash_attention_varlen(q, k, v, *places, mask=mask, return_lse=True)
        more = cufa.flash_attention_varlen_backward(dout, q, k, v, out, lse, *places, mask=mask)
        assert_close([x.get() for x in (out, lse, *more)], expected, 6e-3)
    out = cufa.flash_attention_varlen(*qkv, *EDGES, mask=mask, device="cuda")
    np.testing.assert_allclose(out, expected[0], atol=6e-3)
    edges[:, 1:-1] = edges[:, -1:]  # one sequence and empty ones: the arrays are read anew
    out = cufa.flash_attention_varlen(q, k, v, *edges, mask=mask)
    seen = np.array([[mask.dense(300, 333, 0, h) for h in range(4)]])
    exact = cufa.attention_reference(
        *(x[:n].swapaxes(0, 1)[None] for x, n in zip(qkv, (300, 333, 333), strict=True)), mask=seen
    )
    np.testing.assert_allclose(out.get()[:300], exact[0].swapaxes(0, 1), atol=6e-3)


SCORES = {
    "alibi": {"alibi_slopes": np.array([0.1, 0.2, -0.05, 0.3], np.float32)},
    "score": {"score": cufa.score(scaled, slopes=np.array([1, 0.5, 0.7, 1.2], np.float32))},
    "dropout": {"dropout": 0.3, "seed": 7, "softcap": 9.0},
    "sink": {"sink": np.array([0.5, -1, 2, 0], np.float32)},
}


def check_scores(scores, name, dtype, bound, forward, backward):
    """The function's bits and the scores count from each sequence's own beginning."""
    (q, k, v), dout, mask, _ = packed_case(name, 16 if dtype == "float64" else 64, dtype)
    options = {"mask": mask, **SCORES[scores]}
    out, lse = cufa.attention_varlen_reference(q, k, v, *EDGES, return_lse=True, **options)
    more = cufa.attention_varlen_reference_backward(dout, q, k, v, *EDGES, **options)
    given = q, k, v, out.astype(dtype), lse.astype("float64" if dtype == "float64" else "float32")
    found = *forward(*given[:3], **options), *backward(dout, *given, **options)
    for x, exact in zip(found, (out, lse, *more), strict=True):
        assert x.shape == exact.shape
        there = np.isfinite(exact)
        assert (np.isneginf(x) == ~there).all()
        np.testing.assert_allclose(x[there], exact[there], atol=bound * abs(exact[there]).max())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("scores", SCORES)
def test_packed_sequences_with_scores(scores, name):
    def forward(*arrays, **options):
        return cufa.flash_attention_varlen(*arrays, *EDGES, return_lse=True, device="cpu", **options)

    def backward(*arrays, **options):
        return cufa.flash_attention_varlen_backward(*arrays, *EDGES, device="cpu", **options)

    check_scores(scores, name, "float64", 1e-11, forward, backward)


@pytest.mark.emulate
@pytest.mark.sampled(fixed=4, dated=1)
@pytest.mark.parametrize(("algorithm", "dtype"), [("fa3", "float16"), ("fa2", "float16"), ("fa2", "float32")])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("scores", SCORES)
def test_executed_kernels_take_packed_sequences_with_scores(scores, name, algorithm, dtype):
    how = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), EDGES, strict=True), algorithm=algorithm, mode="checked")

    def run(call, arrays, options):
        done = call(*arrays, **how, **options)
        assert not done.findings
        return done.results.values()

    check_scores(
        scores, name, dtype, 3e-3 if dtype == "float16" else 5e-6,
        lambda *x, **o: run(cufa.emulate, x, o), lambda *x, **o: run(cufa.emulate_backward, x, o),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("scores", SCORES)
def test_packed_sequences_with_scores_on_a_gpu(cp, scores, name):
    def there(call, edges):
        return lambda *x, **options: [y.get() for y in call(*map(cp.asarray, x), *edges, **options)]

    forward = functools.partial(cufa.flash_attention_varlen, return_lse=True)
    for edges in (EDGES, cp.asarray(EDGES)):
        backward = there(cufa.flash_attention_varlen_backward, edges)
        check_scores(scores, name, "float16", 6e-3, there(forward, edges), backward)


def test_calls_that_take_no_function_say_what_to_do():
    (q, k, v), _, mask, _ = packed_case("documents")
    packed = {"mask": mask, "device": "cpu"}
    scaled = {**packed, "q_scale": np.float32(1), "k_scale": np.float32(1), "v_scale": np.float32(1)}
    with pytest.raises(ValueError, match="is a function"):
        cufa.flash_attention_varlen(*(x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)), *EDGES, **scaled)
    q, k, v, _ = case()
    lengths = np.array([200, 300])
    with pytest.raises(ValueError, match=r"mask, where .*j < n\[b\]"):
        cufa.flash_attention(q, k, v, cache_seqlens=lengths, mask=mask, device="cpu")
    with pytest.raises(ValueError, match=r"mask=where .*flash_attention"):
        cufa.flash_decode(q[:, :, :1], k, v, cache_seqlens=lengths, mask=mask, device="cpu")
    with pytest.raises(ValueError, match="no form in JSON"):
        made("documents").as_json()


@pytest.mark.emulate
@pytest.mark.parametrize("sizes", [(200, 2528), (70, 4300)], ids=str)
def test_a_walk_passes_over_words_of_tiles(sizes):
    """More than 32 tiles of keys: their classes are in several words."""
    rng = np.random.default_rng(6)
    seen = np.zeros((1, 2, *sizes), bool)
    for row, key in zip(rng.integers(0, sizes[0], 30), rng.integers(0, sizes[1], 30), strict=True):
        seen[:, key % 2, row : row + 70, key : key + 200] = True
    seen[..., -150:] = True  # of the last tile, all keys that exist
    q, k, v = make_inputs(1, 2, 1, *sizes, 128, "float16")
    exact, _ = written_out(q, k, v, seen=seen)
    done = cufa.emulate(q, k, v, mask=seen, algorithm="fa3", mode="checked")
    assert not done.findings
    np.testing.assert_allclose(done.out, exact, atol=6e-3 * abs(exact).max())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", [*NAMES, *BOOLEANS])
def test_on_a_gpu(cp, name, head_dim):
    given = case(head_dim, "float16")
    q, k, v, dout = map(cp.asarray, given)
    mask = cp.asarray(BOOLEANS[name]) if name in BOOLEANS else made(name, cp.asarray(IDS))
    if name == "strided":
        mask = cp.asarray(SEEN)[..., ::-1]
    same = masks.from_dense(matrix(BOOLEANS[name] if name in BOOLEANS else made(name)))
    if not isinstance(same, Bits):  # kernels then differ, and so do the last bits
        same = Bits.of(matrix(BOOLEANS[name] if name in BOOLEANS else made(name)))
    results = []
    for seen in (mask, same):
        out, lse = cufa.flash_attention(q, k, v, mask=seen, return_lse=True)
        more = cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=seen, deterministic=False)
        results.append([x.get() for x in (out, lse, *more)])
    for n, (x, y) in enumerate(zip(*results, strict=True)):
        if n in (0, 1, 3, 4):
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, atol=2e-3 * abs(y).max())


@pytest.mark.gpu
def test_a_refresh_reaches_calls_that_are_warm_and_graphs(cp):
    q, k, v, dout = map(cp.asarray, case(64, "float16"))
    ids = cp.asarray(IDS)
    mask = made("documents", ids)

    def both():
        out, lse = cufa.flash_attention(q, k, v, mask=mask, return_lse=True)
        return out, lse, *cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask)[1:]

    for _ in range(3):
        both()
    ids[:] = 0
    mask.refresh()
    for x, y in zip(both(), both(), strict=True):
        np.testing.assert_array_equal(x.get(), y.get())
    full = cufa.flash_attention(q, k, v, return_lse=True)
    for x, y in zip(both()[:2], full, strict=True):
        np.testing.assert_allclose(x.get(), y.get(), atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [{}, SCORES["alibi"], SCORES["sink"]], ids=str)
def test_either_mask_with_lengths_on_a_gpu(cp, scores):
    """The host cannot make the bits: a kernel does, in every call, from lengths that may have changed."""
    mask = masks.window(20, 3) | masks.prefix([30, 0, 9, 200])
    (q, k, v), dout, _, _ = packed_case("delta", 64, "float16")
    q[300:], k[333:], v[333:] = np.nan, np.nan, np.nan
    there, edges = [*map(cp.asarray, (q, k, v))], cp.asarray(EDGES)
    for _ in range(2):
        exact = cufa.attention_varlen_reference(q, k, v, *edges.get(), mask=mask, **scores)
        out, lse = cufa.flash_attention_varlen(*there, *edges, mask=mask, return_lse=True, **scores)
        np.testing.assert_allclose(out.get(), exact, atol=6e-3)
        found = cufa.flash_attention_varlen_backward(
            cp.asarray(dout), *there, out, lse, *edges, mask=mask, **scores
        )
        exact = cufa.attention_varlen_reference_backward(dout, q, k, v, *edges.get(), mask=mask, **scores)
        for x, y in zip(found, exact, strict=True):
            np.testing.assert_allclose(x.get(), y, atol=6e-3 * abs(y).max())
        edges[:, 2] = edges[:, 3]
    q, k, v, _ = case(64, "float16")
    mask = masks.window(20, 3) | masks.prefix([30, 9])
    for lengths in (np.array([200, 30], np.int32), np.array([7, 300], np.int32)):
        given = {"seqlens_q": lengths, "seqlens_k": lengths[::-1].copy()}
        exact = cufa.attention_reference(q, k, v, mask=mask, **given, **scores)
        on_gpu = {name: cp.asarray(x) for name, x in given.items()}
        for some in (given, on_gpu, {**given, "seqlens_k": on_gpu["seqlens_k"]}):
            out = cufa.flash_attention(*map(cp.asarray, (q, k, v)), mask=mask, **some, **scores)
            np.testing.assert_allclose(out.get(), exact, atol=6e-3)
        out = cufa.flash_attention(q, k, v, mask=mask, device="cuda", **given, **scores)
        np.testing.assert_allclose(out, exact, atol=6e-3)


@pytest.mark.gpu
def test_booleans_of_packed_sequences_on_a_gpu(cp):
    (q, k, v), _, _, _ = packed_case("delta", 64, "float16")
    seen = np.random.default_rng(3).random((4, 1, 140, 140)) < 0.6
    exact = cufa.attention_varlen_reference(q, k, v, *EDGES, mask=seen)
    for mask in (seen, cp.asarray(seen)):
        out = cufa.flash_attention_varlen(*map(cp.asarray, (q, k, v)), *EDGES, mask=mask)
        np.testing.assert_allclose(out.get(), exact, atol=6e-3)
    np.testing.assert_allclose(
        cufa.flash_attention_varlen(q, k, v, *EDGES, mask=seen, device="cuda"), exact, atol=6e-3
    )
    with pytest.raises(
        ValueError, match=r"has up to 310 queries and 340 keys: pad it \(if cu_seqlens are on a GPU"
    ):
        cufa.flash_attention_varlen(*map(cp.asarray, (q, k, v)), *cp.asarray(EDGES), mask=seen)
