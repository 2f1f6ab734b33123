"""What every builder of cufa.masks says, against its own words, on the CPU path and back from its matrix."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS
from support import assert_attention, make_inputs

import cufa
from cufa import masks
from cufa.problem.bits import Bits
from cufa.problem.columns import Columns
from cufa.problem.mask import Band, Mask

SIDE = st.integers(1, 40)
SIZES = (1, 7, 63, 64, 65, 127, 200, 257)
LENGTHS = [(n, n) for n in SIZES] + [(7, 64), (64, 7), (127, 200), (257, 65), (1, 257), (200, 1)]


# --- What each builder says, score by score ---------------------------------------------------------------


def matrix(seqlen_q, seqlen_k, sees):
    """From ``sees(i, p, j)`` of rows, of their places among the keys, and of keys."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    return np.broadcast_to(sees(i, i + seqlen_k - seqlen_q, j), (seqlen_q, seqlen_k))


def cut(n, rng, most=5):
    """Lengths of some documents that make n tokens; some have none."""
    ends = np.sort(rng.integers(0, n + 1, most - 1))
    return np.diff(ends, prepend=0, append=n)


def text_of(lengths, token):
    """Which text a token is of; -1 before the first, and the number of texts past the last."""
    ends = np.cumsum(lengths)
    return np.where(token < 0, -1, np.searchsorted(ends, token, side="right"))


def prefix(n, m, rng):
    length = int(rng.integers(0, m + 2))
    return masks.prefix(length), lambda i, p, j: (j < length) | (j <= p)


def streaming(n, m, rng):
    keep, window = (int(x) for x in rng.integers(0, 20, 2))
    return masks.streaming(keep, window), lambda i, p, j: (j <= p) & ((j < keep) | (p - j <= window))


def global_window(n, m, rng):
    tokens, left, right = (int(x) for x in rng.integers(0, 20, 3))
    return masks.global_window(
        tokens, left, right
    ), lambda i, p, j: (j < tokens) | ((p < tokens) & (tokens > 0)) | ((p - left <= j) & (j <= p + right))


def documents(n, m, rng):
    lengths = cut(m, rng)
    return masks.documents(lengths), lambda i, p, j: (text_of(lengths, p) == text_of(lengths, j)) & (j <= p)


def two_way_documents(n, m, rng):
    lengths = cut(m, rng).tolist()
    return masks.documents(lengths, causal=False), lambda i, p, j: text_of(lengths, p) == text_of(lengths, j)


