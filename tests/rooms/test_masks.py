"""Masks against the words of their builders, score by score: what is seen, operators, matrices, text and records.
Tiles: test_schedule.py. What kernels and NumPy make of masks: contract/test_irregular_masks.py."""

from __future__ import annotations

import copy
import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS
from support import make_inputs, written_out

import cufa
from cufa import masks
from cufa.problem.bits import Bits
from cufa.problem.columns import FROM_THE_START, TO_THE_END, Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, FULL, Band, Mask, reduced
from cufa.problem.options import decode_mask, resolve_mask

SIDE = st.integers(1, 70)
SIZES = (1, 7, 63, 64, 65, 127, 200, 257)
LENGTHS = [(n, n) for n in SIZES] + [(7, 64), (64, 7), (127, 200), (257, 65), (1, 257), (200, 1)]

# --- What each builder says, score by score ---------------------------------------------------------------


def matrix(seqlen_q, seqlen_k, sees, shift=None):
    """From ``sees(i, p, j)`` of rows, of their places among the keys, and of keys."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    place = i + (seqlen_k - seqlen_q if shift is None else shift)
    return np.broadcast_to(sees(i, place, j), (seqlen_q, seqlen_k))


def assert_is(mask, seen):
    np.testing.assert_array_equal(mask.dense(*seen.shape), seen)
    assert mask.visible_scores(*seen.shape) == seen.sum()
    np.testing.assert_array_equal(mask.visible_per_key(*seen.shape), seen.sum(axis=0))
    around = mask.visible(*(np.arange(-2, n + 2) for n in seen.shape), *seen.shape)
    np.testing.assert_array_equal(around, np.pad(seen, 2), "rows and keys outside of the matrix")
    assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask


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

    def sees(i, p, j):
        return (j < tokens) | ((p < tokens) & (tokens > 0)) | ((p - left <= j) & (j <= p + right))

    return masks.global_window(tokens, left, right), sees


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
    question, *answers = texts = cut(m, rng).tolist()

    def sees(i, p, j):
        return (j <= p) & ((j < question) | (text_of(texts, p) == text_of(texts, j)))

    return masks.shared_question(question, answers), sees


def evict(n, m, rng):
    rows = rng.integers(-3, n + 3, m)
    return masks.evict(rows), lambda i, p, j: (j <= p) & (i < rows[j])


def columns(n, m, rng):
    lo1, hi1, lo2, hi2 = rng.integers(-3, n + 3, (4, m))

    def sees(i, p, j):
        return (j >= p - 9) & ~((lo1[j] <= i) & (i < hi1[j])) & ~((lo2[j] <= i) & (i < hi2[j]))

    return masks.columns(lo1, hi1, lo2, hi2, window=(9, None)), sees


def flashmask(vectors, causal, hidden):
    def make(n, m, rng):
        x = rng.integers(0, n + 1, (1, 1, m, vectors))

        def sees(i, p, j):
            return ~hidden(i, *np.moveaxis(x[0, 0][j], -1, 0)) & ((j <= p) | (not causal))

        return masks.from_flashmask(x, causal), sees

    return make


BUILDERS = {
    "prefix": prefix, "streaming": streaming, "global_window": global_window, "documents": documents,
    "two-way documents": two_way_documents, "chunks": chunks, "shared_question": shared_question,
    "evict": evict, "columns": columns, "flashmask causal 1": flashmask(1, True, lambda i, lts: i >= lts),
    "flashmask causal 2": flashmask(2, True, lambda i, lts, lte: (i >= lts) & (i < lte)),
    "flashmask 2": flashmask(2, False, lambda i, lts, ute: (i >= lts) | (i < ute)),
    "flashmask 4": flashmask(4, False, lambda i, a, b, c, d: ((i >= a) & (i < b)) | ((i >= c) & (i < d))),
}  # fmt: skip


def build(name, seqlen_q, seqlen_k, seed=0):
    """(mask, matrix)."""
    mask, sees = BUILDERS[name](seqlen_q, seqlen_k, np.random.default_rng([seed, seqlen_q, seqlen_k]))
    return mask, matrix(seqlen_q, seqlen_k, sees)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_a_builder_is_its_matrix(name, seqlen_q, seqlen_k):
    mask, seen = build(name, seqlen_q, seqlen_k)
    assert mask.misfit(3, 2, seqlen_q, seqlen_k) is None
    assert_is(mask, seen)
    assert_is(masks.from_dense(seen), seen)


@given(BANDS, SIDE, SIDE)
def test_a_band_is_its_definition(mask, seqlen_q, seqlen_k):
    shift = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(mask.diagonal, mask.diagonal)
    left, right = (10**6 if side is None else side for side in (mask.left, mask.right))
    seen = matrix(seqlen_q, seqlen_k, lambda i, p, j: (p - left <= j) & (j <= p + right), shift)
    assert_is(mask, seen)
    assert hash(mask) == hash(Band(mask.left, mask.right, mask.diagonal))
    found = masks.from_dense(seen)
    assert_is(found, seen)
    assert isinstance(found, Band) or not seen.any()
    # A bound that is left hides something; together they hide what the mask hides.
    row, key, of_edges = np.arange(seqlen_q)[:, None], np.arange(seqlen_k), np.ones_like(seen)
    edges = reduced(mask.edges(seqlen_q, seqlen_k), seqlen_q, seqlen_k)
    for edge, hides in zip(edges, (np.less, np.greater), strict=True):
        if edge is not None:
            hidden = hides(key, row + edge)
            assert hidden.any()
            of_edges &= ~hidden
    np.testing.assert_array_equal(of_edges, seen)


@pytest.mark.parametrize("name", BUILDERS)
def test_equal_masks_are_equal_in_text_and_in_problems(name):
    mask, again, other = (build(name, 65, 65, seed)[0] for seed in (0, 0, 1))
    assert mask == again and hash(mask) == hash(again) and str(mask) == str(again) and mask != other
    problem = cufa.plan((1, 2, 65, 8), mask=mask, device="cpu").problem
    assert type(problem).from_json(json.loads(json.dumps(problem.as_json()))) == problem


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
    """ALiBi measures from the diagonal, even if the mask hides nothing on either side of it."""
    assert make(diagonal=diagonal).shift(5, 9) == shift


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


def test_the_same_mask_in_other_words():
    assert resolve_mask(True, None, None) is CAUSAL and resolve_mask(False, None, None) is FULL
    assert resolve_mask(True, (3, 0), None) == resolve_mask(True, (3, None), None) == Band(3, 0)
    assert resolve_mask(False, [np.int64(3), 0], None) == masks.window(3, 0) == Band(3, 0)
    assert resolve_mask(False, (None, 0), None) == resolve_mask(False, None, masks.causal()) == CAUSAL
    assert decode_mask(None) is CAUSAL and decode_mask((3, None)) == decode_mask((3, 0)) == Band(3, 0)


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
    pytest.importorskip("plotly", reason="Plotly draws the figure")
    with pytest.raises(ValueError, match="has no sequences to draw"):
        make().figure()


# --- From a matrix ----------------------------------------------------------------------------------------


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
    queries, keys = (lengths.get(name, [6])[0] for name in ("seqlens_q", "seqlens_k"))
    exact, _ = written_out(q, k[:, :, :keys], v[:, :, :keys], seen=seen[:, :keys])
    exact[:, :, queries:] = 0
    for found in (
        cufa.flash_attention(q, k, v, mask=mask, device="cpu", **lengths),
        cufa.attention_reference(q, k, v, mask=mask, **lengths),
    ):
        np.testing.assert_allclose(found, exact, atol=1e-6)


TRI = np.tri(6, dtype=bool)


@pytest.mark.parametrize("seen", [np.ones((6, 6), bool), TRI, TRI ^ np.tri(6, k=-2, dtype=bool)])
def test_a_matrix_of_other_lengths_is_refused(seen):
    for mask in (masks.from_dense(seen), Mask.from_json(masks.from_dense(seen).as_json())):
        for seqlen_q, seqlen_k in ((4, 6), (6, 4), (6, 7), (7, 7)):
            q, k, v = make_inputs(1, 1, 1, seqlen_q, seqlen_k, 8, "float32")
            message = f"a matrix of 6 queries and 6 keys, not of {seqlen_q} queries and {seqlen_k} keys"
            for attend in (cufa.flash_attention, cufa.attention_reference, cufa.plan):
                with pytest.raises(ValueError, match=message):
                    attend(q, k, v, mask=mask)
        q, k, v = (x[0].swapaxes(0, 1) for x in make_inputs(1, 1, 1, 7, 7, 8, "float32"))
        for attend in (cufa.flash_attention_varlen, cufa.attention_varlen_reference):
            with pytest.raises(
                ValueError, match="6 keys, but a packed sequence has up to 7 queries and 5 keys: pad"
            ):
                attend(q, k, v, [0, 7], [0, 5], mask=mask)
        with pytest.raises(ValueError, match="which calls with a cache do not take"):
            cufa.flash_attention(q[None], k[None], v[None], mask=mask, cache_seqlens=[5], device="cpu")


def test_matrices_for_each_sequence_and_head():
    rows = np.random.default_rng(0).integers(0, 21, (2, 3, 20))
    each = masks.evict(rows)
    seen = np.array([[masks.evict(of_head).dense(20, 20) for of_head in of_heads] for of_heads in rows])
    np.testing.assert_array_equal([[each.dense(20, 20, b, h) for h in range(3)] for b in range(2)], seen)
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


# --- Operators --------------------------------------------------------------------------------------------


def some_masks(rows: int, keys: int) -> list[Mask]:
    rng = np.random.default_rng(rows + keys)
    each = rng.integers(0, rows + 1, (2, 1, keys))
    return [
        masks.full(), masks.causal(), masks.causal("top-left"), masks.window(4, 2), masks.window(None, 7),
        masks.prefix(5), masks.chunks(3), masks.documents([keys // 2, keys - keys // 2]), masks.evict(each),
        masks.evict(rng.integers(0, rows + 1, keys)), masks.from_dense(rng.random((rows, keys)) < 0.5),
        masks.from_dense(rng.random((2, 2, rows, keys)) < 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "keys"), [(7, 13), (33, 20)])
def test_operators_mean_what_they_mean_for_matrices(rows, keys):
    def dense(mask):
        return np.array([[mask.dense(rows, keys, b, h) for h in range(2)] for b in range(2)])

    found = set()
    for a, b in itertools.product(some_masks(rows, keys), repeat=2):
        both, either, neither = a & b, a | b, ~a & ~b
        np.testing.assert_array_equal(dense(both), dense(a) & dense(b), str(both))
        np.testing.assert_array_equal(dense(either), dense(a) | dense(b), str(either))
        np.testing.assert_array_equal(dense(neither), ~(dense(a) | dense(b)), str(neither))
        for mask in (both, either, neither):
            assert_is(mask.at(1, 1), mask.dense(rows, keys, 1, 1))
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


# --- Text, records and numbers ----------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.full(), "full"),
        (masks.causal(), "causal"),
        (masks.causal("top-left"), "causal top-left"),
        (masks.causal(np.int64(-3)), "causal diagonal -3"),
        (masks.window(1023, 0), "window (1023, 0)"),
        (masks.window(None, 5, "top-left"), "window (None, 5) top-left"),
        (masks.window(np.uint8(3), None, 7), "window (3, None) diagonal 7"),
        (masks.window(None, None, 7), "full"),
        (masks.window(None, 0), "causal"),
    ],
)
def test_the_short_text_of_a_band(mask, text):
    assert str(mask) == text


def test_numbers_cannot_be_changed_from_outside():
    rows = np.arange(8)
    mask = masks.evict(rows)
    before = mask.dense(8, 8)
    rows[:] = 0
    np.testing.assert_array_equal(mask.dense(8, 8), before)
    for found in (mask, pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert found == mask and not found.intervals.values.flags.writeable


def test_many_numbers_are_left_out_of_json():
    """But not of short descriptions: documents of a long stream take a few hundred bytes."""
    mask = masks.evict(np.random.default_rng(0).integers(0, 1 << 20, 1 << 14))
    record = json.dumps(mask.as_json())
    assert len(record) < 500
    kept = Mask.from_json(json.loads(record))
    assert kept == mask and str(kept) == str(mask) and not kept.known
    with pytest.raises(ValueError, match=r"too many to be stored.*make the mask anew"):
        kept.dense(8, 8)
    x = np.ones((1, 1, 1 << 14, 8), np.float32)
    with pytest.raises(
        ValueError, match=r"were not stored, but q is computed on the CPU.*make the mask anew"
    ):
        cufa.flash_attention(x, x, x, mask=kept, device="cpu")
    assert "at most" in str(cufa.plan(x.shape, mask=kept, device="cpu"))
    long = masks.documents([1 << 10] * 64)
    assert len(json.dumps(long.as_json())) < 2000 and Mask.from_json(long.as_json()).known


def test_integers_of_any_kind():
    rng = np.random.default_rng(0)
    x = Integers(rng.integers(FROM_THE_START, TO_THE_END, (2, 3, 5), endpoint=True))
    again = Integers.from_json(json.loads(json.dumps(x.as_json())))
    assert again == x and x != Integers(np.zeros((2, 3, 5), int)) and x != 3 and "(2, 3, 5)" in repr(x)
    np.testing.assert_array_equal(again.values, x.values)
