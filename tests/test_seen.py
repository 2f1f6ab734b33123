"""The short cut of repeated calls: what makes two calls alike, and overlaps that only addresses show.

Arrays here are CuPy's, over addresses that nobody reads: no GPU is needed.
"""

from __future__ import annotations

import numpy as np
import pytest

import cufa
from cufa.core.mask import CAUSAL, FULL
from cufa.ops import arrays, calls, seen

cp = pytest.importorskip("cupy")


def array(address, shape=(2, 4, 8, 16), dtype=np.float16):
    memory = cp.cuda.UnownedMemory(address, 1 << 30, None, 0)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


Q, K, V, OUT = (array(n << 32) for n in range(1, 5))


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)


def test_only_calls_on_cupy_arrays_have_a_signature():
    assert seen.signature((Q, K, None, V), None, "x") is not None
    host = np.zeros((2, 4, 8, 16), np.float16)
    for inputs, out in (
        ((host, K), None),
        ((Q, host), None),
        ((Q, K), host),
        ((None, K), None),
        ((Q, 3), None),
    ):
        assert seen.signature(inputs, out, "x") is None
    assert seen.signature((Q, K), None, ["unhashable"]) is None


def test_addresses_do_not_matter_but_alignment_does():
    same = seen.signature((Q, K, V), OUT, "x")
    assert seen.signature((array(9 << 32), K, V), array(16), "x") == same
    assert seen.signature((array((9 << 32) + 8), K, V), OUT, "x") != same


def test_small_arrays_do_not_hide_how_large_ones_are_aligned():
    """Lengths at 4 bytes past 16 used to share a key with queries there."""
    lengths = array(5 << 32, (2,), np.int32), array((5 << 32) + 4, (2,), np.int32)
    moved = array((9 << 32) + 4)
    keys = [seen.signature((q, K, V), None, "x", small=[n]) for q in (Q, moved) for n in lengths]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    odd = seen.signature((Q, K, V), None, "x", small=[array((5 << 32) + 1, (2,), np.int32)])
    assert odd != keys[0], "refused: not taken for a call that was seen"


@pytest.mark.parametrize(
    "other",
    [
        ((Q, K, V), None, "x"),
        ((Q, K, V), OUT, "y"),
        ((Q, K, None), OUT, "x"),
        ((Q, K, V, None), OUT, "x"),
        ((Q, None, K), V, "x"),
        ((Q, K[:1], V), OUT, "x"),
        ((Q, K, V[:, ::2]), OUT, "x"),
        ((Q, array(2 << 32, dtype=np.int16), V), OUT, "x"),
        ((Q, K, V), OUT[:, :, ::2], "x"),
    ],
)
def test_calls_that_differ(other):
    assert seen.signature(*other) != seen.signature((Q, K, V), OUT, "x")


@pytest.fixture
def short_cut(monkeypatch):
    """How many calls of flash_attention were checked in full; nothing is launched."""
    checked = []

    def run_on_gpu(call, key):
        checked.append(call.check(on_gpu=True))
        seen.remember(key, lambda inputs, out, return_lse: "short cut")

    monkeypatch.setattr(seen, "_seen", {})
    monkeypatch.setattr(calls, "run_on_gpu", run_on_gpu)
    return checked


@pytest.mark.parametrize(
    "bad", [1.0, np.float32(1), 2, "True", None, [True], np.ones(1, bool), np.array(1.0), np.array(1)]
)
def test_a_mask_that_is_refused_is_refused_after_one_like_it(short_cut, bad):
    for _ in range(2):
        with pytest.raises(TypeError, match="causal must be True or False, not "):
            cufa.flash_attention(Q, K, V, causal=bad)
        cufa.flash_attention(Q, K, V, causal=True)
    assert len(short_cut) == 1


@pytest.mark.parametrize("form", [int, np.bool_, np.array, np.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_in_other_words_takes_the_short_cut(short_cut, causal, form):
    cufa.flash_attention(Q, K, V, causal=form(causal))
    (_, problem), *_ = short_cut
    assert problem.mask is (CAUSAL if causal else FULL)
    assert cufa.flash_attention(Q, K, V, causal=causal) == "short cut"
    assert cufa.flash_attention(Q, K, V, causal=form(causal)) == "short cut"


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"scale": 1.0}, {"scale": 1 + 0j}),
    ],
    ids=str,
)
def test_what_equals_an_option_that_was_taken_is_refused_all_the_same(short_cut, good, bad):
    for _ in range(2):
        cufa.flash_attention(Q, K, V, **good)
        with pytest.raises(TypeError, match=next(iter(bad))):
            cufa.flash_attention(Q, K, V, **bad)
    assert len(short_cut) == 1


def test_masks_that_are_equal_take_the_short_cut(short_cut):
    for _ in range(2):
        cufa.flash_attention(Q, K, V, mask=cufa.masks.window(5, 0))
    assert len(short_cut) == 1
    cufa.flash_attention(Q, K, V, mask=cufa.masks.window(6, 0))
    cufa.flash_attention(Q, K, V, mask=cufa.masks.window(5, 0), softcap=2)
    assert len(short_cut) == 3


def test_launch_takes_all_addresses(no_device):
    launched = []
    call = seen.SeenCall(
        lambda *a: launched.append(a), {"q": Q, "k": K, "new": None, "v": V}, OUT, (2, 4, 8), arrays.check_out
    )
    elsewhere = array(77 << 32)
    assert call((Q, elsewhere, None, V), OUT, False) is OUT
    assert launched == [(1 << 32, 77 << 32, 0, 3 << 32, 4 << 32, 0)], "0: no log-sum-exp"


def test_overlaps_are_checked_once_for_each_way_of_lying_to_each_other(no_device):
    checked = []
    call = seen.SeenCall(
        lambda *a: None,
        {"q": Q, "k": K, "v": V},
        OUT,
        (2, 4, 8),
        lambda out, inputs: checked.append((out, *inputs.values())),
        written=("k", "v"),
    )
    call((Q, K, V), OUT, False)
    assert not checked, "apart"
    size = 2 * 4 * 8 * 16 * 2
    for distance in (size, -size, size + 2):
        call((Q, K, array((2 << 32) + distance)), OUT, False)
    assert not checked, "side by side"
    for distance in (0, size - 2, 2 - size, 5):
        for base in (1 << 40, 1 << 41):
            mine = array(base + distance)
            call((Q, array(base), mine), OUT, False)
        assert len(checked) == 1 and checked.pop()[3].data.ptr == (1 << 40) + distance
    call((array((4 << 32) + 2), K, V), OUT, False)
    assert len(checked) == 1, "out is written to as well"


def test_an_overlap_that_is_refused_is_refused_again(no_device):
    call = seen.SeenCall(lambda *a: None, {"q": Q, "k": K, "v": V}, OUT, (2, 4, 8), arrays.check_out)
    for _ in range(3):
        with pytest.raises(ValueError, match="out overlaps k"):
            call((Q, array((4 << 32) + 64), V), OUT, False)


def test_interleaved_views_are_apart(no_device):
    both = array(1 << 40, (2, 2, 4, 8, 16))
    call = seen.SeenCall(
        lambda *a: None, {"q": Q, "k": both[:, 0], "v": V}, both[:, 1], (2, 4, 8), arrays.check_out
    )
    call((Q, both[:, 0], V), both[:, 1], False)
    with pytest.raises(ValueError, match="out overlaps k"):
        call((Q, both[:, 0], V), both[:, 0], False)
    assert arrays.shares_memory(both, both[1:, :, 2]) and not arrays.shares_memory(
        both[:, 1], both[:, 0, ::2]
    )
