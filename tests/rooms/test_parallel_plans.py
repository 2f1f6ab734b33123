"""Placements, schedules and predictions of parallel calls: pure Python."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from click.testing import CliRunner

import cufa.parallel as par
from cufa import masks
from cufa.cli import main
from cufa.parallel import placement
from cufa.parallel.placement import Segment
from cufa.parallel.run import neighbours
from cufa.parallel.schemes import head_groups, make_schedule
from cufa.parallel.slices import Whole


def schedule(mask, ranks, kind="zigzag", scheme="auto", heads=(4, 2), seqlen=64, **options):
    made = getattr(par.Placement, kind)(seqlen, ranks)
    return make_schedule(scheme, Whole.of(mask, seqlen, seqlen), made, made, (heads,) * ranks, **options)


def test_placements_print():
    assert doctest.testmod(placement).failed == 0


@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_every_token_has_one_owner(kind, ranks, seqlen):
    found = getattr(par.Placement, kind)(seqlen, ranks)
    tokens = [t for ranges in found.ranges for r in ranges for t in range(*r)]
    assert sorted(tokens) == list(range(seqlen)) and sum(found.lengths) == seqlen


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zigzag_is_even_under_a_causal_mask(ranks):
    """Every rank has the same scores, and computes them in one call a step without a mask, but for its own keys."""
    found = schedule(masks.causal(), ranks, seqlen=48 * ranks)
    scores = {found.scores(r) for r in range(ranks)}
    assert max(scores) - min(scores) <= 4 * 48 * ranks  # the diagonal
    for works in found.works:
        (work,) = works
        assert [len(step.calls) for step in work.steps] == [1] * ranks
        assert [str(step.calls[0].mask) for step in work.steps[1:]] == ["full"] * (ranks - 1)


def test_hidden_keys_do_not_travel():
    seqlen, ranks = 4096, 4
    found = schedule(masks.window(200, 0), ranks, "contiguous", "allgather", seqlen=seqlen)
    moved = {(r, x.segment.rank, x.segment.length) for r in range(ranks) for x in found.arrivals(r)}
    assert moved == {(1, 0, 256), (2, 1, 256), (3, 2, 256)}  # 200 keys, in blocks of 128
    documents = schedule(masks.documents([1024] * 4), ranks, "contiguous", "allgather", seqlen=seqlen)
    assert not any(list(documents.arrivals(rank)) for rank in range(ranks))


DOCUMENTS = [1152, 1536, 2304, 6528, 5888, 2560, 13056, 7936, 1536, 10624, 1536, 10880]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_whole_documents_are_one_call(causal, backward):
    """Nothing travels, no rank has 5% more work than the mean, and each rank makes one call of a kernel."""
    made, mask = par.Placement.documents(DOCUMENTS, 2), masks.documents(DOCUMENTS, causal=causal)
    whole = Whole.of(mask, made.seqlen, made.seqlen)
    found = make_schedule("auto", whole, made, made, ((16, 16),) * 2, backward)
    for rank in range(2):
        assert not list(found.arrivals(rank))
        ((_, _, step),) = found.steps(rank)
        assert [call.plain for call in step.calls] == [True]
        assert found.scores(rank) < 1.05 * sum(map(found.scores, range(2))) / 2


@pytest.mark.parametrize("lengths", [[], [0, 0], [9], [1000, 10, 10], [64] * 7, [40960, 8192, 8192, 8192]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_long_documents_are_cut(lengths, ranks):
    found = par.Placement.documents(lengths, ranks)
    tokens = sorted(t for ranges in found.ranges for r in ranges for t in range(*r))
    assert tokens == list(range(sum(lengths)))
    assert found == par.Placement.documents(np.array(lengths, np.int32), ranks)
    if sum(lengths) > 100:
        mask = Whole.of(masks.documents(lengths), found.seqlen, found.seqlen)
        work = make_schedule("auto", mask, found, found, ((1, 1),) * ranks)
        scores = [work.scores(rank) for rank in range(ranks)]
        assert max(scores) < 1.1 * sum(scores) / ranks


def test_the_longest_finished_rows_are_not_copied():
    """A rank's rows before and after those of a later call are finished: the longest run of them is written by the
    call, and only the others are copied from the running result."""
    found = schedule(masks.documents(DOCUMENTS), 2, scheme="zigzag", seqlen=65536)
    (work,) = found.works[0]
    first, last = (call for step in work.steps for call in step.calls)
    assert first.done == (0, 16384) and last.done == last.rows == (16384, 20352)
    assert work.unfinished == [(20352, 32768)]


@pytest.mark.parametrize("backward", [False, True])
def test_the_last_gradients_travel_under_own_keys(backward):
    found = schedule(masks.causal(), 2, backward=backward)
    heads = [work.heads for work in found.works[0]]
    assert heads == ([(0, 2), (0, 4), (2, 4)] if backward else [(0, 4)])


@pytest.mark.parametrize(
    ("mask", "kind", "heads", "ranks", "scheme"),
    [
        (masks.causal(), "zigzag", (4, 2), 2, "zigzag"),
        (masks.window(9, 0), "zigzag", (4, 2), 2, "ulysses"),
        (masks.causal(), "contiguous", (8, 4), 4, "ulysses"),
        (masks.causal(), "contiguous", (8, 2), 4, "2d"),
        (masks.causal(), "contiguous", (3, 3), 4, "allgather"),
        (masks.causal(), "heads", (2, 2), 4, "heads"),
    ],
)
def test_auto(mask, kind, heads, ranks, scheme):
    assert schedule(mask, ranks, kind, heads=heads).scheme == scheme


def test_a_schedule_prints_who_computes_what():
    text = str(schedule(masks.causal(), 2))
    assert "gets kv 16-47 from rank 1" in text and "queries 48-63 × keys 16-47: full" in text


def test_volumes_are_those_of_the_schemes():
    """Forward bytes that a rank receives of S tokens: in a ring (P - 1) / P · 2 S Hkv D b, with Ulysses
    (P - 1) / P² · S (2 Hq + 2 Hkv) D b."""
    ranks, seqlen, dim = 4, 1024, 128
    shapes = (1, 16, seqlen, dim), (1, 8, seqlen, dim)
    ring = par.plan(*shapes, ranks=ranks, placement="zigzag")
    assert ring.received == 2 * seqlen * 8 * dim * 2 * (ranks - 1) // ranks
    ulysses = par.plan(*shapes, ranks=ranks, scheme="ulysses")
    assert ulysses.received == (ranks - 1) * seqlen * 48 * dim * 2 // ranks**2


def test_shares_of_gradients_travel_in_float32():
    """To each rank come k and v of the other ranks in 16 bits, and the shares of its own dk and dv in float32."""
    ranks, seqlen, dim = 4, 1024, 128
    shapes = (1, 16, seqlen, dim), (1, 8, seqlen, dim)
    rows = 2 * seqlen * 8 * dim * (ranks - 1) // ranks
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        ring = par.plan(*shapes, ranks=ranks, placement="zigzag", backward=True, dtype=dtype)
        assert ring.received == rows * (itemsize + 4)
    ulysses = par.plan(*shapes, ranks=ranks, scheme="ulysses", backward=True)
    assert ulysses.received == (ranks - 1) * seqlen * (4 * 16 + 4 * 8) * dim * 2 // ranks**2


@pytest.mark.parametrize(
    ("kind", "scheme", "mask", "summed"),
    [
        ("zigzag", "zigzag", masks.causal(), ("dq", "dk", "dv")),
        ("zigzag", "allgather", masks.causal(), ("dk", "dv")),
        ("contiguous", "ulysses", masks.causal(), ()),
        ("heads", "heads", masks.causal(), ()),
        ("zigzag", "zigzag", masks.window(0, 0, diagonal=500), ()),
    ],
)
def test_gradients_of_several_calls(kind, scheme, mask, summed):
    heads = (2, 1) if kind == "heads" else (4, 2)
    assert schedule(mask, 2, kind, scheme, heads, backward=True).summed == summed


def test_a_prediction_adds_up():
    slow = par.plan((1, 16, 4096, 128), ranks=2, placement="zigzag", causal=True, link=(1e9, 0.0), rate=1e15)
    fast = par.plan((1, 16, 4096, 128), ranks=2, placement="zigzag", causal=True, rate=1e14)
    assert fast.efficiency > 0.8 > 0.1 > slow.efficiency
    for found in (slow, fast):
        for rank in range(2):
            split = found.split(rank)
            assert np.isclose(split["compute"] + split["exposed"] + split["idle"], found.seconds)
        assert "no measurement" in str(found)
    alone = par.plan((1, 16, 4096, 128), ranks=1, causal=True)
    assert alone.efficiency == pytest.approx(1, abs=0.01) and alone.received == 0
    uneven = par.plan((1, 5, 4096, 128), ranks=2, placement="heads", rate=1e12)
    assert uneven.efficiency == pytest.approx(5 / 6, abs=0.01)  # a rank has 3 of 5 heads


def test_the_command_predicts_without_a_gpu():
    run = CliRunner().invoke(main, ["parallel", "plan", "-n", "8", "--seqlen", "131072"])
    assert run.exit_code == 0 and "zigzag on 8 ranks" in run.stdout and "no measurement" in run.stdout
    wrong = CliRunner().invoke(main, ["parallel", "plan", "--scheme", "heads"])
    assert wrong.exit_code == 2 and "placement" in wrong.output


def test_the_command_says_how_many_gpus_it_needs():
    run = CliRunner().invoke(main, ["parallel", "bench", "-n", "17"])
    assert run.exit_code == 3 and "17 GPUs" in run.output


def test_segments_that_follow_one_another_in_a_part_travel_together():
    first, last = Segment(0, 0, 0, 4), Segment(0, 4, 12, 4)
    assert neighbours([first, last]) == [Segment(0, 0, 0, 8)]
    for apart in (first.cut(0, 3), Segment(1, 0, 0, 4)):
        assert neighbours([apart, last]) == [apart, last]


def test_the_first_head_group_of_a_forward_is_small():
    assert head_groups(8, False) == [1, 4, 3] and head_groups(8, True) == [4, 4]
