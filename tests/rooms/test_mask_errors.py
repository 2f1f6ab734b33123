"""Arguments, records and builders that make no mask: each error names argument, value and cure."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cufa
from cufa import masks
from cufa.calls import dispatch
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, FULL, Band, Mask


def _words(x: object) -> str:
    """For a test's name: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


_BAND = {"family": "band", "left": 5, "right": 0, "diagonal": "bottom-right"}
_COLUMNS = {"family": "columns", "band": _BAND, "intervals": {"shape": [2, 1, 1, 8], "digest": "0" * 16}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "JSON object with one family of band.*not None"),
        ([_BAND], "JSON object .* not builtins.list"),
        ({}, "family=None of a mask's record is not known; use one of band"),
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
        ({**_BAND, "matrix": 3}, r"matrix is 3: it takes the lengths \[seqlen_q, seqlen_k\], or null"),
        ({**_BAND, "matrix": [3, -1]}, "matrix has shape .*: a size is at least 0"),
        ({**_BAND, "diagonal": 2**31 - 1}, "diagonal=2147483647 must be within ±1,073,741,824"),
        ({**_BAND, "keep": None}, "keep must be an integer from 0 up, not None"),
        ({**_BAND, "global_tokens": "3"}, "global_tokens must be an integer from 0 up, not '3'"),
        ({**_BAND, "prefix": {"digest": ""}}, "prefix is builtins.dict: it takes an array's record, shape"),
        ({**_BAND, "prefix": {"shape": [-1], "digest": ""}}, "prefix has shape .* a size is at least 0"),
        ({**_BAND, "prefix": {"shape": [1, 2], "digest": ""}}, r"prefix has shape \(1, 2\): it takes \(batch,\)"),
        ({**_BAND, "prefix": {"shape": [2]}}, "prefix: packed, or digest, of its record must be text, not None"),
        ({**_BAND, "prefix": {"shape": [2], "packed": "?"}}, r"prefix: packed .* does not hold \(2,\) integers"),
        ({**_BAND, "prefix": {"shape": [2], "packed": "AAAA"}}, r"packed .* does not hold \(2,\) integers"),
        ({**_BAND, "prefix": Integers(np.array([3, -4])).as_json()}, r"prefix\[1\] is -4: it must be at least 0"),
        ({**_BAND, "prefix": {**Integers(np.array([3, 4])).as_json(), "shape": [3]}}, r"not hold \(3,\) integers"),
        ({"family": "chunks", "size": 0}, "size=0 must be from 1"),
        ({**_COLUMNS, "band": {"family": "chunks", "size": 3}}, "band is causal chunks of 3: it takes a mask of"),
        ({**_COLUMNS, "band": {**_BAND, "left": -5}}, "left must be at least 0"),
        ({**_COLUMNS, "intervals": 3}, "intervals is 3: it takes an array's record"),
        ({**_COLUMNS, "intervals": {"shape": [3, 1, 1, 8], "digest": ""}}, r"intervals has shape \(3, 1, 1, 8\)"),
        ({**_COLUMNS, "rows": "zz"}, "rows='zz' is not known"),
        ({**_COLUMNS, "title": 3}, "title must be text, not 3"),
    ],
    ids=_words,
)  # fmt: skip
def test_records_that_are_no_masks(record, message):
    with pytest.raises(ValueError, match=message):
        Mask.from_json(record)


def test_records_of_masks_without_later_fields():
    assert Mask.from_json({"family": "band"}) == FULL and Mask.from_json(_BAND) == Band(5, 0)
    assert not Mask.from_json(_COLUMNS).known


# --- Arguments --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Neither here nor on a GPU: what is refused is refused before."""

    def ran(*arguments, **options):
        raise AssertionError("a refused call was planned")

    monkeypatch.setattr(dispatch, "gpu_available", lambda: False)
    monkeypatch.setattr(dispatch, "plan_for", ran)


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
]  # fmt: skip
OTHERS = [
    (
        {"mask": np.ones((8, 8))},
        TypeError,
        "mask must be made by cufa.masks.*not numpy.ndarray: cufa.masks.from_dense",
    ),
    ({"mask": np.ones((1, 8, 8), bool)}, ValueError, r"mask has shape \(1, 8, 8\): .*sequences or heads"),
    ({"mask": np.ones((7, 8), bool) ^ np.eye(7, 8, dtype=bool)}, ValueError, "of 7 queries and 8 keys"),
    ({"mask": True}, TypeError, "mask must be made by cufa.masks.*not True"),
    ({"mask": "causal"}, TypeError, "mask must be made by cufa.masks.*not 'causal'"),
    ({"mask": masks.causal}, TypeError, "mask must be made by cufa.masks.*not builtins.function"),
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
]  # fmt: skip


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
        ("middle", ValueError, "diagonal='middle' is not known; use 'bottom-right', 'top-left' or an integer"),
        (1.5, TypeError, "diagonal=1.5 must be 'bottom-right', 'top-left' or an integer"),
        (True, TypeError, "diagonal=True must be"),
        (None, TypeError, "diagonal=None must be"),
        (-(2**40), ValueError, "diagonal=-1099511627776 must be within ±1,073,741,824"),
        (2**30 + 1, ValueError, "diagonal=1073741825 must be within ±1,073,741,824"),
    ],
)  # fmt: skip
def test_diagonals_that_are_none(diagonal, error, message):
    for make in (lambda: masks.causal(diagonal), lambda: masks.window(1, 0, diagonal)):
        with pytest.raises(error, match=message):
            make()


