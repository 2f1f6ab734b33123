"""Arrays at the door: where they lie in memory, against every byte of small ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa.calls import arrays

SIZES, STEPS = st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(-6, 6)


@st.composite
def views(draw):
    """Of one buffer, with any sizes and strides, whole elements or not."""
    shape = tuple(draw(SIZES))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    strides = tuple(draw(STEPS) * draw(st.sampled_from([1, itemsize])) for _ in shape)
    span = sum(abs(s) * (n - 1) for s, n in zip(strides, shape, strict=True) if n > 1)
    below = sum(-s * (n - 1) for s, n in zip(strides, shape, strict=True) if n > 1 and s < 0)
    buffer = np.zeros(span + below + itemsize + 64, np.uint8)
    start = draw(st.integers(below, below + 16))
    return np.ndarray(shape, f"V{itemsize}", buffer, start, strides), buffer


def bytes_of(x):
    """Every byte's address, once per element that it belongs to."""
    first = x.__array_interface__["data"][0]
    return [
        first + sum(i * s for i, s in zip(index, x.strides, strict=True)) + byte
        for index in itertools.product(*(range(n) for n in x.shape))
        for byte in range(x.itemsize)
    ]


@settings(max_examples=400)
@given(views())
def test_the_range_of_an_array_is_that_of_its_bytes(view):
    x, _ = view
    low, high = arrays.byte_range(x)
    found = bytes_of(x)
    assert (low, high) == ((min(found), max(found) + 1) if found else (low, low))


@settings(max_examples=400)
@given(views())
def test_no_array_that_overlaps_itself_is_missed(view):
    x, _ = view
    found = bytes_of(x)
    if len(set(found)) < len(found):
        assert arrays.overlaps_itself(x)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (16, 4), False),
        ((3, 4), (-16, 4), False),
        ((3, 4), (12, 4), True),  # the last number of a row is the first of the next
        ((3, 4), (14, 4), True),  # and half of it
        ((3, 4), (-12, 4), True),
        ((3, 4), (20, 4), False),
        ((2, 3), (20, 8), False),  # every other number; the next row begins where the last one was
        ((2, 3), (16, 8), True),
        ((3, 4), (0, 4), True),
        ((1, 4), (0, 4), False),  # never stepped along
        ((4, 3), (4, 16), False),  # in another order
        ((4, 3), (4, 12), True),
        ((2, 3, 4), (48, 16, 4), False),
        ((2, 3, 4), (44, 16, 4), True),
        ((2, 3, 4), (16, 32, 4), False),  # heads interleaved
        ((0, 3), (0, 0), False),  # NumPy's strides of an empty array
    ],
)
def test_arrays_that_overlap_themselves(shape, strides, overlaps):
    x = np.lib.stride_tricks.as_strided(np.zeros(100, np.float32)[50:], shape, strides)
    assert arrays.overlaps_itself(x) == overlaps


def test_reversed_arrays_are_compared_where_they_lie():
    buffer = np.zeros((4, 8), np.float32)
    low, high = arrays.byte_range(buffer)
    assert arrays.byte_range(buffer[::-1]) == arrays.byte_range(buffer[::-1, ::-1]) == (low, high)
    assert arrays.byte_range(buffer[2::-1]) == (low, high - 32)
    assert arrays.shares_memory(buffer[1::-1], buffer[:1])
    assert not arrays.shares_memory(buffer[3:1:-1], buffer[:2])


def test_alignment_is_that_of_every_row_and_array():
    buffer = np.zeros(4096, np.uint8)
    start = -buffer.ctypes.data % 64

    def at(offset, row=64):
        return np.ndarray((2, 4, 8), np.float16, buffer, start + offset, (row * 4, row, 2))

    assert [arrays.alignment(at(n)) for n in (0, 2, 4, 6, 8, 16, 24, 32)] == [16, 2, 4, 2, 8, 16, 8, 16]
    assert [arrays.alignment(at(0, row)) for row in (64, 66, 68, 72, 80)] == [16, 2, 4, 8, 16]
    assert arrays.alignment(at(0), at(4)) == arrays.alignment(at(4), at(0)) == 4
    assert arrays.alignment(at(0, 66)[:1, :1]) == 16, "never stepped along"


def test_strides_are_positive_where_they_are_stepped_along():
    x = np.zeros((2, 3, 4), np.float32)
    assert arrays.positive_strides(x, x[:, :, ::2], x.transpose(2, 0, 1))
    assert not arrays.positive_strides(x, x[:, ::-1])
    assert not arrays.positive_strides(x, np.broadcast_to(x[:1], x.shape))
    assert arrays.positive_strides(np.broadcast_to(x[:1, :1], (1, 1, 4)), x[:0])
    assert arrays.positive_strides(np.lib.stride_tricks.as_strided(x, (1, 4), (-16, 4)))
