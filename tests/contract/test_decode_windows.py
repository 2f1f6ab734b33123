"""Windows and first keys in decoding, on the host: which tiles are read and split, how a window is planned, and which
masks no kernel serves. (Results: test_decode.py.)"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.plan.planner import make_plan
from cufa.problem.lengths import Cached
from cufa.problem.mask import Band
from cufa.problem.problem import Kept, Problem
from cufa.schedule.decode import most_tiles, num_tiles, read_range, split_range, tiles_to_read, used_splits

H200 = Device.typical("sm_90")


def test_splits_cover_what_is_read():
    for length in range(70):
        for reach in (1, 2, 8, 9, 16, 33):
            first, count = tiles_to_read(length, 8, reach)
            assert count == num_tiles(length, 8, reach) <= most_tiles(69, 8, reach)
            for num_splits in (1, 2, 3, 9):
                ranges = [split_range(length, num_splits, i, 8, reach) for i in range(num_splits)]
                used = used_splits(length, num_splits, 8, reach)
                keys = [k for r in ranges[:used] for k in range(*r)]
                assert keys == list(range(*read_range(length, reach)))
                assert all(a == b for a, b in ranges[used:])
                assert first * 8 <= keys[0] if keys else length == 0


def test_tiles_are_those_of_both_ends():
    for length in range(0, 90, 3):
        for window in (None, 1, 8, 9, 33):
            for keys in (0, 1, 8, 17, 100):
                reach = Kept(window, keys)
                first, count = tiles_to_read(length, 8, reach)
                places = [t for t in range(max(1, -(-length // 8)))
                          if t * 8 < keys or window is None or (t + 1) * 8 > max(length - window, 0)]  # fmt: skip
                assert (first, count) == (0, len(places)) and count <= most_tiles(90, 8, reach)
                for num_splits in (1, 2, 5):
                    ranges = [split_range(length, num_splits, i, 8, reach) for i in range(num_splits)]
                    used = used_splits(length, num_splits, 8, reach)
                    assert sum(-(-(b - a) // 8) for a, b in ranges[:used]) == (count if length else 0)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize(("batch", "ragged"), [(1, False), (4, False), (64, False), (1, True)])
def test_a_window_is_planned_like_a_cache_as_long(batch, kv_heads, ragged):
    """1024 keys of 128k. Where lengths differ, a window may begin and end in the midst of a tile: one more."""
    short = Problem(
        batch, 32, kv_heads, 1, 1 << 10, 128, "bfloat16", lengths=Cached(given=ragged), operation="decode"
    )  # fmt: skip
    window = dataclasses.replace(short, seqlen_k=1 << 17, mask=Band(1023, 0))
    plan, of_short = make_plan(window, H200), make_plan(short, H200)
    assert plan.spec == of_short.spec and plan.config == of_short.config
    assert window.kv_bytes() == short.kv_bytes() == window.kv_bytes([10**5] * batch)
    if not ragged:
        assert plan.split == of_short.split


def test_a_window_as_long_as_the_cache_is_none():
    short = Problem(1, 8, 8, 1, 1024, 64, "float16", lengths=Cached(), operation="decode")
    for left, tokens, kind in ((1023, 1, "full"), (1023, 2, "causal"), (1022, 1, "band")):
        assert dataclasses.replace(short, mask=Band(left, 0), seqlen_q=tokens).mask_kind == kind


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (masks.streaming(np.array([3, 5]), 9), "one number of first keys for all sequences"),
        (masks.prefix(np.array([3, 5])), "one number of first keys for all sequences"),
        (masks.chunks(64), "serves band masks"),
    ],
)
def test_what_kernels_do_not_serve(mask, why):
    with pytest.raises(ValueError, match=why):
        cufa.plan_decode((2, 4, 1, 64), (2, 2, 300, 64), mask=mask, device="sm_90")
    assert "CPU" in str(cufa.plan_decode((2, 4, 1, 64), (2, 2, 300, 64), mask=mask, device="cpu"))
