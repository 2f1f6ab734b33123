"""Copies that an executed kernel is given: what lies around and in them."""

from __future__ import annotations

import numpy as np
import pytest

from cufa.executor.memory import guarded_copy


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
