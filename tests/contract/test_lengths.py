"""Padded and packed sequences: each is the same as a call of its own, and what is behind it is never read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths_support import LENGTHS, MAKE, OPTIONS
from support import make_inputs

import cufa
from cufa import masks
from cufa.plan.dense import FORWARD
from cufa.problem.bits import Bits
from cufa.problem.lengths import Lengths, Packed, Padded
from cufa.problem.problem import Problem


def of_sequence(options, b):
    """The options of a call on one sequence."""
    found = dict(options)
    if "mask" in found:
        found["mask"] = found["mask"].at(b, 0)
    if np.ndim(found.get("alibi_slopes")) == 2:
        found["alibi_slopes"] = found["alibi_slopes"][b]
    return found


def of_one(x, kind, b, part, per_row=False):
    """A sequence's part of an array, as the array of a call on this sequence. ``per_row``: log-sum-exps."""
    if kind == "padded":
        return x[b : b + 1, :, part]
    return x[None, :, part] if per_row else x[part].swapaxes(0, 1)[None]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_a_sequence_is_a_call_of_its_own(kind, lengths, options):
    """In the reference. What NumPy and kernels make of these calls: test_ragged.py."""
    case, dsink = MAKE[kind](lengths, options, 8, "float32"), np.zeros(4)
    counts = np.transpose(LENGTHS[lengths])
    begins = np.cumsum(counts, axis=0) - counts if kind == "packed" else np.zeros_like(counts)
    for b, parts in enumerate(zip(begins, begins + counts, strict=True)):
        rows, keys = (slice(*x) for x in zip(*parts, strict=True))
        places = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
        given = (
            of_one(x, kind, b, part) for x, part in zip(case.inputs, (rows, rows, keys, keys), strict=False)
        )
        dout, q, k, v = given
        own = of_sequence(case.options, b)
        out, lse = cufa.attention_reference(q, k, v, return_lse=True, **own)
        dlse = of_one(case.dlse, kind, b, rows, per_row=True)
        found = cufa.attention_reference_backward(dout, q, k, v, dlse=dlse, **own)
        for (name, part), x in zip(places.items(), (out, *found[:3]), strict=True):
            np.testing.assert_allclose(of_one(case.expected[name], kind, b, part), x, atol=1e-12)
        np.testing.assert_allclose(of_one(case.expected["lse"], kind, b, rows, per_row=True), lse, atol=1e-12)
        dsink = dsink + sum(found[3:])
    np.testing.assert_allclose(case.expected.get("dsink", np.zeros(4)), dsink, atol=1e-12)


def test_lengths_of_queries_or_of_keys_alone():
    q, k, v = make_inputs(3, 4, 2, 33, 40, 8, "float32")
    for lengths in ({"seqlens_q": [3, 33, 0]}, {"seqlens_k": [3, 40, 0]}):
        out = cufa.flash_attention(q, k, v, causal=True, device="cpu", **lengths)
        np.testing.assert_allclose(out, cufa.attention_reference(q, k, v, causal=True, **lengths), atol=1e-5)


def test_columns_of_padded_sequences_are_counted_from_their_own_first_row():
    """Vectors are as long as the arrays; a sequence uses its part of them."""
    q, k, v = make_inputs(3, 4, 2, 40, 40, 8, "float64")
    mask = masks.documents([[10, 20, 10], [25, 0, 15], [5, 5, 5]])
    lengths = {"seqlens_q": [40, 30, 0], "seqlens_k": [40, 30, 12]}
    out = cufa.flash_attention(q, k, v, mask=mask, device="cpu", **lengths)
    np.testing.assert_allclose(out, cufa.attention_reference(q, k, v, mask=mask, **lengths), atol=1e-12)
    second = cufa.attention_reference(
        q[1:2, :, :30], k[1:2, :, :30], v[1:2, :, :30], mask=masks.documents([25, 5])
    )
    np.testing.assert_allclose(out[1:2, :, :30], second, atol=1e-12)


# --- Packed -----------------------------------------------------------------------------------------------


