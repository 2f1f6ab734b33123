"""Bands: visible scores against the definition, score by score; tiles both ways; text and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS, tiles_of

import cufa
from cufa.problem.mask import CAUSAL, FULL, Band, Mask, reduced
from cufa.problem.options import decode_mask, resolve_mask

LENGTH = st.integers(1, 70)
BLOCK = st.sampled_from([1, 2, 3, 5, 8, 16, 64])


def brute_force(mask: Band, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """One score after another, from the words of the definition."""
    shift = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(mask.diagonal, mask.diagonal)
    seen = np.zeros((seqlen_q, seqlen_k), bool)
    for i, j in np.ndindex(seen.shape):
        after_left = mask.left is None or i + shift - mask.left <= j
        before_right = mask.right is None or j <= i + shift + mask.right
        seen[i, j] = after_left and before_right
    return seen


@given(BANDS, LENGTH, LENGTH)
def test_visible_is_what_the_definition_says(mask, seqlen_q, seqlen_k):
    seen = brute_force(mask, seqlen_q, seqlen_k)
    np.testing.assert_array_equal(mask.dense(seqlen_q, seqlen_k), seen)
    assert mask.visible_scores(seqlen_q, seqlen_k) == seen.sum()
    # Of rows and keys that do not exist, none is seen.
    around = mask.visible(np.arange(-2, seqlen_q + 2), np.arange(-2, seqlen_k + 2), seqlen_q, seqlen_k)
    np.testing.assert_array_equal(around, np.pad(seen, 2))


@given(BANDS, LENGTH, LENGTH)
def test_reduced_edges_hide_what_the_mask_hides(mask, seqlen_q, seqlen_k):
    """And a bound that is left hides something, or nothing could be dropped."""
    first, last = reduced(mask.edges(seqlen_q, seqlen_k), seqlen_q, seqlen_k)
    seen = mask.dense(seqlen_q, seqlen_k)
    of_edges = np.ones_like(seen)
    for edge, hides in ((first, np.less), (last, np.greater)):
        if edge is not None:
            hidden = hides(np.arange(seqlen_k)[None, :], np.arange(seqlen_q)[:, None] + edge)
            assert hidden.any()
            of_edges &= ~hidden
    np.testing.assert_array_equal(of_edges, seen)


@given(BANDS, LENGTH, LENGTH, BLOCK, BLOCK)
def test_key_tiles_and_query_tiles_are_exact(mask, seqlen_q, seqlen_k, block_q, block_kv):
    """Skipped, clear and partial: no tile too many, none too few. The transpose likewise."""
    seen = mask.dense(seqlen_q, seqlen_k)
    for ranges, (some, clear) in (
        (mask.key_tiles(block_q, block_kv, seqlen_q, seqlen_k), tiles_of(seen, block_q, block_kv)),
        (mask.query_tiles(block_q, block_kv, seqlen_q, seqlen_k), tiles_of(seen.T, block_kv, block_q)),
    ):
        column = np.arange(some.shape[1])
        for first, end, expected in (
            (ranges.first, ranges.end, some),
            (ranges.clear_first, ranges.clear_end, clear),
        ):
            np.testing.assert_array_equal((column >= first[:, None]) & (column < end[:, None]), expected)
        assert (ranges.first <= ranges.clear_first).all() and (ranges.clear_end <= ranges.end).all()
        assert (ranges.clear_first[ranges.clear == 0] == ranges.first[ranges.clear == 0]).all()
        assert (ranges.first[ranges.count == 0] == 0).all()


@given(BANDS)
def test_json_text_and_equality(mask):
    assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask
    assert hash(mask) == hash(Band(mask.left, mask.right, mask.diagonal))
    for part in (mask.left, mask.right):
        assert part is None or str(part) in str(mask) or (mask.left, mask.right) == (None, 0)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ((-1, 3), ValueError, "seqlen_q=-1 must be from 0"),
        ((3.5, 3), TypeError, r"seqlen_q must be an integer from 0 up, not 3\.5"),
        ((3, None), TypeError, "seqlen_k must be an integer from 0 up, not None"),
    ],
)
def test_lengths_of_a_matrix(lengths, error, message):
    with pytest.raises(error, match=message):
        CAUSAL.dense(*lengths)
    assert CAUSAL.dense(0, np.int32(3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (cufa.masks.full(), "full"),
        (cufa.masks.causal(), "causal"),
        (cufa.masks.causal("top-left"), "causal top-left"),
        (cufa.masks.causal(np.int64(-3)), "causal diagonal -3"),
        (cufa.masks.window(1023, 0), "window (1023, 0)"),
        (cufa.masks.window(None, 5, "top-left"), "window (None, 5) top-left"),
        (cufa.masks.window(np.uint8(3), None, 7), "window (3, None) diagonal 7"),
        (cufa.masks.window(None, None, 7), "full"),
        (cufa.masks.window(None, 0), "causal"),
    ],
)
def test_what_the_public_masks_are_and_print(mask, text):
    assert isinstance(mask, cufa.masks.Mask) and str(mask) == text
    np.testing.assert_array_equal(mask.dense(9, 13), brute_force(mask, 9, 13))


def test_the_same_mask_in_other_words():
    assert resolve_mask(True, None, None) is CAUSAL and resolve_mask(False, None, None) is FULL
    assert resolve_mask(True, (3, 0), None) == resolve_mask(True, (3, None), None) == Band(3, 0)
    assert resolve_mask(False, [np.int64(3), 0], None) == cufa.masks.window(3, 0) == Band(3, 0)
    assert resolve_mask(False, (None, 0), None) == resolve_mask(False, None, cufa.masks.causal()) == CAUSAL
    assert decode_mask(None) is CAUSAL and decode_mask((3, None)) == decode_mask((3, 0)) == Band(3, 0)
