"""Everything that can be wrong with a call of flash_decode: errors name the argument, what came, the fix."""

from __future__ import annotations

import re

import numpy as np
import pytest
from decode_support import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa

pytestmark = pytest.mark.usefixtures("on_cpu")


def _array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


_NEW = {"k_new": _array(2, 2, 1, 16), "v_new": _array(2, 2, 1, 16)}
_FP8 = {x: _array(2, 2, 9, 16, dtype=np.uint8) for x in ("k_cache", "v_cache")}
_PAGES = {x: _array(5, 2, 4, 16) for x in ("k_cache", "v_cache")}
_TABLE = np.array([[0, 1, 2], [3, 4, 0]], np.int32)
_READ_ONLY = _array(2, 2, 9, 16)
_READ_ONLY.flags.writeable = False
_REPEATED = np.lib.stride_tricks.as_strided(_array(999), (2, 2, 9, 16), (0, 0, 64, 4))


def _caches(*shape, dtype=np.float32):
    return {"k_cache": _array(*shape, dtype=dtype), "v_cache": _array(*shape, dtype=dtype)}


BAD = [
    # what it is
    ({"q": [[1.0]]}, TypeError, r"q must be an array.*list"),
    ({"v_cache": None}, TypeError, r"v_cache must be an array.*NoneType"),
    ({"k_new": "x", "v_new": "x"}, TypeError, r"k_new must be an array.*str"),
    ({"cache_seqlens": "9"}, TypeError, r"cache_seqlens must be an array.*str"),
    ({"q": _array(2, 4, 1, 16, dtype=np.int32)}, TypeError, r"q is int32.*CPU takes float16.*astype\(numpy\.float32"),
    (_caches(2, 2, 9, 16, dtype=np.float16), TypeError, r"k_cache is float16 but q is float32.*q\.astype"),
    ({"v_cache": _array(2, 2, 9, 16, dtype=np.float16)}, TypeError, r"v_cache is float16 but k_cache is float32"),
    ({**_NEW, "k_new": _array(2, 2, 1, 16, dtype=np.float16), "cache_seqlens": 1}, TypeError,
     r"k_new is float16 but k_"),
    ({**_FP8, **_NEW, "cache_seqlens": 1}, TypeError, r"k_new is float32 but k_cache is uint8: quantise"),
    ({"cache_seqlens": [1.5, 2.0]}, TypeError, r"cache_seqlens is float64: it takes int32"),
    ({**_PAGES, "block_table": _TABLE.astype(np.float32)}, TypeError, r"block_table is float32.*int32"),
    # shapes
    ({"q": _array(2, 4, 16)}, ValueError, r"q has shape \(2, 4, 16\); layout 'bhsd' takes four axes \(batch, heads"),
    ({"k_cache": _array(2, 9, 16)}, ValueError, r"k_cache has shape \(2, 9, 16\)"),
    ({"v_cache": _array(2, 2, 8, 16)}, ValueError,
     r"v_cache has shape \(2, 2, 8, 16\) but k_cache has \(2, 2, 9, 16\)"),
    (_caches(3, 2, 9, 16), ValueError, r"k_cache has batch 3 but q has 2.*block_table"),
    (_caches(2, 2, 9, 8), ValueError, r"k_cache has head_dim 8 but q has 16"),
    (_caches(2, 3, 9, 16), ValueError, r"q has 4 heads and k_cache has 3.*multiple"),
    ({"q": _array(2, 4, 1, 12), **_caches(2, 2, 9, 12)}, ValueError, r"head_dim is 12.*multiple of 8.*pad"),
    ({"q": _array(2, 4, 17, 16)}, ValueError, r"q has 17 tokens.*1 to 16.*flash_attention"),
    ({"q": _array(2, 4, 0, 16)}, ValueError, r"q has 0 tokens.*takes 1 to 16: without a token make no call"),
    ({"q": _array(2, 4, 1, 32)[..., ::2]}, ValueError, r"q has strides.*ascontiguousarray\(q\)"),
    ({"k_cache": _array(2, 2, 9, 32)[..., ::2]}, ValueError, r"k_cache has strides.*ascontiguousarray"),
    ({"k_cache": _array(2, 2, 9, 16, dtype=np.int8)}, TypeError, r"k_cache is int8.*view\('uint8'\).*astype"),
    (_caches(2, 2, 9, 16, dtype=bool), TypeError, r"k_cache is bool.*k_cache\.astype\('float32'\)"),
    ({**_caches(0, 2, 4, 16), "block_table": _TABLE}, ValueError, r"k_cache has no pages.*room for 3"),
    ({**_PAGES, "block_table": np.broadcast_to(np.int32(0), (2, 2**28)), "cache_seqlens": 1}, ValueError,
     r"block_table has room for 1,073,741,824 tokens per sequence.*columns"),
    # lengths
    ({"cache_seqlens": [1, 2, 3]}, ValueError, r"cache_seqlens has shape \(3,\): it takes \(batch,\), here \(2,\)"),
    ({"cache_seqlens": [3, 10]}, ValueError, r"cache_seqlens\[1\] is 10, but k_cache holds 9.*longer cache"),
    ({"cache_seqlens": [-1, 3]}, ValueError, r"cache_seqlens\[0\] is -1: a length is at least 0"),
    ({"cache_seqlens": [2**40, 3]}, ValueError, r"cache_seqlens\[0\] is 1099511627776"),
    ({"cache_seqlens": np.array([1, 2**63], np.uint64)}, ValueError, r"s\[1\] is 9223372036854775808: int32"),
    ({**_NEW, "cache_seqlens": [3, 9]}, ValueError,
     r"cache_seqlens\[1\] is 9 and k_new appends 1, but k_cache holds 9"),
    # pages
    ({**_PAGES, "block_table": _TABLE[0]}, ValueError, r"block_table has shape \(3,\) but q has batch 2.*max_pages"),
    ({**_PAGES, "block_table": _TABLE[:1]}, ValueError, r"block_table has shape \(1, 3\) but q has batch 2"),
    ({"k_cache": _PAGES["k_cache"], "v_cache": _array(5, 2, 3, 16), "block_table": _TABLE}, ValueError,
     r"v_cache has shape \(5, 2, 3, 16\) but k_cache has \(5, 2, 4, 16\)"),
    ({**_PAGES, "block_table": _TABLE, "cache_seqlens": [13, 2]}, ValueError,
     r"cache_seqlens\[0\] is 13, but block_table has 3 pages of 4 per sequence: it takes 4 columns"),
    ({**_PAGES, **_NEW, "block_table": _TABLE, "cache_seqlens": [2, 12]}, ValueError,
     r"cache_seqlens\[1\] is 12 and k_new appends 1, but block_table has 3 pages of 4.*4 columns"),
    ({**_PAGES, "block_table": _TABLE + 1, "cache_seqlens": [3, 8]}, ValueError,
     r"block_table\[1, 1\] is 5, but k_cache has 5 pages; sequence 1 uses its first 2 entries"),
    # the last page counts from its first token on
    *(
        (
            {**_PAGES, **new, "block_table": [[0, 1, 2], [3, 9, 0]], "cache_seqlens": [3, length]},
            ValueError,
            r"block_table\[1, 1\] is 9, but k_cache has 5 pages; sequence 1 uses its first 2 entries",
        )
        for new, length in (({}, 5), ({}, 7), ({}, 8), (_NEW, 4))
    ),
    ({**_PAGES, "block_table": _TABLE - 1}, ValueError, r"block_table\[0, 0\] is -1"),
    ({**_caches(5, 2, 0, 16), "block_table": _TABLE}, ValueError, r"k_cache has pages of 0 tokens"),
    # appending
    ({"k_new": _NEW["k_new"], "cache_seqlens": 1}, ValueError, r"k_new came without v_new"),
    ({"v_new": _NEW["v_new"], "cache_seqlens": 1}, ValueError, r"v_new came without k_new"),
    (_NEW, ValueError, r"k_new came without cache_seqlens"),
    ({**_NEW, "v_new": _array(2, 2, 2, 16), "cache_seqlens": 1}, ValueError, r"v_new has shape .* but k_new has"),
    ({"k_new": _array(2, 4, 1, 16), "v_new": _array(2, 4, 1, 16), "cache_seqlens": 1}, ValueError,
     r"k_new has shape \(2, 4, 1, 16\) for batch 2, 2 key/value heads"),
    ({**_NEW, "v_cache": _READ_ONLY, "cache_seqlens": 1}, ValueError, r"v_cache is read-only.*writeable"),
    ({**_NEW, "k_cache": np.broadcast_to(_array(16), (2, 2, 9, 16)), "cache_seqlens": 1}, ValueError,
     r"k_cache is read-only"),
    ({**_NEW, "k_cache": _REPEATED, "cache_seqlens": 1}, ValueError,
     r"k_cache has strides \(0, 0, 64, 4\).*share memory"),
    # scales
    (_FP8, ValueError, r"k_scale is missing.*2 key/value heads.*k_scale=1"),
    ({**_FP8, "k_scale": 1}, ValueError, r"v_scale is missing"),
    ({"k_scale": 1.0}, ValueError, r"k_scale goes with a cache of uint8.*float32"),
    ({**_FP8, "k_scale": [1.0] * 3, "v_scale": 1}, ValueError,
     r"k_scale has shape \(3,\).*\(kv_heads,\), .*here \(2,\)"),
    ({**_FP8, "k_scale": [1, np.nan], "v_scale": 1}, ValueError, r"k_scale must be finite in float32, but holds nan"),
    ({**_FP8, "k_scale": 1e300, "v_scale": 1}, ValueError, r"k_scale must be finite in float32, but holds 1e\+300"),
    ({**_FP8, "k_scale": np.array(["a", "b"]), "v_scale": 1}, TypeError, r"k_scale is <U1: it takes float32"),
    # options
    ({"scale": float("nan")}, ValueError, r"scale=nan must be finite"),
    ({"scale": -1.0}, ValueError, r"scale=-1\.0.*negate q"),
    ({"scale": True}, TypeError, r"scale must be a number or None, not True"),
    ({"scale": 1e39}, ValueError, r"scale=1e\+39 is too large"),
    *(
        ({name: np.ma.masked_array(x)}, TypeError, rf"{name} is numpy\.ma\S*MaskedArray")
        for name, x in (("k_cache", _array(2, 2, 9, 16)), ("cache_seqlens", np.array([3, 4])))
    ),
    ({"layout": "sbhd"}, ValueError, r"layout='sbhd'.*'bhsd'.*'bshd'"),
    ({"num_splits": 0}, ValueError, r"num_splits=0.*1 or more"),
    ({"num_splits": True}, TypeError, r"num_splits must be an int or None, not bool"),
    ({"num_splits": np.True_}, TypeError, r"num_splits must be an int or None, not bool"),
    ({"num_splits": 2.5}, TypeError, r"num_splits must be an int or None, not float"),
    ({"schedule": "fair"}, ValueError, r"schedule='fair'.*'balanced'"),
    ({"device": "tpu"}, ValueError, r"device='tpu'.*'cuda'"),
    ({"device": "cuda"}, ValueError, r"device='cuda' but no usable GPU.*cufa doctor"),
    # out
    ({"out": _array(2, 4, 1, 8)}, ValueError, r"out has shape \(2, 4, 1, 8\) but the result has \(2, 4, 1, 16\)"),
    ({"out": _array(2, 4, 1, 16, dtype=np.float16)}, TypeError, r"out is float16 but the result is float32"),
    ({"out": "here"}, TypeError, r"out must be an array"),
]  # fmt: skip