def packed_case(queries, keys, tail, dtype="float64"):
    """Inputs of some sequences with room behind the last, which holds NaN."""
    cu_q, cu_k = (np.append(0, np.cumsum(n)).astype(np.int32) for n in (queries, keys))
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, cu_q[-1] + tail, 4, 8)).astype(dtype)
    k, v = rng.standard_normal((2, cu_k[-1] + tail, 2, 8)).astype(dtype)
    for x, n in ((q, cu_q[-1]), (dout, cu_q[-1]), (k, cu_k[-1]), (v, cu_k[-1])):
        x[n:] = np.nan
    return dout, q, k, v, cu_q, cu_k


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 3), st.booleans()
)
def test_any_lengths_as_padded_and_as_packed(lengths, tail, causal):
    queries, keys = ([pair[n] for pair in lengths] for n in (0, 1))
    _, q, k, v, cu_q, cu_k = packed_case(queries, keys, tail)
    packed, lse = cufa.flash_attention_varlen(
        q, k, v, cu_q, cu_k, causal=causal, return_lse=True, device="cpu"
    )
    padded = [np.zeros((len(lengths), 9, *x.shape[1:])) for x in (q, k, v)]
    for b in range(len(lengths)):
        for x, whole, cu in zip(padded, (q, k, v), (cu_q, cu_k, cu_k), strict=True):
            x[b, : cu[b + 1] - cu[b]] = whole[cu[b] : cu[b + 1]]
    out, of_padded = cufa.flash_attention(
        *padded, causal=causal, seqlens_q=queries, seqlens_k=keys, layout="bshd", return_lse=True,
        device="cpu",
    )  # fmt: skip
    for b in range(len(lengths)):
        rows = slice(cu_q[b], cu_q[b + 1])
        np.testing.assert_allclose(packed[rows], out[b, : queries[b]], atol=1e-13)
        np.testing.assert_allclose(lse[:, rows], of_padded[b, :, : queries[b]], atol=1e-13)


@pytest.mark.parametrize("algorithm", ["fa1", "naive"])
def test_other_algorithms_and_given_results(algorithm):
    dout, q, k, v, cu_q, cu_k = packed_case((5, 9), (7, 9), 2, "float32")
    out = np.empty_like(q)
    assert cufa.flash_attention_varlen(q, k, v, cu_q, cu_k, algorithm=algorithm, out=out, device="cpu") is out
    np.testing.assert_allclose(out, cufa.attention_varlen_reference(q, k, v, cu_q, cu_k), atol=1e-5)
    _, lse = cufa.flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, device="cpu")
    results = [np.empty_like(x) for x in (q, k, v)]
    found = cufa.flash_attention_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, device="cpu",
        **dict(zip(("dq", "dk", "dv"), results, strict=True)),
    )  # fmt: skip
    assert all(x is y for x, y in zip(found, results, strict=True))


def matrices():
    """Masks of up to 3 sequences, 4 query and 2 key/value heads, 12 queries and 14 keys, and the booleans of each."""
    rng = np.random.default_rng(1)
    runs = np.sort(rng.integers(0, 12, (3, 2, 14, 4)), axis=-1).astype(np.int32)
    seen = rng.random((3, 4, 12, 14)) < 0.7
    by_key = np.tri(12, 14, 2, dtype=bool) & (np.arange(14) % 5 != 2)
    yield "of query heads", seen, seen
    yield "of one sequence's key heads", seen[:1, :2], seen[:1, :2]
    yield "of keys", seen[:, :1, :1], np.broadcast_to(seen[:, :1, :1], (3, 1, 12, 14))
    yield "bits", masks.from_dense(seen[0, 0]), seen[:1, :1]
    yield "a band", np.tri(12, 14, 2, dtype=bool), np.tri(12, 14, 2, dtype=bool)[None, None]
    yield "columns", by_key, by_key[None, None]
    for mask in (masks.from_flashmask(runs, False), masks.from_flashmask(runs[:, :1, :, :1], True)):
        yield str(mask), mask, None


