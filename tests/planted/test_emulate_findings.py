"""Kernels made for one bug at a time: each kind of finding comes with its message, and a right kernel has none.

Beside each bug in the enum of ``planted_*.cu`` stands the finding that it must give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from planted_support import Outcome, assert_found, bugs_of, run_planted

from cufa.kernels import Launch
from cufa.run.emulate.calls import Execution
from cufa.run.emulate.launch import execute
from cufa.run.emulate.memory import tensor_map

THREADS = 64


class Made(NamedTuple):
    """A source with one bug at a time."""

    launches: tuple[Launch, ...]
    arrays: Callable[[], dict[str, Any]]
    expected: Callable[[dict[str, Any]], None]
    """Checks the arrays after a run without a bug."""
    constants: dict[str, int] = {}  # noqa: RUF012
    maps: dict[str, int] = {}  # noqa: RUF012
    """Tensor maps: array, rows of a box."""
    threads: tuple[int | None, int | None] = None, None
    """CPU threads, with copies early and late."""
    ordered_sums: bool = False


def run(source: str, bug: str = "NONE", mode: str = "checked", made: Made | None = None, **how: Any):
    """(arrays after the run, outcome)."""
    made = made or MADE[source]
    arrays = made.arrays()
    maps = tuple(tensor_map(arrays[name], rows) for name, rows in made.maps.items())
    ordered = how.pop("ordered_sums", made.ordered_sums)
    launches = how.pop("launches", made.launches)
    how = {"threads": made.threads[how.get("copies") == "late"], **how}
    outcome: Outcome = run_planted(
        f"{source}.cu", bug, arrays, launches, Execution(mode, **how), maps, made.constants, ordered
    )
    return arrays, outcome


# ---- planted.cu: two blocks of two warps over three tiles


def ring() -> dict[str, Any]:
    tiles = np.random.default_rng(0).integers(0, 1 << 12, (3 * 32, 16), np.uint32)
    return {
        "in_": tiles,
        "out": np.zeros((2, 64), np.uint32),
        "scratch": np.zeros((2, 64), np.uint32),
        "tiles": 3,
    }


# ---- planted_hopper.cu: a producer and a consumer over five tiles


def factors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1, 1, rows, 64)).astype(np.float16) for rows in (64, 5 * 32))
    return {"out": np.zeros((128, 16), np.float32), "tiles": 5, "a_in": a, "b_in": b}


def check_products(arrays: dict[str, Any]) -> None:
    """The accumulators of 128 threads, four to a tile of 8 columns, as 64 rows."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    matrix = np.zeros((64, 32))
    for i in range(16):
        matrix[row + i // 2 % 2 * 8, i // 4 * 8 + column + i % 2] = arrays["out"][:, i]
    a, b = (arrays[name][0, 0].astype(float) for name in ("a_in", "b_in"))
    np.testing.assert_allclose(matrix, sum(a @ tile.T for tile in b.reshape(5, 32, 64)), atol=1e-4)


# ---- planted_engine.cu: a warpgroup sends a product out twice


def product() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (1, 1, 64, 64)).astype(np.float16) for _ in range(2))
    return {
        "out": np.zeros((2, 1, 64, 64), np.float16),
        "back": np.zeros(128, np.uint32),
        "a_in": a,
        "b_in": b,
    }


def check_product(arrays: dict[str, Any]) -> None:
    exact = arrays["a_in"][0, 0].astype(float) @ arrays["b_in"][0, 0].T.astype(float)
    np.testing.assert_array_equal(arrays["out"][0, 0], exact)  # small integers: exact
    assert (arrays["out"][1, 0] != exact).any()


# ---- planted_overlap.cu: two launches, of which the second may begin early


def overlapping() -> dict[str, Any]:
    arrays = {name: np.arange(4 * 64, dtype=np.uint32) for name in ("between", "read", "sums", "out")}
    return {**arrays, "sums": np.zeros(64, np.float32)}


FIRST = Launch("planted_first", (4, 1, 1), 64, 0)
SECOND = Launch("planted_second", (4, 1, 1), 64, 0, dependent=True)


# ---- planted_tickets.cu: four blocks change the same words one after the other


def words() -> dict[str, Any]:
    counters = np.zeros(2, np.uint32)
    return {"words": np.arange(64, dtype=np.uint32), "sums": np.zeros(64, np.float32), "counters": counters}


