"""What a problem says about itself, against brute force."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa.core.problem import ITEMSIZE, Problem, default_scale


def problem(seqlen_q=8, seqlen_k=8, causal=False, dtype="float16", heads=4, kv_heads=4, **more) -> Problem:
    return Problem(2, heads, kv_heads, seqlen_q, seqlen_k, 64, dtype, causal, **more)


@given(st.integers(1, 60), st.integers(1, 60), st.booleans())
def test_visible_scores_and_flops(seqlen_q, seqlen_k, causal):
    i, j = np.indices((seqlen_q, seqlen_k))
    count = int((j <= i + seqlen_k - seqlen_q).sum()) if causal else seqlen_q * seqlen_k
    p = problem(seqlen_q, seqlen_k, causal)
    assert p.visible_scores == count
    # A multiply and an add per element of head_dim, once for Q Kᵀ and once for P V.
    assert p.flops == count * 64 * 2 * 2 * (2 * 4)


def test_causal_flops_are_half_in_the_limit():
    full, causal = problem(1 << 16, 1 << 16), problem(1 << 16, 1 << 16, causal=True)
    assert 0.5 < causal.flops / full.flops < 0.50001


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_io_bytes_are_those_of_the_arrays(dtype):
    p = problem(5, 7, dtype=dtype, heads=6, kv_heads=2)
    q, k = np.empty((2, 6, 5, 64), np.uint8), np.empty((2, 2, 7, 64), np.uint8)
    assert p.io_bytes == (2 * q.size + 2 * k.size) * p.itemsize


def test_itemsize_is_numpys():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, size in ITEMSIZE.items():
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
        assert np.dtype(dtype).itemsize == size


def test_causal_offset_is_bottom_right():
    """The last query sees the last key."""
    p = problem(3, 10, causal=True)
    assert (p.seqlen_q - 1) + p.causal_offset == p.seqlen_k - 1


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(8, 8, 1), (8, 2, 4), (8, 1, 8)])
def test_group_size(heads, kv_heads, group):
    assert problem(heads=heads, kv_heads=kv_heads).group_size == group


def test_text():
    assert str(problem(5, 7)) == "batch 2, heads 4, seqlen 5×7, head_dim 64, float16, full"
    assert str(problem(5, 7, causal=True, dtype="float32", kv_heads=2, precision="tf32")) == (
        "batch 2, heads 4/2, seqlen 5×7, head_dim 64, float32 (tf32), causal"
    )


def test_frozen_and_hashable():
    p = problem()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.batch = 3  # type: ignore[misc]
    assert hash(p) == hash(problem())


def test_default_scale():
    assert default_scale(64) == 0.125
