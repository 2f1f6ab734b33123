"""Dropout: which weights are kept follows from seed, sequence, head, query and key alone, in NumPy and in kernels."""

from __future__ import annotations

import numpy as np
import pytest
from support import make_inputs

import cufa
from cufa import masks
from cufa.problem.dropout import _philox

SEED = np.array([0x1234_5678_9ABC_DEF0, 77], np.uint64)
RNG = np.random.default_rng(3)


def counters(*words):
    return [np.full(1, x, np.uint64) for x in words]


def test_the_generator_is_philox():
    """Known answers of Random123, kat_vectors."""
    ones = 0xFFFFFFFF
    assert _philox(counters(0, 0, 0, 0), (0, 0))[0].tolist() == [
        0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48,
    ]  # fmt: skip
    assert _philox(counters(ones, ones, ones, ones), (ones, ones))[0].tolist() == [
        0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662,
    ]  # fmt: skip


def test_a_byte_of_two_calls_for_each_score():
    """As shared/dropout.cuh says: two calls serve two neighbouring queries and the two that are 8 further on, each with
    four neighbouring keys and the four that are 8 further on."""
    kept = cufa.dropout_mask((2, 3, 40, 50), 0.4, seed=SEED)
    for b, h, i, j in RNG.integers(0, [2, 3, 40, 50], (200, 4)):
        place = j % 4 // 2 * 16 + i % 2 * 8 + j % 2 * 4 + j // 8 % 2 * 2 + i // 8 % 2
        byte = 0
        for k in range(8):
            call = counters(3 * b + h, j // 16 * 2 + j % 8 // 4, 77, i // 16 * 8 + i % 8 // 2 * 2 + k // 4)
            word = int(_philox(call, (0x9ABCDEF0, 0x12345678))[0, k % 4])
            byte |= (word >> place & 1) << k
        assert kept[b, h, i, j] == (byte >= round(256 * 0.4))


@pytest.mark.parametrize("dropout", [0.001, 0.1, 0.5, 0.9, 0.9999])
def test_as_many_are_dropped_as_asked_for(dropout):
    kept = cufa.dropout_mask((2, 4, 300, 256), dropout, seed=5)
    share = min(max(round(256 * dropout), 1), 255) / 256
    sigma = np.sqrt(share * (1 - share))
    for axes in ((2, 3), (0, 1, 3), (0, 1, 2)):  # no head, query or key differs from others
        means, size = 1 - kept.mean(axes), kept.size // kept.mean(axes).size
        assert np.abs(means - share).max() < 5.5 * sigma / np.sqrt(size)
    assert kept.all() == cufa.dropout_mask((2, 4, 300, 256), 0.0, seed=5).all() or not kept.all()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(0, 1), (1, 0), (1, 1), (0, 2), (0, 4), (0, 8), (2, 0), (8, 0), (8, 8), (0, 16), (16, 0)],
)
def test_neighbours_are_dropped_independently(rows, columns):
    """Also two scores of one group, whose bytes come from the same words, and two groups with counters side by side."""
    kept = cufa.dropout_mask((1, 2, 512, 512), 0.5, seed=11)
    both = kept[:, :, rows:, columns:] == kept[:, :, : 512 - rows, : 512 - columns]
    assert abs(both.mean() - 0.5) < 5 * 0.5 / np.sqrt(both.size)


def test_seed_number_sequence_and_head_matter():
    shape = 2, 2, 64, 64
    first = cufa.dropout_mask(shape, 0.5, seed=7)
    others = [cufa.dropout_mask(shape, 0.5, seed=seed) for seed in (8, 7 + 2**32, [7, 1])]
    for other in (*others, first[::-1], first[:, ::-1]):
        assert 0.4 < (other == first).mean() < 0.6
    assert (cufa.dropout_mask(shape, 0.5, seed=[7, 2**32]) == first).all()
    large = np.array([2**63, 1], np.uint64)
    assert (cufa.dropout_mask(shape, 0.5, seed=(2**63, 1)) == cufa.dropout_mask(shape, 0.5, seed=large)).all()
    assert (cufa.dropout_mask((1, 2, 30, 50), 0.5, seed=7) == first[:1, :, :30, :50]).all()


