"""What a problem says about itself, against brute force."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_support import BANDS

from cufa.kernels.params import softmax_scalars
from cufa.problem.element import ELEMENTS
from cufa.problem.lengths import Cached
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.problem.options import MAX_SCALE
from cufa.problem.problem import Problem


def problem(seqlen_q=8, seqlen_k=8, mask=FULL, dtype="float16", heads=4, kv_heads=4, **more) -> Problem:
    return Problem(2, heads, kv_heads, seqlen_q, seqlen_k, 64, dtype, mask, **more)


@given(st.integers(1, 60), st.integers(1, 60), BANDS)
def test_visible_scores_and_flops(seqlen_q, seqlen_k, mask):
    count = int(mask.dense(seqlen_q, seqlen_k).sum())
    p = problem(seqlen_q, seqlen_k, mask)
    assert p.visible_scores == count
    # A multiply and an add per element of head_dim, once for Q Kᵀ and once for P V.
    assert p.flops == count * 64 * 2 * 2 * (2 * 4)


def test_causal_flops_are_half_in_the_limit():
    full, causal = problem(1 << 16, 1 << 16), problem(1 << 16, 1 << 16, CAUSAL)
    assert 0.5 < causal.flops / full.flops < 0.50001


def test_bytes_of_a_cache_are_those_of_its_heads():
    cached = dataclasses.replace(problem(1, 100, kv_heads=2), lengths=Cached(), operation="decode")
    assert cached.kv_bytes() == 2 * (2 * 2 * 100 * 64) * 2  # K and V of two sequences, two heads, 100 keys
    assert cached.kv_bytes([100, 30]) == 2 * (2 * 130 * 64) * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_io_bytes_are_those_of_the_arrays(dtype):
    p = problem(5, 7, dtype=dtype, heads=6, kv_heads=2)
    q, k = np.empty((2, 6, 5, 64), np.uint8), np.empty((2, 2, 7, 64), np.uint8)
    assert p.io_bytes == (2 * q.size + 2 * k.size) * p.itemsize


def test_itemsize_is_numpys():
    for name, element in ELEMENTS.items():
        assert element.name == name
        assert element.dtype.itemsize == element.itemsize == np.dtype(element.storage).itemsize or (
            name == "bfloat16"  # NumPy knows its name once ml_dtypes is imported
        )


def test_text():
    assert str(problem(5, 7)) == "batch 2, heads 4, seqlen 5×7, head_dim 64, float16, full"
    assert str(problem(5, 7, CAUSAL, dtype="float32", kv_heads=2, precision="tf32")) == (
        "batch 2, heads 4/2, seqlen 5×7, head_dim 64, float32 (tf32), causal"
    )


def test_text_of_masks_and_scores():
    assert problem(5, 7, Band(3, 0), softcap=30.0).scores_text == "window (3, 0), softcap 30"
    assert str(problem(5, 7, Band(3, None, 2))).endswith("float16, window (3, None) diagonal 2")


@pytest.mark.parametrize(
    "p",
    [
        problem(5, 7),
        problem(5, 7, Band(3, 0, "top-left"), softcap=30.0),
        problem(1, 9, CAUSAL, lengths=Cached(16, 4, 9, True, 1), k_dtype="float8_e4m3", operation="decode"),
    ],
    ids=str,
)
def test_a_round_trip_through_json(p):
    assert Problem.from_json(json.loads(json.dumps(p.as_json()))) == p


def test_frozen_and_hashable():
    p = problem()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.batch = 3  # type: ignore[misc]
    assert hash(p) == hash(problem())


def test_the_largest_scale_is_a_float32_in_units_of_log2():
    (scaled, _) = softmax_scalars(MAX_SCALE, None).values()
    assert scaled <= float(np.finfo(np.float32).max) < 1.0001 * scaled