# --- Builders ---------------------------------------------------------------------------------------------

WRONG = [
    (lambda: masks.prefix(-1), ValueError, "length=-1 must be from 0"),
    (lambda: masks.prefix(1.5), TypeError, "length must be an integer from 0 up, not 1.5"),
    (lambda: masks.prefix([3, -2]), ValueError, r"length\[1\] is -2: it must be at least 0"),
    (lambda: masks.prefix([[3]]), ValueError, r"length has shape \(1, 1\): it takes \(batch,\)"),
    (lambda: masks.streaming(2, None), TypeError, "window must be an integer from 0 up, not None"),
    (lambda: masks.global_window(True, 1, 1), TypeError, "tokens must be an integer.*not True"),
    (lambda: masks.global_window(1, -1, 1), ValueError, r"window=\(-1, 1\): left must be at least 0"),
    (lambda: masks.chunks(0), ValueError, "size=0 must be from 1"),
    (lambda: masks.chunks(3, "middle"), ValueError, "diagonal='middle' is not known"),
    (lambda: masks.documents([3, -1]), ValueError, r"lengths\[1\] is -1: it must be at least 0"),
    (lambda: masks.documents([1.5, 2]), TypeError, "lengths is float64: it takes integers; convert"),
    (lambda: masks.documents([[1, 2], [3]]), ValueError, "lengths is .*rows that differ in length: pad"),
    (lambda: masks.documents(5), TypeError, "lengths must be an array"),
    (lambda: masks.documents([[[1]]]), ValueError, r"lengths has shape .*takes \(documents,\) or \(batch, doc"),
    (lambda: masks.documents([3, 4], seqlen=5), ValueError, "lengths add up to 7 tokens, more than seqlen=5"),
    (lambda: masks.documents([3, 4], causal="yes"), TypeError, "causal must be True or False, not 'yes'"),
    (lambda: masks.documents([2**31 - 1] * 2), ValueError, "the sum of lengths=4294967294 must be from 0"),
    (lambda: masks.documents([2**40]), ValueError, "lengths holds 1099511627776, which does not fit int32"),
    (lambda: masks.shared_question(-1, [2]), ValueError, "question=-1 must be from 0"),
    (lambda: masks.shared_question([1, 2, 3], [[2], [2]]), ValueError, "question has 3 .*answers has 2"),
    (lambda: masks.shared_question([[1], [1, 2]], [2]), ValueError, "question is .*rows that differ in length"),
    (lambda: masks.shared_question(np.array(2.5), [2]), TypeError, "question must be an integer from 0 up"),
    (lambda: masks.evict("abc"), TypeError, "rows must be an array"),
    (lambda: masks.evict(np.ones((2, 2, 2, 2), int)), ValueError, "rows has shape .*takes.*kv_heads, seqlen_k"),
    (lambda: masks.columns(None, [2]), TypeError, "lo1 must be an array"),
    (lambda: masks.columns([1], [2], [3]), ValueError, "lo2 came without hi2"),
    (lambda: masks.columns([1, 2], [2]), ValueError, r"hi1 has shape \(1,\) but lo1 has \(2,\)"),
    (lambda: masks.columns([1], [2], causal=True, window=(1, 2)), ValueError, "causal=True hides them"),
    (lambda: masks.from_flashmask(np.ones((1, 1, 3, 1), int), False), ValueError, "causal=False.* is 2 or 4"),
    (lambda: masks.from_flashmask(np.ones((1, 1, 3, 4), int), True), ValueError, "causal=True.* is 1 or 2"),
    (lambda: masks.from_flashmask(np.ones((1, 3, 4), int), True), ValueError, "has shape .*takes .batch, 1 or"),
    (lambda: masks.from_dense(np.ones((3, 3))), TypeError, "seen is float64: it takes booleans"),
    (lambda: masks.from_dense(np.ones(3, bool)), ValueError, r"seen has shape \(3,\): it takes"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_builders_name_argument_value_and_cure(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.documents([3, 5]), "has numbers for 8 keys but k has 9: make it for 9"),
        (masks.prefix([1, 2, 3]), "is of 3 sequences but k has 2: make it for 2, or for 1"),
        (masks.evict(np.ones((1, 3, 9), int)), "is of 3 key/value heads but k has 2"),
    ],
)
@pytest.mark.parametrize("call", [cufa.flash_attention, cufa.plan, cufa.attention_reference])
def test_a_mask_that_does_not_go_with_the_arrays(call, mask, message):
    x = np.ones((2, 2, 9, 8), np.float32)
    with pytest.raises(ValueError, match=f"mask, .*{message}"):
        call(x, x, x, mask=mask)
