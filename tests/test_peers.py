"""Other libraries: how masks are put to them, and what is refused, without any of them here."""

from __future__ import annotations

import numpy as np
import pytest

from cufa.bench import peers
from cufa.bench.decode_cases import make_decode
from cufa.bench.peers import fa4, flex, sdpa
from cufa.bench.suites import make
from cufa.core.mask import CAUSAL, FULL, Band

MASKS = [FULL, CAUSAL, Band(7, 0), Band(7, 3), Band(4, None), Band(None, 0, "top-left"), Band(9, 5, 2)]


def problem(mask, seqlen_q=24, seqlen_k=40, **options):
    return make(1, 2, seqlen_q, 16, "bfloat16", mask, seqlen_k=seqlen_k, **options)


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_flex_sees_what_the_mask_sees(mask):
    p = problem(mask)
    row, key = np.arange(24)[:, None], np.arange(40)[None, :]
    seen = np.broadcast_to(flex._visible(p)(0, 0, row, key), (24, 40))
    assert (seen == mask.dense(24, 40)).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_fa4_is_given_the_same_band_bottom_right(mask):
    p = problem(mask)
    try:
        left, right = fa4.window_size(p)
    except NotImplementedError:
        assert mask.diagonal != "bottom-right"
        return
    assert (Band(left, right).dense(24, 40) == mask.dense(24, 40)).all()


def test_fa4_is_given_a_window_of_a_cache():
    assert fa4.window_size(make_decode(1, 8, 2, 4096, mask=Band(1023, 0))) == (1023, None)
    assert fa4.window_size(make_decode(1, 8, 2, 4096)) == (None, None)


@pytest.mark.parametrize(
    ("p", "reason"),
    [
        (problem(Band(7, 0)), "window"),
        (problem(CAUSAL, softcap=30.0), "soft cap"),
        (problem(Band(None, 3)), "diagonal"),
        (problem(CAUSAL), "top-left"),
    ],
)
def test_torch_refuses_what_it_would_compute_otherwise(p, reason):
    with pytest.raises(NotImplementedError, match=reason):
        sdpa._mask("torch cudnn", p)


def test_torch_is_given_square_masks_as_a_flag():
    assert sdpa._mask("torch cudnn", problem(CAUSAL, 40, 40)) == {"is_causal": True}
    assert sdpa._mask("torch cudnn", problem(FULL)) == {"is_causal": False}


def test_families_name_every_peer_once():
    assert sorted(peers.PEERS) == sorted(set(peers.PEERS))
    assert all(name in peers.family_of(name).peers for name in peers.PEERS)
    for family in peers.FAMILIES.values():
        assert set(family.peers) <= set(peers.here()) or family.missing


def test_what_is_missing_says_so():
    missing = [family for family in peers.FAMILIES.values() if family.missing]
    for family in missing:
        with pytest.raises(NotImplementedError, match="not installed"):
            peers.make(family.peers[0], problem(FULL), {})
