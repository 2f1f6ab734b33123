"""ALiBi and sinks: what they mean, forward and backward, on the CPU path and in float64."""

from __future__ import annotations

import numpy as np
import pytest
from backends import backends
from decode_support import make_case
from support import make_inputs, written_out

import cufa
from cufa import masks
from cufa.calls import optional_operands
from cufa.problem.options import resolve_mask

ALGORITHMS = ("fa2", "fa2_noskip", "fa1", "naive")


def numbers(*shape, seed=3):
    return np.random.default_rng(seed).standard_normal(shape)


CASES = [
    {"alibi_slopes": numbers(4)},
    {"alibi_slopes": numbers(2, 4), "causal": True},
    {"sink": numbers(4)},
    {"sink": np.array([-np.inf, 3.0, -2.0, 0.0]), "causal": True},
    {"sink": numbers(4), "alibi_slopes": numbers(2, 4), "softcap": 2.0, "window": (5, 3)},
    {"sink": numbers(4), "alibi_slopes": numbers(4), "mask": masks.prefix([3, 9])},
    {"alibi_slopes": numbers(4), "mask": masks.causal("top-left")},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (33, 20)])
def test_the_reference_says_it_score_by_score(options, seqlen_q, seqlen_k):
    q, k, v = make_inputs(2, 4, 4, seqlen_q, seqlen_k, 8, "float64")
    mask = resolve_mask(options.get("causal", False), options.get("window"), options.get("mask"))
    seen = np.array([[mask.dense(seqlen_q, seqlen_k, b, h) for h in range(4)] for b in range(2)])
    o, lse = cufa.attention_reference(q, k, v, return_lse=True, **options)
    expected = written_out(
        q, k, v, slopes=options.get("alibi_slopes", 0.0), sink=options.get("sink", -np.inf),
        cap=options.get("softcap"), seen=seen, shift=mask.shift(seqlen_q, seqlen_k),
    )  # fmt: skip
    np.testing.assert_allclose(o, expected[0], atol=1e-13)
    np.testing.assert_allclose(lse, expected[1], atol=1e-13)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (33, 20), (260, 260)])
def test_the_cpu_path(options, seqlen_q, seqlen_k):
    q, k, v = make_inputs(2, 4, 2, seqlen_q, seqlen_k, 8, "float64")
    exact = cufa.attention_reference(q, k, v, return_lse=True, **options)
    for algorithm in ALGORITHMS:
        found = cufa.flash_attention(q, k, v, return_lse=True, algorithm=algorithm, device="cpu", **options)
        for x, y in zip(found, exact, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
    dout = numbers(*q.shape)
    for dlse in (None, numbers(*exact[1].shape)):
        gradients = cufa.flash_attention_backward(dout, q, k, v, *exact, dlse=dlse, device="cpu", **options)
        expected = cufa.attention_reference_backward(dout, q, k, v, dlse=dlse, **options)
        assert len(gradients) == len(expected) == (4 if "sink" in options else 3)
        for x, y in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-10)


@pytest.mark.parametrize("options", [CASES[2], CASES[4], CASES[5]])
def test_gradients_are_finite_differences(options):
    """Of a loss that depends on o and on lse; the sink's too."""
    q, k, v = make_inputs(2, 4, 2, 9, 7, 8, "float64")
    dout, dlse = numbers(2, 4, 9, 8), numbers(2, 4, 9, seed=4)

    def loss(q, k, v, sink):
        o, lse = cufa.attention_reference(q, k, v, return_lse=True, **{**options, "sink": sink})
        return (o * dout).sum() + (lse * dlse).sum()

    at = [q, k, v, options["sink"]]
    gradients = cufa.attention_reference_backward(dout, q, k, v, dlse=dlse, **options)
    rng = np.random.default_rng(0)
    for place, gradient in enumerate(gradients):
        for _ in range(4):
            index = tuple(rng.integers(0, n) for n in gradient.shape)
            moved = []
            for step in (1e-5, -1e-5):
                there = [np.array(x) for x in at]
                there[place][index] += step
                moved.append(loss(*there))
            np.testing.assert_allclose((moved[0] - moved[1]) / 2e-5, gradient[index], rtol=1e-6, atol=1e-7)