def test_a_page_counts_from_its_first_token_on():
    _call(**_PAGES, block_table=[[0, 1, 2], [3, 9, 0]], cache_seqlens=[3, 4])


SLOTS = [
    # two sequences with one last page: both append to its slot 2
    ([[0, 1, 2], [3, 1, 4]], [6, 6], 1, 0, "slot 2 of page 1, block_table[0, 1], where block_table[1, 1]"),
    # the last new token of the one meets the first of the other
    ([[0, 1, 2], [3, 1, 4]], [5, 6], 2, 0, "slot 1 of page 1, block_table[0, 1], where block_table[1, 1]"),
    # the one writes to what the other reads, and not the other way round
    ([[0, 1, 2], [3, 1, 4]], [7, 5], 1, 1, "slot 1 of page 1, block_table[1, 1], where block_table[0, 1]"),
    ([[0, 1, 2], [1, 3, 4]], [8, 3], 1, 1, "slot 3 of page 1, block_table[1, 0], where block_table[0, 1]"),
    # over the end of a page
    ([[0, 1, 2], [2, 3, 4]], [7, 0], 2, 0, "slot 0 of page 2, block_table[0, 2], where block_table[1, 0]"),
    ([[0, 1, 1], [2, 3, 4]], [4, 0], 5, 0, "slot 0 of page 1, block_table[0, 1], where block_table[0, 2]"),
]