OPTIONS = [
    {},
    {"causal": True, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.3], np.float32)},
    {"window": (7, 2), "sink": RNG.standard_normal(4), "softcap": 2.0},
    {"mask": masks.documents([20, 13], causal=False, seqlen=33)},
    {"mask": RNG.random((2, 2, 33, 45)) < 0.5},
    {"causal": True, "seqlens_q": np.array([20, 33]), "seqlens_k": np.array([45, 11])},
    {"score": cufa.score(lambda s, b, h, i, j, t: s + t[h, i % 4], t=RNG.standard_normal((4, 4)).astype(np.float32))},
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fa2", "fa1", "naive"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "full")
def test_the_cpu_path_is_the_reference(options, algorithm):
    keys = 33 if "documents" in str(options.get("mask")) else 45
    q, k, v = make_inputs(2, 4, 2, 33, keys, 8, "float64")
    given = {**options, "dropout": 0.3, "seed": SEED}
    out, lse = cufa.flash_attention(q, k, v, return_lse=True, device="cpu", algorithm=algorithm, **given)
    exact, exact_lse = cufa.attention_reference(q, k, v, return_lse=True, **given)
    np.testing.assert_allclose(out, exact, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-12)
    _, plain = cufa.attention_reference(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(exact_lse, plain)  # the sum is of all weights
    dout = RNG.standard_normal(q.shape)
    found = cufa.flash_attention_backward(dout, q, k, v, out, lse, device="cpu", **given)
    for x, y in zip(found, cufa.attention_reference_backward(dout, q, k, v, **given), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)


def test_the_reference_is_the_definition():
    """P ∘ Z / (1 - p), and its derivative by differences."""
    q, k, v = make_inputs(1, 2, 2, 9, 20, 8, "float64")
    kept = cufa.dropout_mask((1, 2, 9, 20), 0.25, seed=1)
    s = q @ k.mT / np.sqrt(8)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    given = {"dropout": 0.25, "seed": 1}
    np.testing.assert_allclose(cufa.attention_reference(q, k, v, **given), (p * kept / 0.75) @ v, atol=1e-14)
    dout = RNG.standard_normal(q.shape)
    gradients = cufa.attention_reference_backward(dout, q, k, v, **given)
    for place, gradient in enumerate(gradients):
        step = RNG.standard_normal(gradient.shape)
        inputs = [[q, k, v], [q, k, v]]
        for x, sign in zip(inputs, (1, -1), strict=True):
            x[place] = x[place] + sign * 1e-6 * step
        high, low = ((cufa.attention_reference(*x, **given) * dout).sum() for x in inputs)
        np.testing.assert_allclose((gradient * step).sum(), (high - low) / 2e-6, rtol=1e-6)


def test_packed_padded_and_dense_sequences_keep_the_same():
    """v is the identity: out is P ∘ Z / (1 - p), whose zeros are the dropped weights."""
    queries, keys, heads = [5, 40, 0, 20], [24, 17, 3, 24], 2
    q, k = (RNG.standard_normal((4, heads, n, 8)) for n in (40, 24))
    v = np.broadcast_to(np.eye(24), (4, heads, 24, 24)).copy()
    given = {"dropout": 0.5, "seed": 9, "device": "cpu"}
    padded = cufa.flash_attention(q, k, v, seqlens_q=queries, seqlens_k=keys, **given)
    of_sequences = [
        np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(of)])
        for x, of in ((q, queries), (k, keys), (v, keys))
    ]
    begins = np.cumsum([0, *queries]), np.cumsum([0, *keys])
    packed = cufa.flash_attention_varlen(*map(np.ascontiguousarray, of_sequences), *begins, **given)
    mask = cufa.dropout_mask((4, heads, 40, 24), 0.5, seed=9)
    for b, (rows, seen) in enumerate(zip(queries, keys, strict=True)):
        kept = mask[b, :, :rows, :seen]
        np.testing.assert_array_equal(padded[b, :, :rows, :seen] != 0, kept)
        first = sum(queries[:b])
        np.testing.assert_array_equal(packed[first : first + rows].swapaxes(0, 1)[..., :seen] != 0, kept)


#: (algorithm, dtype, head_dim, options): tiles of every width, transposed and not, and every way to add a seed.
EXECUTED = [
    ("fa3", "float16", 64, {"causal": True}),
    ("fa3", "bfloat16", 128, {"window": (60, 4), "sink": RNG.standard_normal(2)}),
    ("fa3", "float16", 256, {"mask": masks.prefix(9)}),
    ("fa3", "float16", 96, {"softcap": 3.0, "seqlens_q": [33, 150], "seqlens_k": [140, 5]}),
    ("fa3", "bfloat16", 64, {"mask": RNG.random((150, 140)) < 0.3}),
    ("fa2", "float16", 64, {"causal": True, "alibi_slopes": np.full(2, 0.1, np.float32)}),
    ("fa2", "bfloat16", 128, {"mask": RNG.random((150, 140)) < 0.3}),
    ("fa2", "float16", 256, {}),
    ("fa2", "float32", 64, {"causal": True}),
    ("fa2", "float32", 256, {"mask": masks.prefix(9)}),
    ("naive", "float32", 40, {"causal": True}),
    ("naive", "float16", 64, {"mask": masks.prefix(9)}),
]


