"""Masks: what a band hides against brute force, its tiles both ways, and an answer to everything that is none."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS, tiles_of

import cufa
from cufa.calls import calls
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, FULL, Band, Mask, reduced
from cufa.problem.options import decode_mask, resolve_mask

LENGTH = st.integers(1, 70)
BLOCK = st.sampled_from([1, 2, 3, 5, 8, 16, 64])


def _words(x: object) -> str:
    """For a test's name: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


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


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(1000, 0), Band(1000, 7, "top-left"), Band(5, None, -3)])
def test_a_million_tokens_are_not_enumerated(mask):
    n = 1 << 20
    first, last = mask.edges(n, n)
    ranges = mask.key_tiles(128, 64, n, n)
    assert ranges.first[-1] == (0 if first is None else (n - 128 + first) // 64)
    assert ranges.end[-1] == n // 64 and len(ranges.first) == n // 128
    if last == 0 and first is None:
        assert mask.visible_scores(n, n) == n * (n + 1) // 2


@given(BANDS)
def test_json_text_and_equality(mask):
    assert Mask.from_json(json.loads(json.dumps(mask.as_json()))) == mask
    assert hash(mask) == hash(Band(mask.left, mask.right, mask.diagonal))
    for part in (mask.left, mask.right):
        assert part is None or str(part) in str(mask) or (mask.left, mask.right) == (None, 0)


_BAND = {"family": "band", "left": 5, "right": 0, "diagonal": "bottom-right"}
_COLUMNS = {"family": "columns", "band": _BAND, "intervals": {"shape": [2, 1, 1, 8], "digest": "0" * 16}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "JSON object with one family of band, columns, chunks.*not None"),
        ([_BAND], "JSON object .* not builtins.list"),
        ({}, "family=None of a mask's record is not known; use one of band, columns, chunks"),
        ({"family": "zz"}, "family='zz' of a mask's record is not known; use one of band"),
        ({"family": []}, r"family=\[\] of a mask's record is not known"),
        ({"family": "columns"}, "family columns needs the field 'band'"),
        ({"family": "chunks"}, "family chunks needs the field 'size'"),
        ({**_BAND, "up": 3}, "family band has no field 'up'; it has left, right, diagonal, prefix"),
        ({**_BAND, "left": -5}, r"\(left, right\)=\(-5, 0\): left must be at least 0"),
        ({**_BAND, "left": "a"}, "left must be an integer from 0 up, or None for no bound, not 'a'"),
        ({**_BAND, "right": 1.0}, r"right must be an integer .* not 1\.0"),
        ({**_BAND, "diagonal": "zz"}, "diagonal='zz' is not known; use 'bottom-right', 'top-left' or an"),
        ({**_BAND, "prefix": -4}, "prefix=-4 must be from 0"),
        ({**_BAND, "keep": None}, "keep must be an integer from 0 up, not None"),
        ({**_BAND, "global_tokens": "3"}, "global_tokens must be an integer from 0 up, not '3'"),
        ({**_BAND, "prefix": {"digest": ""}}, "prefix is builtins.dict: it takes an array's record, shape"),
        ({**_BAND, "prefix": {"shape": [-1], "digest": ""}}, "prefix has shape .* a size is at least 0"),
        (
            {**_BAND, "prefix": {"shape": [1, 2], "digest": ""}},
            r"prefix has shape \(1, 2\): it takes \(batch,\)",
        ),
        ({**_BAND, "prefix": {"shape": [2]}}, "prefix: packed, or digest, of its record is text, not None"),
        (
            {**_BAND, "prefix": {"shape": [2], "packed": "?"}},
            r"prefix: packed .* does not hold \(2,\) integers",
        ),
        ({**_BAND, "prefix": {"shape": [2], "packed": "AAAA"}}, r"packed .* does not hold \(2,\) integers"),
        (
            {**_BAND, "prefix": Integers(np.array([3, -4])).as_json()},
            r"prefix\[1\] is -4: it must be at least 0",
        ),
        (
            {**_BAND, "prefix": {**Integers(np.array([3, 4])).as_json(), "shape": [3]}},
            r"not hold \(3,\) integers",
        ),
        ({"family": "chunks", "size": 0}, "size=0 must be from 1"),
        (
            {**_COLUMNS, "band": {"family": "chunks", "size": 3}},
            "band is causal chunks of 3: it takes a mask of",
        ),
        ({**_COLUMNS, "band": {**_BAND, "left": -5}}, "left must be at least 0"),
        ({**_COLUMNS, "intervals": 3}, "intervals is 3: it takes an array's record"),
        (
            {**_COLUMNS, "intervals": {"shape": [3, 1, 1, 8], "digest": ""}},
            r"intervals has shape \(3, 1, 1, 8\)",
        ),
        ({**_COLUMNS, "rows": "zz"}, "rows='zz' is not known"),
        ({**_COLUMNS, "title": 3}, "title is text, not 3"),
    ],
    ids=_words,
)
def test_records_that_are_no_masks(record, message):
    with pytest.raises(ValueError, match=message):
        Mask.from_json(record)


def test_records_of_masks_without_later_fields():
    assert Mask.from_json({"family": "band"}) == FULL and Mask.from_json(_BAND) == Band(5, 0)
    assert not Mask.from_json(_COLUMNS).known


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


# --- Arguments --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Neither here nor on a GPU: what is refused is refused before."""

    def ran(*arguments, **options):
        raise AssertionError("a refused call was planned")

    monkeypatch.setattr(calls, "gpu_available", lambda: False)
    monkeypatch.setattr(calls, "plan_for", ran)