@pytest.mark.parametrize(("table", "lengths", "tokens", "b", "message"), SLOTS)
def test_what_is_appended_has_a_slot_of_its_own(table, lengths, tokens, b, message):
    caches = _caches(5, 2, 4, 16)
    new = {name: np.ones((2, 2, tokens, 16), np.float32) for name in ("k_new", "v_new")}
    with pytest.raises(ValueError, match=re.escape(f"sequence {b} appends a token of k_new to {message}")):
        _call(**caches, **new, block_table=np.array(table), cache_seqlens=lengths)
    assert not any(cache.any() for cache in caches.values()), "nothing was appended"


def test_sequences_may_share_full_pages_and_unused_entries():
    _call(**_caches(5, 2, 4, 16), **_NEW, block_table=[[0, 1, 2], [0, 3, 4]], cache_seqlens=[4, 4])
    _call(**_caches(5, 2, 4, 16), **_NEW, block_table=[[0, 1, 3], [2, 3, 1]], cache_seqlens=[7, 7])
    _call(**_caches(5, 2, 4, 16), block_table=[[0, 1, 2], [3, 1, 4]], cache_seqlens=[6, 6])
    # Before the window.
    _call(
        **_caches(5, 2, 4, 16),
        **_NEW,
        block_table=[[3, 1, 2], [0, 3, 4]],
        cache_seqlens=[8, 7],
        window=(1, 0),
    )