def chunks(n, m, rng):
    size = int(rng.integers(1, 40))
    return masks.chunks(size), lambda i, p, j: (p // size == j // size) & (j <= p)


def shared_question(n, m, rng):
    question, *answers = cut(m, rng).tolist()
    return (
        masks.shared_question(question, answers),
        lambda i, p, j: (
            (j <= p)
            & ((j < question) | (text_of([question, *answers], p) == text_of([question, *answers], j)))
        ),
    )


def evict(n, m, rng):
    rows = rng.integers(-3, n + 3, m)
    return masks.evict(rows), lambda i, p, j: (j <= p) & (i < rows[j])


def columns(n, m, rng):
    lo1, hi1, lo2, hi2 = rng.integers(-3, n + 3, (4, m))
    return masks.columns(
        lo1, hi1, lo2, hi2, window=(9, None)
    ), lambda i, p, j: (j >= p - 9) & ~((lo1[j] <= i) & (i < hi1[j])) & ~((lo2[j] <= i) & (i < hi2[j]))


def flashmask(vectors, causal, hidden):
    def make(n, m, rng):
        x = rng.integers(0, n + 1, (1, 1, m, vectors))
        return masks.from_flashmask(
            x, causal
        ), lambda i, p, j: ~hidden(i, *np.moveaxis(x[0, 0][j], -1, 0)) & ((j <= p) | (not causal))

    return make


BUILDERS = {
    "prefix": prefix, "streaming": streaming, "global_window": global_window, "documents": documents,
    "two-way documents": two_way_documents, "chunks": chunks, "shared_question": shared_question,
    "evict": evict, "columns": columns, "flashmask causal 1": flashmask(1, True, lambda i, lts: i >= lts),
    "flashmask causal 2": flashmask(2, True, lambda i, lts, lte: (i >= lts) & (i < lte)),
    "flashmask 2": flashmask(2, False, lambda i, lts, ute: (i >= lts) | (i < ute)),
    "flashmask 4": flashmask(4, False, lambda i, a, b, c, d: ((i >= a) & (i < b)) | ((i >= c) & (i < d))),
}  # fmt: skip


@pytest.fixture(params=BUILDERS)
def build(request):
    """(mask, matrix) of some lengths."""

    def made(seqlen_q, seqlen_k, seed=0):
        rng = np.random.default_rng([seed, seqlen_q, seqlen_k])
        mask, sees = BUILDERS[request.param](seqlen_q, seqlen_k, rng)
        return mask, matrix(seqlen_q, seqlen_k, sees)

    return made


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_a_builder_is_its_matrix(build, seqlen_q, seqlen_k):
    mask, seen = build(seqlen_q, seqlen_k)
    assert mask.misfit(3, 2, seqlen_q, seqlen_k) is None
    np.testing.assert_array_equal(mask.dense(seqlen_q, seqlen_k), seen)
    assert mask.visible_scores(seqlen_q, seqlen_k) == seen.sum()
    np.testing.assert_array_equal(mask.visible_per_key(seqlen_q, seqlen_k), seen.sum(axis=0))
    around = mask.visible(np.arange(-2, seqlen_q + 2), np.arange(-2, seqlen_k + 2), seqlen_q, seqlen_k)
    np.testing.assert_array_equal(around, np.pad(seen, 2))


@pytest.mark.sampled(dated=8)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.slow
def test_forward_and_backward_on_the_cpu(build, seqlen_q, seqlen_k):
    mask, _ = build(seqlen_q, seqlen_k)
    q, k, v = make_inputs(2, 4, 2, seqlen_q, seqlen_k, 8, "float32")
    out, lse = cufa.flash_attention(q, k, v, mask=mask, return_lse=True, device="cpu")
    assert_attention(out, lse, q, k, v, mask=mask)
    dout = np.random.default_rng(1).standard_normal(out.shape, np.float32)
    results = cufa.flash_attention_backward(dout, q, k, v, out, lse, mask=mask, device="cpu")
    expected = cufa.attention_reference_backward(dout, q, k, v, mask=mask)
    for found, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2_noskip", "naive"])
def test_every_algorithm_of_the_cpu(build, algorithm):
    mask, _ = build(127, 200)
    q, k, v = make_inputs(1, 2, 1, 127, 200, 8, "float64")
    out = cufa.flash_attention(q, k, v, mask=mask, algorithm=algorithm, device="cpu")
    np.testing.assert_allclose(out, cufa.attention_reference(q, k, v, mask=mask), atol=1e-12)


def test_what_is_not_seen_may_be_anything(build):
    """NaN in keys and values that nobody sees, or that some do not."""
    mask, seen = build(65, 65)
    q, k, v = make_inputs(1, 2, 2, 65, 65, 8, "float64")
    unseen = np.flatnonzero(~seen.any(axis=0))
    if len(unseen):
        k[:, :, unseen], v[:, :, unseen] = np.nan, np.inf
    out = cufa.flash_attention(q, k, v, mask=mask, device="cpu")
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, cufa.attention_reference(q, k, v, mask=mask), atol=1e-12)


def test_text_json_and_equality(build):
    mask, _ = build(65, 65)
    again, _ = build(65, 65)
    other, _ = build(65, 65, seed=1)
    assert mask == again and hash(mask) == hash(again) and str(mask) == str(again) and mask != other
    assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask
    problem = cufa.plan((1, 2, 65, 8), mask=mask, device="cpu").problem
    assert type(problem).from_json(json.loads(json.dumps(problem.as_json()))) == problem


def test_gpu_kernels_refuse_by_name(build):
    mask, _ = build(65, 65, seed=1)
    plan = cufa.plan((1, 2, 65, 64), mask=mask, device="sm_90")
    assert plan.spec.name == "fa3_forward"
    assert cufa.plan_backward((1, 2, 65, 64), mask=mask, device="sm_90").spec.name == "fa3_backward"
    wide = cufa.plan_backward((1, 2, 65, 136), mask=mask, device="sm_90")
    assert wide.spec.name == "fa3_backward_wide"
    with pytest.raises(ValueError, match=r"fa1_forward serves band masks, not masks .*Fix: the CPU"):
        cufa.plan((1, 2, 65, 136), mask=mask, algorithm="fa1", device="sm_90")
    assert cufa.plan_backward((1, 2, 65, 64), mask=mask, device="sm_80").spec.name == "fa2_backward"
    with pytest.raises(ValueError, match=r"fa2_backward has not run on a GPU with a fixed order and masks"):
        cufa.plan_backward((1, 2, 65, 64), mask=mask, deterministic=True, device="sm_80")


