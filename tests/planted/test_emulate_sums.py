"""Sums in global memory: additions do not race with one another, loads and stores do (``planted_sums.cu``)."""

from __future__ import annotations

import numpy as np
import pytest
from planted_support import assert_found, run_planted

from cufa.kernels import Launch
from cufa.run.emulate.calls import Execution

BLOCKS = 5


#: In the order of the kernel's enum: the kind of finding that must come, and what its message says.
PLANTED = {
    "none": ("", ""),
    "load_in_block": ("race", "no barrier orders this access after another thread's: byte"),
    "store_in_block": ("race", "no barrier orders this access after another thread's: byte"),
    "load_by_another": ("race", "of one launch both touch byte"),
    "store_by_another": ("race", "of one launch both touch byte"),
    "plain_addition": ("race", "of one launch both touch byte"),
    "plain_last": ("race", "of one launch both touch byte"),
    "past_the_end": ("out-of-range", "red.add of 16 bytes at"),  # beside which array, the allocator decides
    "misaligned": ("misaligned", "red.add of 16 bytes at global address"),
    "read_only": ("out-of-range", "red.add of 16 bytes at byte 0 of in"),
    "divergent_stmatrix": ("divergence", "stmatrix.x4.trans"),
    "stmatrix_race": ("race", "no barrier orders this access after another thread's: shared offset"),
}


def run(name: str, mode: str = "checked", **options):
    """(in, what the last block found, findings, counters)."""
    numbers = np.random.default_rng(0).integers(-100, 100, (64, 4)).astype(np.float32)
    common, own, out = (np.zeros(shape, np.float32) for shape in ((64, 4), (BLOCKS, 64), (64, 4)))
    fields = {"in_": numbers, "common": common, "own": own, "out": out, "counter": np.zeros(1, np.uint32)}
    launch = Launch("planted_sums", (BLOCKS, 1, 1), 64, 1024)
    bug = list(PLANTED).index(name)
    outcome = run_planted("planted_sums.cu", bug, fields, (launch,), Execution(mode, **options))
    return numbers, out, outcome.findings, outcome.counters.get("planted_sums")


def expected(numbers: np.ndarray) -> np.ndarray:
    """The sums of small integers are exact in any order."""
    thread, total = np.arange(64), np.zeros((64, 4))
    for block in range(BLOCKS):
        v = numbers.astype(np.float64)
        v[:, 2] += numbers[(thread + 32) % 64].sum(1)
        np.add.at(total, (thread * 5 + block) % 64, v * [2, 2, 1, 2])
    return total


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, schedule):
    """Found on every schedule."""
    numbers, out, found, _ = run(name, schedule=schedule)
    assert_found(found, *PLANTED[name])
    if name == "none":
        np.testing.assert_array_equal(out, expected(numbers))


def test_additions_are_counted():
    """Four, two and one number of each thread to the common sums, four to its block's own; bytes as stores."""
    *_, counters = run("none", "counted")
    assert (counters["reductions"] == 64 * (4 + 7)).all()
    assert (counters["stmatrix"] == 2).all()
    stored = counters["global_write_bytes"] - 64 * 4 * (1 + 4 + 7)
    assert sorted(stored.tolist()) == [0] * (BLOCKS - 1) + [64 * 16]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_addition_is_lost(threads):
    """Blocks on several CPU threads add to the same sums."""
    for schedule in range(5):
        numbers, out, _, _ = run("none", "plain", threads=threads, schedule=schedule)
        np.testing.assert_array_equal(out, expected(numbers))