def test_rows_and_calls_that_see_no_key():
    """Zeros, and the sink as log-sum-exp; what depends on that is the sink's gradient."""
    q, k, v = make_inputs(2, 4, 2, 9, 5, 8, "float64")
    sink, dlse = numbers(4), numbers(2, 4, 9)
    for keys, nothing in ((5, slice(0, 4)), (0, slice(None))):
        k_, v_ = k[:, :, :keys], v[:, :, :keys]
        o, lse = cufa.flash_attention(q, k_, v_, causal=True, sink=sink, return_lse=True, device="cpu")
        assert not o[:, :, nothing].any()
        np.testing.assert_allclose(
            lse[:, :, nothing], np.broadcast_to(sink[:, None], lse[:, :, nothing].shape)
        )
        found = cufa.flash_attention_backward(
            np.ones_like(q), q, k_, v_, o, lse, causal=True, sink=sink, dlse=dlse, device="cpu"
        )
        expected = cufa.attention_reference_backward(
            np.ones_like(q), q, k_, v_, causal=True, sink=sink, dlse=dlse
        )
        for x, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, exact, atol=1e-12)
    np.testing.assert_allclose(found[3], dlse.sum(axis=(0, 2)))


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = make_inputs(1, 4, 2, 9, 5, 8, "float32")
    none = np.full(4, -np.inf, np.float32)
    for options in ({"causal": True}, {}):
        plain = cufa.flash_attention(q, k, v, return_lse=True, device="cpu", **options)
        with_none = cufa.flash_attention(q, k, v, sink=none, return_lse=True, device="cpu", **options)
        for x, y in zip(plain, with_none, strict=True):
            np.testing.assert_array_equal(x, y)
        dout = np.ones_like(q)
        gradients = cufa.flash_attention_backward(
            dout, q, k, v, *with_none, sink=none, device="cpu", **options
        )
        np.testing.assert_array_equal(gradients[3], np.zeros(4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [1e30, 2e38, 3.4e38])
@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
def test_numbers_at_the_end_of_float32_behave_as_1e30(name, value, causal):
    """In units of log2, and times a distance, they would be infinite, and rows NaN."""
    q, k, v = make_inputs(1, 2, 2, 9, 9, 8, "float32")
    dout = v[..., ::-1].copy()
    few = {name: np.array([value, -value], np.float32), "causal": causal}
    as_limit = {**few, name: np.array([1e30, -1e30], np.float32)}
    found = cufa.flash_attention(q, k, v, return_lse=True, device="cpu", **few)
    for results, expected in (
        (found, cufa.attention_reference(q, k, v, return_lse=True, **few)),
        (found, cufa.flash_attention(q, k, v, return_lse=True, device="cpu", **as_limit)),
        (
            cufa.flash_attention_backward(dout, q, k, v, *found, device="cpu", **few),
            cufa.attention_reference_backward(dout, q, k, v, **few),
        ),
    ):
        for x, exact in zip(results, expected, strict=True):
            assert np.isfinite(x).all()
            np.testing.assert_allclose(x, exact, rtol=2e-5, atol=2e-5)
    decoded = cufa.flash_decode(q[:, :, -1:], k, v, device="cpu", **{name: few[name]})
    np.testing.assert_allclose(
        decoded, cufa.decode_reference(q[:, :, -1:], k, v, **{name: few[name]}), atol=1e-5
    )


def test_merging_parts_of_which_one_has_the_sink():
    """As the merging call says: the sink belongs to one part."""
    q, k, v = make_inputs(1, 4, 2, 6, 30, 8, "float64")
    sink = numbers(4)
    whole = cufa.flash_attention(q, k, v, sink=sink, return_lse=True, device="cpu")
    parts = [
        cufa.flash_attention(q, k[:, :, part], v[:, :, part], sink=given, return_lse=True, device="cpu")
        for part, given in ((slice(0, 11), sink), (slice(11, 30), None))
    ]
    merged = cufa.merge_attention_states(*parts[0], *parts[1])
    for x, y in zip(merged, whole, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-14)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3}, {"schedule": "balanced"}, {"window": (9, 0)}]
)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("slopes", [numbers(4), numbers(3, 4)])
def test_decoding(options, tokens, slopes):
    """The sink joins once, however many parts there are, and of a sequence without keys too."""
    q, k, v = make_inputs(3, 4, 2, tokens, 300, 8, "float64")
    given = {"sink": numbers(4), "alibi_slopes": slopes, "cache_seqlens": [0, 17, 300], "softcap": 3.0}
    found = cufa.flash_decode(q, k, v, return_lse=True, device="cpu", **given, **options)
    given["window"] = options.get("window")
    for x, exact in zip(found, cufa.decode_reference(q, k, v, return_lse=True, **given), strict=True):
        np.testing.assert_allclose(x, exact, atol=1e-12)
    np.testing.assert_allclose(found[1][0], np.broadcast_to(given["sink"][:, None], found[1][0].shape))
    for device in ("sm_80", "sm_90"):
        plan = cufa.plan_decode(
            (3, 4, tokens, 64), (3, 2, 300, 64), alibi_slopes=True, sink=True, device=device
        )
        assert plan.constants["ALIBI"] and plan.constants["SINK"] and "ALiBi, sink" in str(plan)
    assert "ALiBi, sink" in str(cufa.plan_decode(q, k, alibi_slopes=slopes, sink=True, device="cpu"))