@pytest.mark.parametrize(("diagonal", "shift"), [("bottom-right", 4), ("top-left", 0), (-3, -3)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **where: masks.window(None, None, **where),
        lambda **where: masks.window(2, 1, **where),
        masks.causal,
        lambda **where: masks.prefix(2, **where),
        lambda **where: masks.streaming(2, 1, **where),
        lambda **where: masks.global_window(2, 1, 1, **where),
        lambda **where: masks.chunks(3, **where),
        lambda **where: masks.documents([4, 5], **where),
        lambda **where: masks.documents([4, 5], causal=False, **where),
        lambda **where: masks.shared_question(4, [2, 3], **where),
        lambda **where: masks.evict(np.arange(9), **where),
        lambda **where: masks.columns(np.arange(9), np.arange(9), **where),
        lambda **where: masks.columns(np.arange(9), np.arange(9), causal=True, **where),
    ],
)
def test_the_diagonal_is_where_queries_stand_whatever_is_bounded(make, diagonal, shift):
    """What ALiBi measures from, with nothing on either side of it too."""
    assert make(diagonal=diagonal).shift(5, 9) == shift


# --- From a matrix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_every_builder_comes_back_from_its_matrix(build, seqlen_q, seqlen_k):
    _, seen = build(seqlen_q, seqlen_k)
    np.testing.assert_array_equal(masks.from_dense(seen).dense(seqlen_q, seqlen_k), seen)


@given(st.data())
def test_a_band_comes_back_as_the_same_scores(data):
    band, seqlen_q, seqlen_k = data.draw(BANDS), data.draw(SIDE), data.draw(SIDE)
    seen = band.dense(seqlen_q, seqlen_k)
    found = masks.from_dense(seen)
    np.testing.assert_array_equal(found.dense(seqlen_q, seqlen_k), seen)
    assert isinstance(found, Band) or not seen.any()