@pytest.mark.emulate
@pytest.mark.sampled(2, each="algorithm")
@pytest.mark.parametrize(("algorithm", "dtype", "head_dim", "options"), EXECUTED)
def test_executed_kernels(algorithm, dtype, head_dim, options):
    q, k, v = make_inputs(2, 2, 1, 150, 140, head_dim, dtype)
    given = {**options, "dropout": 0.3, "seed": SEED}
    done = cufa.emulate(q, k, v, algorithm=algorithm, mode="checked", **given)
    assert not done.findings
    exact, exact_lse = cufa.attention_reference(q, k, v, return_lse=True, **given)
    seen = np.isfinite(exact_lse)
    np.testing.assert_allclose(done.lse[seen], exact_lse[seen], atol=2e-3)
    assert_close(done.out, exact)
    if algorithm == "naive":
        return
    dout = RNG.standard_normal(q.shape).astype(q.dtype)
    back = cufa.emulate_backward(
        dout, q, k, v, done.out, done.lse, algorithm=algorithm, mode="checked", **given
    )
    assert not back.findings
    expected = cufa.attention_reference_backward(dout, q, k, v, **given)
    for name, x in zip(("dq", "dk", "dv"), expected, strict=False):
        assert_close(back.results[name], x)


def assert_close(found, exact):
    rounding = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 1e-5}[str(found.dtype)]
    np.testing.assert_allclose(found.astype(np.float64), exact, atol=rounding * abs(exact).max())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"dropout": 1.0, "seed": 1}, ValueError, "dropout=1.0 must be from 0 to below 1"),
        ({"dropout": -0.1, "seed": 1}, ValueError, "dropout=-0.1"),
        ({"dropout": float("nan"), "seed": 1}, ValueError, "dropout=nan"),
        ({"dropout": True, "seed": 1}, TypeError, "dropout must be a number"),
        ({"dropout": "0.1", "seed": 1}, TypeError, "dropout must be a number"),
        ({"dropout": 0.1}, ValueError, "needs seed="),
        ({"seed": 1}, ValueError, "seed= is given, but dropout is None"),
        ({"dropout": 0.1, "seed": -1}, ValueError, "seed=-1"),
        ({"dropout": 0.1, "seed": 2**64}, ValueError, "seed=18446744073709551616"),
        ({"dropout": 0.1, "seed": 1.5}, TypeError, "seed must be an int"),
        ({"dropout": 0.1, "seed": True}, TypeError, "seed must be an int"),
        ({"dropout": 0.1, "seed": np.zeros(2)}, TypeError, "seed is float64"),
        ({"dropout": 0.1, "seed": np.zeros(2, np.int32)}, TypeError, "seed is int32"),
        ({"dropout": 0.1, "seed": np.zeros(3, np.uint64)}, ValueError, "seed has shape (3,)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["forward", "backward", "varlen", "varlen_backward"])
def test_errors_name_the_argument(call, given, error, words):
    q, k, v = make_inputs(1, 2, 2, 5, 6, 8, "float32")
    out, lse = np.zeros_like(q), np.zeros((1, 2, 5), np.float32)
    packed = [x[0].swapaxes(0, 1) for x in (q, q, k, v, out)]
    calls = {
        "forward": lambda: cufa.flash_attention(q, k, v, **given),
        "backward": lambda: cufa.flash_attention_backward(q, q, k, v, out, lse, **given),
        "varlen": lambda: cufa.flash_attention_varlen(*packed[1:4], [0, 5], [0, 6], **given),
        "varlen_backward": lambda: cufa.flash_attention_varlen_backward(
            *packed, lse[0], [0, 5], [0, 6], **given
        ),
    }
    with pytest.raises(error) as caught:
        calls[call]()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({"causal": True}, (192, 64)),
        ({"causal": True, "dropout": 0.1}, (128, 128)),
        ({"dropout": 0.1}, (192, 64)),
    ],
)
def test_tiles_of_long_calls_on_hopper(options, tiles):
    """Consumers draw: under a causal mask, three consumers with 64 keys were measured slower than two with 128."""
    config = cufa.plan(
        (2, 32, 8192, 128), (2, 8, 8192, 128), dtype="float16", device="sm_90", **options
    ).config
    assert (config.block_q, config.block_kv) == tiles


def test_what_dropout_does_not_go_with_is_named():
    q, k, v = make_inputs(1, 2, 2, 5, 6, 8, "float16")
    with pytest.raises(ValueError, match="dropout= does not go with keys in a cache"):
        cufa.flash_attention(q, k, v, cache_seqlens=[1], dropout=0.1, seed=1)
    for number in (0, 0.0, None):  # of a call without dropout
        seed = None if number is None else 1
        same = cufa.flash_attention(q, k, v, dropout=number, seed=seed)
        np.testing.assert_array_equal(same, cufa.flash_attention(q, k, v))