def _call(**changes):
    given = {"q": _array(2, 4, 1, 16), **_caches(2, 2, 9, 16), **changes}
    return cufa.flash_decode(**given)


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
@pytest.mark.filterwarnings("error")
def test_bad_input_names_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        _call(**changes)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_out_overlapping_an_input(name):
    buffer = np.zeros(10_000, np.float32)
    given = {name: buffer[: 2 * 4 * 16].reshape(2, 4, 1, 16)}
    if name != "q":
        given = {name: buffer[: 2 * 2 * 9 * 16].reshape(2, 2, 9, 16)}
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        _call(**given, out=buffer[64 : 64 + 128].reshape(2, 4, 1, 16))


@pytest.mark.parametrize(("cache", "other"), [("k_cache", "v_cache"), ("k_cache", "k_new"), ("v_cache", "q")])
def test_what_is_appended_to_overlaps_nothing(cache, other):
    buffer = np.zeros((2, 4, 9, 16), np.float32)
    given = {**_NEW, cache: buffer[:, :2]}
    given[other] = {"v_cache": buffer[:, 1:3], "k_new": buffer[:, :2, 3:4], "q": buffer[:, :, :1]}[other]
    with pytest.raises(ValueError, match=f"{cache} overlaps {other} in memory.*appended"):
        _call(**given, cache_seqlens=3)
    assert not buffer.any()


def test_interleaved_caches_are_apart():
    """Keys and values of one buffer, as inference servers keep them."""
    case = make_case([20, 31], new=1, dtype="float32", page_size=16)
    both = np.stack([case.k_cache, case.v_cache], axis=1)
    arrays, options = case.arguments()
    case.check(cufa.flash_decode(arrays[0], both[:, 0], both[:, 1], **options))


def test_nothing_is_appended_by_a_call_that_fails():
    case = make_case([20, 31], new=1, dtype="float32")
    arrays, options = case.arguments()
    before = [x.copy() for x in arrays]
    with pytest.raises(ValueError, match="out has shape"):
        cufa.flash_decode(*arrays, **options, out=_array(2, 4, 2, 16))
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


_ODD = [
    None, 0, 1, -1, 2.5, True, "x", b"bytes", [], (), {}, object(), range(2), np.float32(1), 2**70,
    [0, 1], [[0, 1, 2], [3, 4, 0]], [[0, 1], [2]], [2**70, 1], [None, 1], ["a"],
    _array(0), _array(2), _array(2, 3, dtype=np.int32), _array(2, dtype=np.int64), _array(0, 0, 0, 0),
    _array(2, 4, 1, 16), _array(2, 2, 9, 16), _array(2, 2, 1, 16), _array(2, 2, 9, 16)[:, :, ::-1], _TABLE,
    _array(2, 2, 9, 16, dtype=np.uint8), _array(2, 2, 1, 16, dtype=bool), np.zeros(2, complex),
    np.array("x"), np.array([object()]), np.ma.zeros(2), np.datetime64("2020"), np.zeros(2, "m8[s]"),
    np.zeros(2, "V4"),
]  # fmt: skip
_ARGUMENTS = [
    "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale",
    "scale", "layout", "num_splits", "schedule", "out", "device",
]  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(_ARGUMENTS), st.sampled_from(range(len(_ODD))), min_size=1, max_size=3)
)
@settings(max_examples=400)
def test_whatever_comes_is_computed_or_refused(changes):
    """TypeError or ValueError that names an argument, never another exception, whatever odd values come."""
    message = "q"
    try:
        out = _call(**{name: _ODD[i] for name, i in changes.items()})
        assert isinstance(out, np.ndarray) and not np.isnan(out).any()
    except (TypeError, ValueError) as error:
        message = str(error)
    assert set(re.findall(r"\w+", message)) & {*_ARGUMENTS, "head_dim"}, message