WINDOWS = [
    ((-1, 0), ValueError, r"window=\(-1, 0\): left must be at least 0.*pass None"),
    ((0, -5), ValueError, r"window=\(0, -5\): right must be at least 0.*pass None"),
    ((True, 0), TypeError, r"window=\(True, 0\): left must be an integer.*not True"),
    ((0, 1.5), TypeError, r"window=\(0, 1\.5\): right must be an integer.*or None.*not 1\.5"),
    (("x", 0), TypeError, r"window=\('x', 0\): left must be an integer.*not 'x'"),
    ((2**31, 0), ValueError, r"window=.*: left is at most 2,147,483,647; for no bound pass None"),
    ((1, 2, 3), TypeError, r"window=\(1, 2, 3\): it is a pair \(left, right\)"),
    ((), TypeError, r"window=\(\): it is a pair"),
    (5, TypeError, "window=5: it is a pair"),
    (0, TypeError, "window=0: it is a pair"),
    ("ab", TypeError, "window='ab': it is a pair"),
    (np.array([1, 0]), TypeError, r"window=array\(\[1, 0\]\): it is a pair"),
]
OTHERS = [
    (
        {"mask": np.ones((8, 8), bool)},
        TypeError,
        "mask must be made by cufa.masks.*not numpy.ndarray: arrays",
    ),
    ({"mask": True}, TypeError, "mask must be made by cufa.masks.*not True"),
    ({"mask": "causal"}, TypeError, "mask must be made by cufa.masks.*not 'causal'"),
    ({"mask": cufa.masks.causal}, TypeError, "mask must be made by cufa.masks.*not builtins.function"),
    ({"mask": FULL, "causal": True}, ValueError, "mask=full and causal=True both say.*pass one"),
    ({"mask": CAUSAL, "window": (3, 0)}, ValueError, r"mask=causal and window=\(3, 0\) both say.*pass one"),
    ({"causal": True, "window": (3, 2)}, ValueError, r"window=\(3, 2\).*but causal=True hides"),
    ({"softcap": 0}, ValueError, "softcap=0 must be finite and above 0.*pass None"),
    ({"softcap": -1.0}, ValueError, "softcap=-1.0 must be finite and above 0.*pass None"),
    ({"softcap": np.nan}, ValueError, "softcap=nan must be finite"),
    ({"softcap": np.inf}, ValueError, "softcap=inf must be finite"),
    ({"softcap": 10**400}, ValueError, "softcap=1000.*must be finite"),
    ({"softcap": 1e-300}, ValueError, "softcap=1e-300 must be .*in float32"),
    ({"softcap": 1e5}, ValueError, "softcap=100000.0 must be at most 10,000.*pass None"),
    ({"softcap": b"3"}, TypeError, "softcap must be a number above 0 or None, not b'3'"),
    ({"softcap": True}, TypeError, "softcap must be a number above 0 or None, not True"),
    ({"softcap": np.True_}, TypeError, "softcap must be a number"),
    ({"softcap": "30"}, TypeError, "softcap must be a number above 0 or None, not '30'"),
    ({"softcap": 1j}, TypeError, "softcap must be a number"),
]


@pytest.mark.parametrize("call", [cufa.flash_attention, cufa.plan, cufa.attention_reference])
@pytest.mark.parametrize(
    ("options", "error", "message"), [({"window": w}, *rest) for w, *rest in WINDOWS] + OTHERS, ids=_words
)
def test_what_is_no_mask_is_refused_by_name_value_and_cure(call, options, error, message):
    x = np.ones((1, 2, 8, 16), np.float32)
    with pytest.raises(error, match=message):
        call(x, x, x, **options)


@pytest.mark.parametrize("call", [cufa.flash_decode, cufa.plan_decode, cufa.decode_reference])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"window": w}, *rest) for w, *rest in WINDOWS),
        *(case for case in OTHERS if "softcap" in case[0]),
        ({"window": (3, 1)}, ValueError, r"window=\(3, 1\): decoding is causal, so right must be 0 or None"),
    ],
    ids=str,
)
def test_decoding_refuses_likewise(call, options, error, message):
    x = np.ones((1, 2, 8, 16), np.float32)
    with pytest.raises(error, match=message):
        call(x[:, :, :1], x, x, **options)


@pytest.mark.parametrize(
    ("diagonal", "error", "message"),
    [
        (
            "middle",
            ValueError,
            "diagonal='middle' is not known; use 'bottom-right', 'top-left' or an integer",
        ),
        (1.5, TypeError, "diagonal=1.5 must be 'bottom-right', 'top-left' or an integer"),
        (True, TypeError, "diagonal=True must be"),
        (None, TypeError, "diagonal=None must be"),
        (-(2**40), ValueError, "diagonal=-1099511627776 must be within ±2,147,483,647"),
    ],
)
def test_diagonals_that_are_none(diagonal, error, message):
    for make in (lambda: cufa.masks.causal(diagonal), lambda: cufa.masks.window(1, 0, diagonal)):
        with pytest.raises(error, match=message):
            make()


def test_the_same_mask_in_other_words():
    assert resolve_mask(True, None, None) is CAUSAL and resolve_mask(False, None, None) is FULL
    assert resolve_mask(True, (3, 0), None) == resolve_mask(True, (3, None), None) == Band(3, 0)
    assert resolve_mask(False, [np.int64(3), 0], None) == cufa.masks.window(3, 0) == Band(3, 0)
    assert resolve_mask(False, (None, 0), None) == resolve_mask(False, None, cufa.masks.causal()) == CAUSAL
    assert decode_mask(None) is CAUSAL and decode_mask((3, None)) == decode_mask((3, 0)) == Band(3, 0)
