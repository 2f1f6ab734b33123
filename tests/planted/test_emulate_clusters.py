"""Thread block clusters on a CPU: planted bugs (``planted_cluster*.cu``), and what must not be called one."""

from __future__ import annotations

import re

import numpy as np
import pytest
from planted_support import run_planted

from cufa.kernels import Launch
from cufa.run.emulate.calls import Execution
from cufa.run.emulate.launch import execute

THREADS = 64
SCHEDULES = ["ascending", "descending", 1, 2]


#: In the order of the kernel's enum: kinds of finding that must come, and what the message of one matches.
PLANTED = {
    "none": (set(), ""),
    "no_start_barrier": ({"block-not-running"}, "which may not have begun, no barrier of the cluster tells"),
    "relaxed_start": ({"race"}, r"of block \(\d,0,0\), block \(\d,0,0\) warp"),
    "no_barrier_before_reading": ({"race"}, "no barrier orders this access after another thread's"),
    "relaxed_arrive": ({"race"}, "no barrier orders this access after another thread's"),
    "no_barrier_after_reading": ({"race"}, "no barrier orders this access after another thread's"),
    "early_exit": ({"block-not-running"}, r"block \([15],0,0\)(, which has ended| does not wait)"),
    "store_at_the_end": ({"block-not-running"}, "store to (its )?shared memory"),
    "same_slot": ({"race"}, "no barrier orders this access after another thread's"),
    "wait_without_arrive": ({"barrier"}, "waits at the cluster's barrier without having arrived: block"),
    "arrive_twice": ({"barrier"}, "arrives at the cluster's barrier twice without a wait: block"),
    "warp_skips_barrier": ({"deadlock"}, r"at the cluster's barrier is missing block \([26],0,0\) warp 1$"),
    "divergent_arrive": ({"divergence"}, "barrier.cluster.wait"),
    "past_the_end": ({"out-of-range"}, "st.shared::cluster of 8 bytes at shared offset"),
    "misaligned": ({"misaligned"}, "st.shared::cluster of 16 bytes at shared offset"),
    "no_such_block": ({"out-of-range"}, "block 4 of a cluster of 4"),
    "address_of_another": ({"out-of-range"}, "ld.shared of 16 bytes"),
}

#: Likewise of planted_cluster_async.cu; one of the kinds must come.
PLANTED_ASYNC = {
    "none": (set(), ""),
    "no_init": ({"barrier"}, "where no mbarrier was initialised at the address given"),
    "no_init_fence": ({"race"}, "may not have been initialised for block"),
    "no_start_barrier": ({"block-not-running", "barrier"}, "may not have begun|no mbarrier was initialised"),
    "own_barrier": ({"barrier"}, "where no mbarrier was initialised at the address given"),
    "too_many_bytes": ({"deadlock"}, "wait for mbarrier"),
    "too_few_bytes": ({"copy-not-awaited", "race", "never-written", "deadlock"}, "block"),
    "no_wait": ({"copy-not-awaited", "race", "never-written"}, "planted_cluster_async.cu:"),
    "no_wait_nor_read": ({"block-not-running"}, "does not wait, before it ends, for the store"),
    "wait_for_own_block": ({"race"}, "no barrier orders this access after another thread's"),
}


def run(
    bug: int, mode: str = "checked", cluster: int = 4, blocks: int = 8, *, name="planted_cluster", **options
):
    """(out, findings, counters)."""
    shared = cluster * THREADS * 24 + (8 if name.endswith("async") else 0)
    constants = {"CLUSTER": cluster, "THREADS": THREADS, "SMEM_BYTES": shared}
    out, scratch = (np.zeros((blocks, THREADS), np.uint32) for _ in range(2))
    launch = Launch(name, (blocks, 1, 1), THREADS, shared, cluster=cluster)
    fields, execution = {"out": out, "scratch": scratch}, Execution(mode, **options)
    outcome = run_planted(f"{name}.cu", bug, fields, (launch,), execution, constants=constants)
    return out, outcome.findings, outcome.counters.get(name)