def test_decoding_without_any_room():
    q, k, v = make_inputs(2, 4, 2, 1, 0, 8, "float32")
    out, lse = cufa.flash_decode(q, k, v, sink=np.arange(4), return_lse=True, device="cpu")
    assert not out.any()
    np.testing.assert_array_equal(lse[..., 0], [[0, 1, 2, 3]] * 2)


@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0)])
def test_decoding_without_sequences_or_heads(batch, heads):
    q, k, v = (np.ones((batch, heads, n, 8), np.float32) for n in (1, 30, 30))
    out, lse = cufa.flash_decode(q, k, v, sink=np.ones(heads), return_lse=True, device="cpu")
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])


def test_numbers_of_other_types_and_layouts():
    q, k, v = make_inputs(2, 4, 2, 9, 9, 8, "float32", layout="bshd")
    expected = cufa.flash_attention(q, k, v, sink=np.arange(4.0), layout="bshd", device="cpu")
    for sink in ([0, 1, 2, 3], np.arange(4), np.arange(8.0, dtype=np.float16)[:4], np.arange(8.0)[::2] / 2):
        np.testing.assert_array_equal(
            cufa.flash_attention(q, k, v, sink=sink, layout="bshd", device="cpu"), expected
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sink": np.ones(3)}, ValueError, r"sink has shape \(3,\): it takes \(heads,\), here \(4,\)"),
        ({"sink": np.ones((2, 4))}, ValueError, r"sink has shape \(2, 4\): it takes \(heads,\)"),
        ({"sink": 1.0}, TypeError, "sink must be an array"),
        ({"sink": ["a"] * 4}, TypeError, "sink is <U1: it takes float32"),
        ({"sink": [[1], [1, 2]]}, TypeError, "sink is no array of numbers"),
        ({"sink": [0, 1, np.nan, 3]}, ValueError, r"sink\[2\] is nan: in float32 .* finite, or -inf for no sink"),
        ({"sink": [0, 1, np.inf, 3]}, ValueError, r"sink\[2\] is inf"),
        ({"alibi_slopes": np.ones((3, 4))}, ValueError,
         r"takes \(heads,\) or \(batch, heads\), here \(4,\) or \(2, 4\)"),
        ({"alibi_slopes": [[1, 2, 3, -np.inf]] * 2}, ValueError, r"alibi_slopes\[0, 3\] is -inf: in float32 .* finite"),
        ({"alibi_slopes": [1, 2, 1e300, 3]}, ValueError, r"alibi_slopes\[2\] is 1e\+300: in float32 it must be finite"),
        ({"alibi_slopes": [True] * 4}, TypeError, "alibi_slopes is bool: it takes float32"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_none(options, error, message):
    q, k, v = make_inputs(2, 4, 2, 9, 9, 8, "float32")
    out, lse = np.zeros_like(q), np.zeros((2, 4, 9), np.float32)
    with pytest.raises(error, match=message):
        cufa.flash_attention(q, k, v, **options)
    with pytest.raises(error, match=message):
        cufa.flash_attention_backward(out, q, k, v, out, lse, **options)
    with pytest.raises(error, match=message):
        cufa.plan(q, k, **options)


@pytest.mark.parametrize("lengths", [{}, {"seqlens_q": [5, 0]}, {"seqlens_q": [9, 3]}])
def test_a_sink_where_there_are_no_keys(lengths):
    """What a GPU writes without a launch is what the reference says."""
    q, k = np.ones((2, 4, 9, 8)), np.ones((2, 2, 0, 8))
    sink = np.array([0.5, -1.0, 2.0, -np.inf])
    dlse = np.random.default_rng(0).standard_normal((2, 4, 9))
    given = {"sink": sink, "dlse": dlse, **{name: np.array(x) for name, x in lengths.items()}}
    lse, dsink = np.empty((2, 4, 9)), np.empty(4)
    optional_operands.fill_sink_alone(given, {"lse": lse}, np)
    optional_operands.fill_sink_alone(given, {"dsink": dsink}, np)
    np.testing.assert_array_equal(
        lse, cufa.attention_reference(q, k, k, sink=sink, return_lse=True, **lengths)[1]
    )
    exact = cufa.attention_reference_backward(q, q, k, k, dlse=dlse, sink=sink, **lengths)[3]
    np.testing.assert_allclose(dsink, exact, atol=1e-12)
    plan = cufa.plan((1, 2, 64, 64), sink=True, alibi_slopes=np.ones(2), softcap=3.0, device="cpu")
    assert plan.problem.scores_text == "full, softcap 3, ALiBi, sink"
    assert type(plan.problem).from_json(plan.problem.as_json()) == plan.problem


@pytest.mark.parametrize("length", [0, 2])
def test_decoding_rows_without_keys_and_without_a_sink_are_zeros(length):
    """A sink of -inf is none; beside it heads with a sink. The first of four tokens see no key."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 4, 16)).astype(np.float16)
    k, v = (rng.standard_normal((1, 1, 5, 16)).astype(np.float16) for _ in "kv")
    options = {"cache_seqlens": [length], "sink": np.array([-np.inf, 1], np.float32), "return_lse": True}
    out, lse = cufa.flash_decode(q, k, v, **options, device="cpu")
    expected, expected_lse = cufa.decode_reference(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@backends("emulate", "gpu")
def test_kernels_bound_numbers_at_the_end_of_float32(backend, algorithm, name, causal, monkeypatch):
    """Of arrays on a GPU the host sees no number: kernels take 3.4e38 as 1e30. Row 0 sees no key, or one."""
    monkeypatch.setattr(optional_operands, "bounded", lambda x: x)
    q, k, v = make_inputs(1, 2, 2, 66, 65 + (not causal), 64, "float16")
    largest = np.finfo(np.float32).max
    few = {name: np.array([largest, -largest], np.float32), "causal": causal}
    found = backend.forward(q, k, v, algorithm=algorithm, **few)
    exact = cufa.attention_reference(q, k, v, return_lse=True, **few)
    np.testing.assert_allclose(found.out, exact[0], atol=4e-3)
    np.testing.assert_allclose(found.lse, exact[1], rtol=1e-6, atol=1e-4)
    for kernel in ("decode_split", "decode_split_tma"):
        case = make_case([9, 150], heads=2, **{name: few[name]})
        done = backend.decode(case, kernel)
        np.testing.assert_allclose(done.out, case.expected[0], atol=4e-3)
        np.testing.assert_allclose(done.lse, case.expected[1], rtol=1e-6, atol=1e-4)
    if name == "sink":
        gradients = backend.backward(q, q, k, v, found.out, found.lse, algorithm=algorithm, **few)
        expected = cufa.attention_reference_backward(q, q, k, v, **few)
        for result, exact in zip(gradients.results.values(), expected, strict=True):
            np.testing.assert_allclose(result, exact, atol=2e-2)
