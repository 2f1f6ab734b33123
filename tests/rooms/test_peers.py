"""Other libraries: how masks are put to them, and what is refused, without any of them here."""

from __future__ import annotations

import numpy as np
import pytest

from cufa import masks
from cufa.gpu.architectures import Device
from cufa.measure import peers
from cufa.measure.decode_cases import make_decode
from cufa.measure.mask_cases import irregular_masks
from cufa.measure.peers import fa4, flex, sdpa
from cufa.measure.suites import SUITES, make
from cufa.problem.bits import Bits
from cufa.problem.mask import CAUSAL, FULL, Band, Mask

MASKS = [FULL, CAUSAL, Band(7, 0), Band(7, 3), Band(4, None), Band(None, 0, "top-left"), Band(9, 5, 2)]


def problem(mask, seqlen_q=24, seqlen_k=40, **options):
    return make(1, 2, seqlen_q, 16, "bfloat16", mask, seqlen_k=seqlen_k, **options)


def _many():
    """Masks whose numbers differ from sequence to sequence and head to head, for (2, 2 of 4 heads, 24, 40)."""
    rng = np.random.default_rng(5)
    runs = [rng.integers(-4, 30, (2, 2, 40)) for _ in range(4)]
    rows = np.arange(40) + rng.integers(1, 20, (2, 40))
    return [
        masks.prefix(9), masks.prefix(np.array([0, 30])), masks.streaming(3, 6), masks.streaming(np.array([5, 1]), 4),
        masks.global_window(4, 3, 2), masks.global_window(np.array([0, 25]), 3, 0, "top-left"),
        masks.documents([7, 1, 20, 0, 12]), masks.documents([[7, 1, 20, 12], [3, 3, 3, 3]], causal=False, seqlen=40),
        masks.shared_question(8, [5, 9, 2], seqlen=40), masks.chunks(7), masks.chunks(7, "top-left"),
        masks.evict(rows[0]), masks.evict(rows), masks.columns(*runs), masks.columns(*runs, window=(9, 4)),
        masks.columns(*(x[0, 0] for x in runs[:2]), causal=True), masks.columns(np.zeros(40, int), np.full(40, 3)),
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [*MASKS[1:], *_many()], ids=str)
@pytest.mark.parametrize("seqlen_q", [24, 40])
def test_flex_sees_what_the_mask_sees(mask, seqlen_q):
    p = make(2, 4, seqlen_q, 16, "bfloat16", mask, kv_heads=2, seqlen_k=40)
    seen = flex.mask_mod(p, lambda x: x)
    row, key = np.arange(seqlen_q)[:, None], np.arange(40)[None, :]
    for batch, head in np.ndindex(2, 4):
        found = np.broadcast_to(seen(batch, head, row, key), (seqlen_q, 40))
        assert (found == mask.dense(seqlen_q, 40, batch, head // 2)).all()


@pytest.mark.parametrize("spread", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_flex_reads_bits(spread):
    scores = np.random.default_rng(0).random((*spread, 24, 40)) < 0.5
    found = flex.mask_mod(
        make(2, 4, 24, 16, "bfloat16", Bits.of(scores), kv_heads=2, seqlen_k=40), lambda x: x
    )
    for batch, head in np.ndindex(2, 4):
        seen = found(batch, head, np.arange(24)[:, None], np.arange(40)[None])
        assert (seen == scores[batch % spread[0], head * spread[1] // 4]).all()


@pytest.mark.parametrize("mask", irregular_masks(8192).values(), ids=irregular_masks(8192))
def test_flex_sees_what_the_benchmarked_masks_show(mask):
    """At their own length, some rows of them."""
    seen = flex.mask_mod(make(1, 1, 8192, 16, "bfloat16", mask), lambda x: x)
    rows, keys = np.arange(0, 8192, 97), np.arange(8192)
    assert (seen(0, 0, rows[:, None], keys[None]) == mask.visible(rows, keys, 8192, 8192)).all()


def test_flex_compares_no_more_than_it_must():
    """A test that hides nothing would slow the peer down: of causal documents the end of a key's own is enough."""
    asked = []

    class Seen:
        def __init__(self, numbers):
            self.numbers = numbers

        def __getitem__(self, at):
            asked.append(at)
            return self.numbers[at]

    mask = masks.documents([5, 3])
    seen = flex.mask_mod(make(1, 1, 8, 16, "bfloat16", mask), Seen)
    assert seen(0, 0, 6, 5) and not seen(0, 0, 6, 4)
    assert asked == [5, 4]


def test_flex_refuses_a_class_of_masks_that_it_does_not_know():
    class Odd(Mask):
        def on_host(self):
            return self

    with pytest.raises(NotImplementedError, match="Odd"):
        flex.mask_mod(problem(Odd()), lambda x: x)


def test_peers_are_not_handed_sequences_of_different_lengths(monkeypatch):
    monkeypatch.setattr(peers.Family, "missing", "")
    (case, *_) = (c for c in SUITES["masks"].cases(Device.typical("sm_90")) if "documents" in c.name)
    packed = [c.problem for c in case.contenders if c.problem]
    assert packed
    for problem_of_it in packed:
        with pytest.raises(NotImplementedError, match="packed sequences"):
            peers.make("flex", problem_of_it, {})


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
        sdpa.mask_options("torch cudnn", p)


def test_torch_is_given_square_masks_as_a_flag():
    assert sdpa.mask_options("torch cudnn", problem(CAUSAL, 40, 40)) == {"is_causal": True}
    assert sdpa.mask_options("torch cudnn", problem(FULL)) == {"is_causal": False}


def test_families_name_every_peer_once():
    assert sorted(peers.PEERS) == sorted(set(peers.PEERS))
    assert all(name in peers.family_of(name).peers for name in peers.PEERS)
    with pytest.raises(KeyError):
        peers.family_of("none")
    for family in peers.FAMILIES.values():
        assert set(family.peers) <= set(peers.here()) or family.missing


def test_what_is_missing_says_so():
    missing = [family for family in peers.FAMILIES.values() if family.missing]
    for family in missing:
        with pytest.raises(NotImplementedError, match="not installed"):
            peers.make(family.peers[0], problem(FULL), {})