def check_words(arrays: dict[str, Any]) -> None:
    expected = np.arange(64, dtype=np.uint32)
    for block in range(4):
        expected = expected[np.arange(64) ^ 40] * np.uint32(5) + np.uint32(block)
    np.testing.assert_array_equal(arrays["words"], expected)
    np.testing.assert_array_equal(arrays["sums"], 2.0 * 4)


# ---- planted_sums.cu: threads of five blocks add to the same sums


def sums() -> dict[str, Any]:
    numbers = np.random.default_rng(0).integers(-100, 100, (64, 4)).astype(np.float32)
    common, own, out = (np.zeros(shape, np.float32) for shape in ((64, 4), (5, 64), (64, 4)))
    return {"in_": numbers, "common": common, "own": own, "out": out, "counter": np.zeros(1, np.uint32)}


def check_sums(arrays: dict[str, Any]) -> None:
    """The sums of small integers are exact in any order."""
    numbers, thread, total = arrays["in_"], np.arange(64), np.zeros((64, 4))
    for block in range(5):
        v = numbers.astype(np.float64)
        v[:, 2] += numbers[(thread + 32) % 64].sum(1)
        np.add.at(total, (thread * 5 + block) % 64, v * [2, 2, 1, 2])
    np.testing.assert_array_equal(arrays["out"], total)


# ---- planted_cluster*.cu: blocks of a cluster send each other words


def cluster(name: str, size: int = 4, blocks: int = 8) -> Made:
    by_async = name.endswith("async")
    shared = size * THREADS * 24 + (8 if by_async else 0)

    def expected(arrays: dict[str, Any]) -> None:
        """planted_cluster.cu: two rounds, with a word of a neighbour's through global memory."""
        rank, thread = np.arange(blocks)[:, None] % size, np.arange(THREADS)
        total = np.zeros((blocks, THREADS), np.uint32)
        for round_ in range(1 if by_async else 2):
            for source in range(size):  # the mirrored thread of each block
                word = round_ * 1000003 + source * 10007 + rank * 101 + THREADS - 1 - thread
                total += (4 * word + 6 - 1).astype(np.uint32)  # v + ~v is -1
            if not by_async:
                total += (round_ * 1000003 + (rank ^ 1) * 10007 + thread).astype(np.uint32)
        np.testing.assert_array_equal(arrays["out"], total)

    return Made(
        (Launch(name, (blocks, 1, 1), THREADS, shared, cluster=size),),
        lambda: {x: np.zeros((blocks, THREADS), np.uint32) for x in ("out", "scratch")},
        expected,
        {"CLUSTER": size, "THREADS": THREADS, "SMEM_BYTES": shared},
    )


RING_BYTES, HOPPER_BYTES, ENGINE_BYTES = 2 * 32 * 80 + 256, 64 * 128 + 2 * 32 * 128 + 5 * 8, 3 * 64 * 128 + 8
MADE = {
    "planted": Made(
        (Launch("planted", (2, 1, 1), 64, RING_BYTES),),
        ring,
        lambda arrays: None,
        {"SMEM_BYTES": RING_BYTES},
        threads=(1, 1),
    ),
    "planted_hopper": Made(
        (Launch("planted_hopper", (1, 1, 1), 256, HOPPER_BYTES),),
        factors,
        check_products,
        {"SMEM_BYTES": HOPPER_BYTES},
        {"a_in": 64, "b_in": 32},
    ),
    "planted_engine": Made(
        (Launch("planted_engine", (1, 1, 1), 128, ENGINE_BYTES),),
        product,
        check_product,
        {"SMEM_BYTES": ENGINE_BYTES},
        {"a_in": 64, "b_in": 64, "out": 16},
    ),
    "planted_overlap": Made((FIRST, SECOND), overlapping, lambda arrays: None),
    "planted_tickets": Made(
        (Launch("planted_tickets", (4, 1, 1), 64, 0),), words, check_words, threads=(1, 2), ordered_sums=True
    ),
    "planted_sums": Made((Launch("planted_sums", (5, 1, 1), 64, 1024),), sums, check_sums),
    "planted_cluster": cluster("planted_cluster"),
    "planted_cluster_async": cluster("planted_cluster_async"),
}