def received(cluster: int, blocks: int, round_: int = 0) -> np.ndarray:
    """What every thread adds up: from the mirrored thread of each block."""
    rank = np.arange(blocks)[:, None] % cluster
    total = np.zeros((blocks, THREADS), np.uint32)
    for source in range(cluster):
        word = round_ * 1000003 + source * 10007 + rank * 101 + THREADS - 1 - np.arange(THREADS)
        total += (4 * word + 6 - 1).astype(np.uint32)  # v + ~v is -1
    return total


def expected(cluster: int, blocks: int) -> np.ndarray:
    """Of planted_cluster.cu: two rounds, with a word of a neighbour's through global memory."""
    rank = np.arange(blocks)[:, None] % cluster
    total = np.zeros((blocks, THREADS), np.uint32)
    for round_ in range(2):
        total += received(cluster, blocks, round_)
        total += (round_ * 1000003 + (rank ^ 1) * 10007 + np.arange(THREADS)).astype(np.uint32)
    return total


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, schedule):
    """Found on every schedule, saying which block, warp and line."""
    out, found, _ = run(list(PLANTED).index(name), schedule=schedule)
    kinds, message = PLANTED[name]
    text = "\n".join(map(str, found))
    if not kinds:
        assert not found, text
        np.testing.assert_array_equal(out, expected(4, 8))
        return
    assert kinds <= {f.kind for f in found}, text
    assert any(f.kind in kinds and re.search(message, f.message) for f in found), text
    assert all(re.search(r"block \(\d,0,0\)", f.message) for f in found), text
    assert all("planted_cluster.cu:" in f.message for f in found), text


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLANTED_ASYNC)
def test_planted_async(name, schedule, copies):
    bug = list(PLANTED_ASYNC).index(name)
    out, found, _ = run(bug, name="planted_cluster_async", schedule=schedule, copies=copies)
    kinds, message = PLANTED_ASYNC[name]
    text = "\n".join(map(str, found))
    if not kinds:
        assert not found, text
        np.testing.assert_array_equal(out, received(4, 8))
        return
    assert any(f.kind in kinds and re.search(message, f.message) for f in found), text


@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("mode", ["plain", "counted", "checked"])
@pytest.mark.parametrize(("cluster", "blocks"), [(2, 6), (8, 8), (16, 16)])
def test_clean_clusters(cluster, blocks, mode, schedule):
    out, found, _ = run(0, mode, cluster, blocks, schedule=schedule)
    assert not found, "\n".join(map(str, found))
    np.testing.assert_array_equal(out, expected(cluster, blocks))
    out, found, _ = run(
        0, mode, cluster, blocks, name="planted_cluster_async", schedule=schedule, copies="late"
    )
    assert not found, "\n".join(map(str, found))
    np.testing.assert_array_equal(out, received(cluster, blocks))


def test_stores_to_other_blocks_are_counted_as_shared_stores():
    _, _, counters = run(0, "counted")
    stores = 2 * 4 * 24 * THREADS + 16 * THREADS  # two rounds, four blocks; the slots' other purpose
    assert (counters["shared_write_bytes"] == stores).all()
    assert (counters["bank_conflicts"] == 0).all()
    assert (counters["barrier_waits"] == 2 * (2 + 4)).all(), "two warps, at the block's and the cluster's"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (3, "planted_cluster: 8 blocks along x cannot be cut into clusters of 3"),
        (32, "planted_cluster: a cluster has 1 to 16 blocks, not 32"),
        (0, "planted_cluster: a cluster has 1 to 16 blocks, not 0"),
    ],
)
def test_grids_that_are_no_clusters(cluster, message):
    launch = Launch("planted_cluster", (8, 1, 1), THREADS, 0, cluster=cluster)
    with pytest.raises(ValueError, match=message):
        execute(0, launch, [], [], Execution())
