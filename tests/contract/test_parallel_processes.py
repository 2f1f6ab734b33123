"""One process for each rank: the same bits as virtual ranks, and an error that names a rank that is slow or gone."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import cufa.parallel as par
from cufa.parallel.launch import launch

RANKS, TIMEOUT_S = 3, 2.0
CASES = [("zigzag", "zigzag"), ("contiguous", "ulysses"), ("zigzag", "allgather"), ("contiguous", "2d")]


def operands():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 6, 90, 16), np.float32) for _ in range(4)]


def results(group, rank=None):
    """Of every case: forward, gradients with a sink, decoding. ``rank``: of a process."""
    virtual, found = par.Group(virtual=RANKS), []

    def cut(x, placement):
        parts = par.distribute(x, virtual, placement)
        return parts if rank is None else parts[rank]

    options = {
        "group": group,
        "causal": True,
        "sink": np.linspace(-1, 1, 6, dtype=np.float32),
        "device": "cpu",
    }
    for placement, scheme in CASES:
        q, k, v, dout = (cut(x, placement) for x in operands())
        options |= {"placement": placement, "scheme": scheme}
        out, lse = par.flash_attention(q, k, v, return_lse=True, **options)
        found += [out, lse, *par.flash_attention_backward(dout, q, k, v, out, lse, **options)]
    caches = [cut(x, "contiguous") for x in operands()[1:3]]
    q = operands()[0][:, :, -1:]
    found.append(
        par.flash_decode(
            q if rank is not None else [q] * RANKS, *caches, group=group, cache_seqlens=77, device="cpu"
        )
    )
    return found


def in_process(comm):
    return results(par.Group(comm, device="cpu"), comm.Get_rank())


def test_processes_have_the_bits_of_virtual_ranks():
    expected = results(par.Group(virtual=RANKS))
    for rank, found in enumerate(launch(RANKS, in_process, within=120)):
        assert isinstance(found, list), found
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y[rank])


def with_a_rank_that(comm, what):
    """Rank 2 takes part in one call only."""
    group = par.Group(comm, device="cpu", timeout=TIMEOUT_S)
    x = np.ones((1, 2, 8, 8), np.float32)
    par.flash_attention(x, x, x, group=group, device="cpu")
    if comm.Get_rank() == 2:
        os._exit(3) if what == "ends" else time.sleep(3 * TIMEOUT_S)
    else:
        par.flash_attention(x, x, x, group=group, device="cpu")


@pytest.mark.parametrize("what", ["ends", "sleeps"])
def test_a_rank_that_does_not_answer_is_named(what):
    found = launch(RANKS, with_a_rank_that, what, within=120)
    for rank in (0, 1):
        assert "rank 2" in str(found[rank]) and f"rank {rank}" in str(found[rank])
        assert what == "ends" or f"within {TIMEOUT_S:g} s" in str(found[rank])
    assert what != "ends" or "exit code 3" in str(found[2])


def test_a_group_on_cpus_takes_a_communicator():
    with pytest.raises(ValueError, match=r"device='gpu'.*'cpu'"):
        par.Group([0], device="gpu")