@pytest.mark.parametrize(("mask", "seen"), [pytest.param(*x[1:], id=x[0]) for x in matrices()])
def test_a_packed_sequence_reads_the_first_rows_and_keys_of_its_matrix(mask, seen):
    """Distances are measured as in a call with this sequence alone."""
    rows, keys = (9, 0, 11), (13, 4, 10)
    dout, q, k, v, cu_q, cu_k = packed_case(rows, keys, 3)
    scores = {"alibi_slopes": np.array([0.1, 0.3, -0.1, 0.2], np.float32)}
    options = {"mask": mask, **scores, "device": "cpu"}
    out, lse = cufa.flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    found = cufa.flash_attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **options)
    for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
        if seen is None:  # a causal band's diagonal is that of the sequence
            own_seen = np.array([[mask.dense(n, m, b, h) for h in (0, 0, 1, 1)]])
        else:
            own_seen = np.repeat(seen[b % len(seen), :, :n, :m], 4 // seen.shape[1], axis=0)[None]
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = [x[p].swapaxes(0, 1)[None] for x, p in ((dout, of_q), (q, of_q), (k, of_k), (v, of_k))]
        own_mask = Bits.of(own_seen)
        exact, exact_lse = cufa.attention_reference(*own[1:], mask=own_mask, return_lse=True, **scores)
        np.testing.assert_allclose(out[of_q], exact[0].swapaxes(0, 1), atol=1e-12)
        np.testing.assert_allclose(lse[:, of_q], exact_lse[0], atol=1e-12)
        exact = cufa.attention_reference_backward(*own, mask=own_mask, **scores)
        for x, place, y in zip(found, (of_q, of_k, of_k), exact, strict=True):
            np.testing.assert_allclose(x[place], y[0].swapaxes(0, 1), atol=1e-11)


def test_documents_are_packed_sequences():
    lengths = [10, 0, 25, 5]
    _, q, k, v, cu, _ = packed_case(lengths, lengths, 0)
    packed = cufa.flash_attention_varlen(q, k, v, cu, cu, causal=True, device="cpu")
    dense = cufa.flash_attention(
        q[None], k[None], v[None], mask=masks.documents(lengths), layout="bshd", device="cpu"
    )
    np.testing.assert_allclose(packed, dense[0], atol=1e-13)


# --- What a problem knows of them -------------------------------------------------------------------------


def test_counts_text_and_json():
    plan = cufa.plan(
        (3, 4, 33, 8), (3, 2, 40, 8), seqlens_q=[33, 0, 20], seqlens_k=[40, 7, 10], causal=True, device="cpu"
    )
    problem = plan.problem
    assert problem.lengths == Padded((33, 0, 20), (40, 7, 10)) and problem.tokens == (53, 57)
    visible = sum(np.tril(np.ones((n, m)), m - n).sum() for n, m in ((33, 40), (20, 10)))
    assert problem.all_visible_scores == 4 * visible and problem.flops == 4 * 8 * 4 * visible
    assert "padded, 0 to 33 queries, 7 to 40 keys" in str(plan)
    assert Problem.from_json(json.loads(json.dumps(problem.as_json()))) == problem
    packed = Packed(60, 60, (33, 0, 20), (40, 7, 10))
    assert Lengths.from_json(json.loads(json.dumps(packed.as_json()))) == packed
    assert str(packed) == "packed, 0 to 33 queries, 7 to 40 keys" and packed.known
    unknown = Packed(60, 70)
    assert (
        not unknown.known
        and "lengths on the GPU" in str(unknown)
        and "lengths on the GPU" in str(Padded(on_host=False))
    )
    problem = Problem(5, 4, 2, 60, 70, 8, "float16", lengths=unknown)
    assert (
        problem.all_visible_scores == 4 * 60 * 70 and problem.shapes[0] == (1, 4, 60, 8) and not problem.known
    )


def test_a_packed_grid_has_room_for_every_sequence():
    """Whatever the lengths: block begin // size + b is the first of sequence b."""
    rng = np.random.default_rng(0)
    for size in (16, 64):
        for lengths in rng.integers(0, 200, (50, 7)):
            cu = np.append(0, np.cumsum(lengths))
            packed = Packed(int(cu[-1]) + 5, 9)
            first = cu // size + np.arange(8)
            assert (np.diff(first) >= -(-lengths // size)).all()
            assert packed.blocks(size, 7, 0) - first[-1] >= -(-5 // size)


def test_a_plain_call_does_not_carry_them():
    """The key that a seen call is found by is as short as it was."""
    assert FORWARD.in_order({"q": 1, "k": 2, "v": 3}) == [1, 2, 3, None, None]
    given = FORWARD.in_order({"q": 1, "sink": 4})
    assert len(given) == len(FORWARD.all_operands) and [x for x in given if x is not None] == [1, 4]


# --- What is wrong ----------------------------------------------------------------------------------------

PADDED = [
    ({"seqlens_q": [1, 2]}, ValueError, r"seqlens_q has shape \(2,\): it takes \(batch,\), here \(3,\)"),
    (
        {"seqlens_q": [1, 2, 10]},
        ValueError,
        r"seqlens_q\[2\] is 10: it must be from 0 to 9, the size of the arrays",
    ),
    ({"seqlens_k": [1, -2, 3]}, ValueError, r"seqlens_k\[1\] is -2: it must be from 0"),
    ({"seqlens_k": [2**40, 2, 3]}, ValueError, r"seqlens_k\[0\] is 1099511627776: int32"),
    ({"seqlens_k": [1.0, 2.0, 3.0]}, TypeError, "seqlens_k is float64: it takes int32; convert with"),
    ({"seqlens_k": 3}, TypeError, "seqlens_k must be an array"),
]


@pytest.mark.parametrize(("options", "error", "message"), PADDED)
@pytest.mark.parametrize("call", [cufa.flash_attention, cufa.plan])
def test_lengths_that_are_none(call, options, error, message):
    x = np.ones((3, 2, 9, 8), np.float32)
    with pytest.raises(error, match=message):
        call(x, x, x, **options)


Q = np.ones((10, 4, 8), np.float32)
PACKED = [
    ((Q, Q, Q, [0, 5, 4, 10], [0, 1, 2, 3]), {}, ValueError,
     r"cu_seqlens_q\[2\] is 4, less than cu_seqlens_q\[1\], 5: cumulative lengths"),
    ((Q, Q, Q, [0, 5], [1, 5]), {}, ValueError, r"cu_seqlens_k\[0\] is 1: the first sequence begins at 0"),
    ((Q, Q, Q, [0, 11], [0, 10]), {}, ValueError, r"cu_seqlens_q\[-1\] is 11 but q has 10 rows"),
    ((Q, Q, Q, [0, 5], [0, 11]), {}, ValueError, r"cu_seqlens_k\[-1\] is 11 but k has 10 rows"),
    ((Q, Q, Q, [0, 5], [0, 5, 6]), {}, ValueError, r"cu_seqlens_k has shape \(3,\): it takes .*here \(2,\)"),
    ((Q, Q, Q, [[0, 5]], [0, 5]), {}, ValueError, r"cu_seqlens_q has shape \(1, 2\): it takes \(sequences \+ 1,\)"),
    ((Q, Q, Q, [], []), {}, ValueError, r"cu_seqlens_q has shape \(0,\)"),
    ((Q, Q, Q, [0.0, 5.0], [0, 5]), {}, TypeError, "cu_seqlens_q is float64: it takes int32; convert"),
    ((Q, Q, Q, None, [0, 5]), {}, TypeError, "cu_seqlens_q is None: pass where each sequence begins"),
    ((Q[None], Q, Q, [0, 5], [0, 5]), {}, ValueError, r"q has shape \(1, 10, 4, 8\); packed arrays have three axes"),
    ((Q, Q, Q[:9], [0, 5], [0, 5]), {}, ValueError, r"v has shape \(9, 4, 8\) but k has \(10, 4, 8\)"),
    ((Q, Q[:, :3], Q[:, :3], [0, 5], [0, 5]), {}, ValueError, "q has 4 heads and k has 3"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"out": Q[:9]}, ValueError, r"out has shape \(9, 4, 8\) but the result has"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"mask": masks.documents([2, 2])}, ValueError,
     "mask, .* has numbers for 4 keys but a packed sequence has up to 5: pad it"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"mask": np.eye(4, 7, dtype=bool)[::-1]}, ValueError,
     "is a matrix of 4 queries and 7 keys, but a packed sequence has up to 5 queries and 5 keys: pad it"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"mask": np.ones((2, 1, 1, 5), bool)}, ValueError,
     r"mask has shape \(2, 1, 1, 5\): each axis has size 1, or the size in .* here \(1, 4, 5, 5\)"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"mask": masks.prefix([1, 2])}, ValueError, "is of 2 sequences but k has 1"),
    ((Q, Q, Q, [0, 5], [0, 5]), {"sink": [1.0]}, ValueError, r"sink has shape \(1,\): it takes \(heads,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "error", "message"), PACKED)
def test_packed_calls_that_are_none(given, options, error, message):
    with pytest.raises(error, match=message):
        cufa.flash_attention_varlen(*given, **options)
    if not options.keys() & {"out"}:
        lse = np.zeros((4, 10), np.float32)
        with pytest.raises((error, ValueError), match=f"{message}|dout|out has shape|q has shape"):
            cufa.flash_attention_varlen_backward(Q, *given[:3], Q, lse, *given[3:], **options)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [case for case in PACKED if case[3].startswith(("cu_seqlens", "q has shape"))],
)
def test_the_reference_refuses_what_packed_calls_do(given, options, error, message):
    message = message.replace("is None: pass where each sequence begins", "")
    for reference, first in (
        (cufa.attention_varlen_reference, ()),
        (cufa.attention_varlen_reference_backward, (Q,)),
    ):
        with pytest.raises((error, ValueError), match=message):
            reference(*first, *given, **options)


def test_the_log_sum_exp_of_a_packed_backward():
    with pytest.raises(ValueError, match=r"dlse has shape \(4, 11\).*\(heads, total_q\) = \(4, 10\)"):
        cufa.attention_varlen_reference_backward(Q, Q, Q, Q, [0, 5], [0, 5], dlse=np.zeros((4, 11)))
    with pytest.raises(
        ValueError, match=r"lse has shape \(10, 4\); it takes one number per query, \(heads, total_q\)"
    ):
        cufa.flash_attention_varlen_backward(Q, Q, Q, Q, Q, np.zeros((10, 4), np.float32), [0, 5], [0, 5])
