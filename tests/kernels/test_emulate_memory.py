"""Copies that an executed kernel is given: what lies around and in them."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest
from conftest import why_no_compiler
from support import make_inputs

from cufa.run.emulate.calls import emulate
from cufa.run.emulate.memory import guarded_copy


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_behind_the_last_row_of_every_head_lies_poison(layout):
    """Reading past a head's end finds NaN that no kernel may touch, not the next head."""
    x = np.arange(2 * 3 * 5 * 8, dtype=np.float32).reshape(2, 3, 5, 8)
    x = np.ascontiguousarray(x.transpose(layout)).transpose(layout)
    copy = guarded_copy("q", x, 4, writable=False)
    np.testing.assert_array_equal(copy.array, x)
    assert copy.valid is not None
    behind = np.lib.stride_tricks.as_strided(copy.array, (2, 3, 9, 8), copy.array.strides)[:, :, 5:]
    strides = [s // 4 for s in copy.array.strides]
    known = np.lib.stride_tricks.as_strided(copy.valid, (2, 3, 9, 8), strides)[:, :, 5:]
    if layout == (0, 1, 2, 3):
        assert np.isnan(behind).all() and not known.any()
    else:  # rows of other heads lie between a head's own; behind the last sequence nothing does
        assert np.isnan(behind[-1]).all()
    assert int(copy.valid.sum()) == x.size


def test_a_result_begins_as_poison():
    x = np.zeros((1, 2, 5, 8), np.float32)
    assert np.isnan(guarded_copy("out", x, 4, writable=True).array).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 hands out addresses of 32 bits")
def test_arrays_at_addresses_of_32_bits_are_no_shared_memory(monkeypatch):
    """As Debian's python3 has them, which is not position-independent."""
    if reason := why_no_compiler():
        pytest.skip(reason)
    full, libc = np.full, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    given = []

    def low(shape, value, dtype=None):
        if isinstance(shape, tuple):
            return full(shape, value, dtype)
        private_anonymous_32_bits = 0x62
        given.append(libc.mmap(None, int(shape), 3, private_anonymous_32_bits, -1, 0))
        found = np.frombuffer((ctypes.c_uint8 * int(shape)).from_address(given[-1]), np.uint8)
        found[:] = value
        return found

    monkeypatch.setattr(np, "full", low)
    # Its launches hand a workspace on.
    run = emulate(*make_inputs(1, 1, 1, 40, 70, 64), mode="checked", algorithm="naive")
    assert len(given) >= 4 and max(given) < 2**32
    assert not run.findings, run.findings[0]