@pytest.mark.sampled(each="bug")
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1, 2])
@pytest.mark.parametrize("bug", [f"{source}.cu:{bug}" for source in MADE for bug in bugs_of(f"{source}.cu")])
def test_each_bug_is_found_on_every_schedule(bug, schedule, copies):
    source, name = bug.split(".cu:")
    arrays, outcome = run(source, name, schedule=schedule, copies=copies)
    assert_found(outcome.findings, *bugs_of(f"{source}.cu")[name])
    if name == "NONE":
        MADE[source].expected(arrays)


def test_unpadded_rows_conflict():
    """Counted mode: eight rows of an ldmatrix at a pitch of 64 bytes share two groups of banks; at 80 bytes none do."""
    clean, unpadded = (run("planted", bug, "counted")[1].counters["planted"] for bug in ("NONE", "UNPADDED"))
    matrices, before, after = (
        4 * clean["ldmatrix"].sum(),
        clean["bank_conflicts"].sum(),
        unpadded["bank_conflicts"].sum(),
    )
    assert after >= 3 * matrices > before  # before: of the copies
    assert unpadded["shared_wavefronts"].sum() - clean["shared_wavefronts"].sum() == after - before


@pytest.mark.parametrize("copies", ["early", "late"])
def test_the_order_of_warps_and_copies_changes_no_result_of_a_right_kernel(copies):
    clean = run("planted", mode="plain")[0]["out"]
    assert (clean != 0).any()
    for schedule in ("descending", 3):
        out = run("planted", mode="plain", schedule=schedule, copies=copies)[0]["out"]
        np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("bug", ["SKIPPED_BARRIER", "DIVERGENT_SHUFFLE"])
def test_what_stops_a_kernel_is_found_in_plain_mode_too(bug):
    found = run("planted", bug, "plain")[1].findings
    assert found and {f.kind for f in found} <= {"deadlock", "divergence"}


def test_launches_that_do_not_overlap_need_no_wait():
    apart = FIRST, dataclasses.replace(SECOND, dependent=False), FIRST
    assert run("planted_overlap", "NO_AWAIT", launches=apart)[1].findings == ()


@pytest.mark.parametrize("bug", ["ADDITION_BEFORE_TICKET", "ADDITION_IN_BLOCK"])
def test_additions_may_come_in_any_order_unless_a_fixed_one_is_asked_for(bug):
    assert run("planted_tickets", bug, ordered_sums=False)[1].findings == ()


def test_additions_are_counted():
    """Four numbers of each thread at once to the common sums, and three one by one, four to its block's own; bytes as
    stores."""
    counters = run("planted_sums", mode="counted")[1].counters["planted_sums"]
    assert (counters["reductions"] == 64 * (4 + 7)).all()
    assert (counters["stmatrix"] == 2).all()
    stored = counters["global_write_bytes"] - 64 * 4 * (1 + 4 + 7)
    assert sorted(stored.tolist()) == [0] * 4 + [64 * 16]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_addition_of_blocks_on_several_cpu_threads_is_lost(threads):
    for schedule in range(5):
        check_sums(run("planted_sums", mode="plain", threads=threads, schedule=schedule)[0])


@pytest.mark.parametrize("name", ["planted_cluster", "planted_cluster_async"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("mode", ["plain", "counted", "checked"])
@pytest.mark.parametrize(("size", "blocks"), [(2, 6), (8, 8), (16, 16)])
def test_clusters_of_other_sizes(size, blocks, mode, schedule, name):
    made = cluster(name, size, blocks)
    arrays, outcome = run(name, mode=mode, made=made, schedule=schedule, copies="late")
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    made.expected(arrays)


def test_stores_to_other_blocks_are_counted_as_shared_stores():
    counters = run("planted_cluster", mode="counted")[1].counters["planted_cluster"]
    stores = 2 * 4 * 24 * THREADS + 16 * THREADS  # two rounds, four blocks; the slots' other purpose
    assert (counters["shared_write_bytes"] == stores).all()
    assert (counters["bank_conflicts"] == 0).all()
    assert (counters["barrier_waits"] == 2 * (2 + 4)).all(), "two warps, at the block's and the cluster's"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "planted_cluster: 8 blocks along x cannot be cut into clusters of 3"),
        (32, "planted_cluster: a cluster has 1 to 16 blocks, not 32"),
        (0, "planted_cluster: a cluster has 1 to 16 blocks, not 0"),
    ],
)
def test_grids_that_are_no_clusters(size, message):
    launch = Launch("planted_cluster", (8, 1, 1), THREADS, 0, cluster=size)
    with pytest.raises(ValueError, match=message):
        execute(0, launch, [], [], Execution())