@pytest.mark.parametrize(
    "lengths", [{}, {"seqlens_k": [4]}, {"seqlens_q": [4]}, {"seqlens_q": [5], "seqlens_k": [3]}]
)
@pytest.mark.parametrize("hidden", [(3, 1), (0, 1), None])
def test_a_matrix_means_itself_whatever_the_lengths(lengths, hidden):
    """Row i and column j of the matrix, not counted from the last key of a sequence."""
    seen = np.tri(6, dtype=bool) if hidden else np.ones((6, 6), bool)
    seen[hidden or (0, 5)] = False
    mask = masks.from_dense(seen)
    assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask
    q, k, v = make_inputs(1, 2, 1, 6, 6, 8, "float32")
    of_keys = lengths.get("seqlens_k", [6])[0]
    s = np.where(seen[:, :of_keys], np.einsum("hqd,kd->hqk", q[0], k[0, 0, :of_keys]) * 8**-0.5, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    exact = (p / p.sum(axis=-1, keepdims=True)) @ v[0, 0, :of_keys]
    exact[:, lengths.get("seqlens_q", [6])[0] :] = 0
    for found in (
        cufa.flash_attention(q, k, v, mask=mask, device="cpu", **lengths),
        cufa.attention_reference(q, k, v, mask=mask, **lengths),
    ):
        np.testing.assert_allclose(found[0], exact, atol=1e-6)


@pytest.mark.parametrize(
    "seen",
    [np.ones((6, 6), bool), np.tri(6, dtype=bool), np.tri(6, dtype=bool) ^ np.tri(6, k=-2, dtype=bool)],
)
def test_a_matrix_of_other_lengths_is_refused(seen):
    for mask in (masks.from_dense(seen), Mask.from_json(masks.from_dense(seen).as_json())):
        for seqlen_q, seqlen_k in ((4, 6), (6, 4), (6, 7), (7, 7)):
            q, k, v = make_inputs(1, 1, 1, seqlen_q, seqlen_k, 8, "float32")
            message = f"a matrix of 6 queries and 6 keys, not of {seqlen_q} queries and {seqlen_k} keys"
            for attend in (cufa.flash_attention, cufa.attention_reference, cufa.plan):
                with pytest.raises(ValueError, match=message):
                    attend(q, k, v, mask=mask)
        q, k, v = (x[0].swapaxes(0, 1) for x in make_inputs(1, 1, 1, 6, 6, 8, "float32"))
        with pytest.raises(ValueError, match="not of packed sequences"):
            cufa.flash_attention_varlen(q, k, v, [0, 6], [0, 6], mask=mask, device="cpu")


@pytest.mark.parametrize("diagonal", [2**30, 2**30 - 3, -(2**30)])
def test_the_farthest_diagonals_show_what_their_definition_says(diagonal):
    """A row's position is nowhere near the open end of a run: with a diagonal near 2**31 - 1 every key was seen."""
    for mask in (
        masks.chunks(3, diagonal), masks.documents([3, 2], diagonal=diagonal),
        masks.documents([3, 2], causal=False, diagonal=diagonal), masks.shared_question(2, [2, 1], diagonal=diagonal),
    ):  # fmt: skip
        assert not mask.dense(4, 5).any()
        assert mask.visible_scores(4, 5) == 0
        assert not mask.visible(np.arange(4, dtype=np.int32), np.arange(5, dtype=np.int32), 4, 5).any()
    for left in (0, 2**31 - 1):
        seen = masks.window(left, 2**31 - 1, diagonal).dense(4, 5)
        assert seen.all() if left or diagonal < 0 else not seen.any()


@pytest.mark.parametrize("form", [np.int64, np.array, lambda n: [n]])
def test_a_question_of_one_length_in_other_words(form):
    assert masks.shared_question(form(3), [2, 4]) == masks.shared_question(3, [2, 4])


def test_matrices_for_each_sequence_and_head():
    rng = np.random.default_rng(0)
    each = masks.from_flashmask(rng.integers(0, 20, (2, 3, 20, 4)), causal=False)
    seen = np.array([[each.dense(20, 20, b, h) for h in range(3)] for b in range(2)])
    mask = masks.from_dense(seen)
    assert mask.spread == (2, 3)
    np.testing.assert_array_equal([[mask.dense(20, 20, b, h) for h in range(3)] for b in range(2)], seen)
    assert masks.from_dense(seen[:, 0]).spread == (2, 1)
    assert str(masks.from_dense(np.ones((3, 4), bool))) == "full"
    assert not masks.from_dense(np.zeros((3, 4), bool)).dense(3, 4).any()


@pytest.mark.parametrize("shape", [(9, 9), (2, 33, 70), (2, 3, 40, 31), (1, 3, 64, 96)])
def test_a_matrix_of_any_shape_is_held_as_bits(shape):
    seen = np.random.default_rng(1).random(shape) < 0.6
    mask = masks.from_dense(seen)
    assert isinstance(mask, Bits)
    of_heads = seen[None, None] if seen.ndim == 2 else seen[:, None] if seen.ndim == 3 else seen
    for batch, head in np.ndindex(of_heads.shape[:2]):
        one, exact = mask.at(batch, head), of_heads[batch, head]
        np.testing.assert_array_equal(mask.dense(*exact.shape, batch, head), exact)
        np.testing.assert_array_equal(one.visible_per_key(*exact.shape, 3, 20), exact[3:20].sum(axis=0))
        assert one.visible_scores(*exact.shape) == exact.sum()
        np.testing.assert_array_equal(one.by_key.values, Bits.of(exact.T[None, None]).by_row.values)


def some_masks(rows: int, keys: int) -> list[Mask]:
    rng = np.random.default_rng(rows + keys)
    each = rng.integers(0, rows + 1, (2, 1, keys))
    return [
        masks.full(), masks.causal(), masks.causal("top-left"), masks.window(4, 2), masks.window(None, 7),
        masks.prefix(5), masks.chunks(3), masks.documents([keys // 2, keys - keys // 2]), masks.evict(each),
        masks.evict(rng.integers(0, rows + 1, keys)), masks.from_dense(rng.random((rows, keys)) < 0.5),
        masks.from_dense(rng.random((2, 2, rows, keys)) < 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "keys"), [(7, 13), (33, 20), (64, 64)])
def test_operators_mean_what_they_mean_for_matrices(rows, keys):
    def dense(mask: Mask) -> Any:
        return np.array([[mask.dense(rows, keys, b, h) for h in range(2)] for b in range(2)])

    found = set()
    for a, b in itertools.product(some_masks(rows, keys), repeat=2):
        both, either, neither = a & b, a | b, ~a & ~b
        np.testing.assert_array_equal(dense(both), dense(a) & dense(b), str(both))
        np.testing.assert_array_equal(dense(either), dense(a) | dense(b), str(either))
        np.testing.assert_array_equal(dense(neither), ~(dense(a) | dense(b)), str(neither))
        for mask in (both, either, neither):
            assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask
            one = mask.at(1, 1)
            counted = one.for_kernels(rows, keys).visible_per_key(rows, keys)
            np.testing.assert_array_equal(counted, mask.dense(rows, keys, 1, 1).sum(axis=0))
        found.add(type(both).__name__)
    assert found == {"Band", "Columns", "Bits", "Combined"}
    assert isinstance(masks.documents([3, 4]) & masks.window(2, 0), Columns), "no bits are needed"
    assert masks.causal() & masks.window(3, 5) == masks.window(3, 0)


def test_masks_of_other_lengths_do_not_combine():
    of_7, of_8 = (masks.from_dense(np.indices((n, n)).sum(axis=0) % 2 == 0) for n in (7, 8))
    with pytest.raises(ValueError, match="of different lengths"):
        of_7 & of_8
    q = np.ones((1, 1, 7, 8), np.float32)
    with pytest.raises(ValueError, match="matrix of 8 queries and 8 keys"):
        cufa.flash_attention(q, q, q, mask=masks.causal() & of_8, device="cpu")
    with pytest.raises(TypeError):
        of_7 & True


def test_an_array_of_booleans_is_a_mask():
    seen = np.random.default_rng(2).random((2, 1, 12, 20)) < 0.5
    q, k, v = make_inputs(2, 4, 2, 12, 20, 8, "float32")
    out, lse = cufa.flash_attention(q, k, v, mask=seen, return_lse=True, device="cpu")
    np.testing.assert_allclose(out, cufa.attention_reference(q, k, v, mask=seen), atol=1e-6)
    seen[:] ^= True  # the owner may change it between calls: it is read by every call
    again = cufa.flash_attention(q, k, v, mask=seen, device="cpu")
    np.testing.assert_allclose(again, cufa.attention_reference(q, k, v, mask=seen), atol=1e-6)
    seen[:] ^= True
    gradients = cufa.flash_attention_backward(q, q, k, v, out, lse, mask=seen, device="cpu")
    exact = cufa.attention_reference_backward(q, q, k, v, mask=seen)
    for found, right in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.prefix([]),
        lambda: masks.evict(np.zeros((0, 4), int)),
        lambda: masks.documents(np.zeros((0, 2), int), seqlen=4),
        lambda: masks.from_flashmask(np.zeros((0, 1, 4, 2), int), causal=False),
    ],
)
def test_a_mask_of_no_sequence_goes_with_a_batch_of_none_alone(make):
    q = np.ones((2, 1, 4, 8), np.float32)
    assert cufa.flash_attention(q[:0], q[:0], q[:0], mask=make()).shape == (0, 1, 4, 8)
    with pytest.raises(ValueError, match="is of 0 sequences but k has 2: make it for 2"):
        cufa.flash_attention(q, q, q, mask=make())
    assert "of no sequences" in make()._repr_html_()
    with pytest.raises(ValueError, match="is of no sequences: there is nothing to draw"):
        make().figure()


MASKS = "full() causal() causal('top-left') causal(diagonal=5) window(3, 0) prefix([1, 2]) streaming(4, 8) chunks(4)"


@pytest.mark.parametrize(
    "typed",
    [*MASKS.replace(") ", ")|").split("|"), "documents([2, 1])", "global_window(3, 4, None, diagonal=2)"],
)
def test_a_mask_prints_as_the_call_that_made_it(typed):
    mask = eval(f"masks.{typed}")
    assert repr(mask) == f"masks.{typed}" and eval(repr(mask)) == mask
    assert str(mask) != repr(mask), "messages and tables keep the short text"


def test_a_printed_mask_leaves_long_arrays_out():
    assert repr(masks.evict(np.arange(4096))) == "masks.evict(<int64 4,096>)"
    assert repr(masks.from_dense(np.eye(9, dtype=bool))) == "masks.from_dense(<bool 9×9>)"
    assert repr(masks.documents([[2, 1], [1, 2]]).at(1, 0)) == "<mask causal documents (2)>"
