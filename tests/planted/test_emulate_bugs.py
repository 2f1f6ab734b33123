"""Planted bugs: each must be found and named, and clean kernels must be quiet.

In a small kernel made for them (``planted.cu``).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from planted_support import run_planted

from cufa.kernels import Launch
from cufa.run.emulate.calls import Execution

#: Bugs of planted.cu in the order of its enum: the kind of finding that names it, and what its message says.
PLANTED = {
    "none": ("", ""),
    "missing_barrier": ("race", "no barrier orders this access after another thread's: shared offset"),
    "missing_wait": ("copy-not-awaited", "touches data of an asynchronous copy that was not waited for"),
    "wrong_stage": ("race", "no barrier orders this access after another thread's: shared offset"),
    "row_past_the_end": ("out-of-range", "of in, which has 6144"),
    "shared_past_the_end": ("out-of-range", "outside the block's 5376 bytes"),
    "misaligned": ("misaligned", "is not aligned"),
    "divergent_shuffle": ("divergence", "lanes 4-31 wait for shfl"),
    "divergent_ldmatrix": ("divergence", "while other lanes wait at"),
    "divergent_mma": ("divergence", "executed by some lanes of warp"),
    "missing_fence": ("accumulator-touched", "were written before mma_fence()"),
    "skipped_barrier": (
        "deadlock",
        f"warp 0 all lanes wait for the block's barrier at {Path(__file__).with_name('planted.cu')}:",
    ),
    "wrong_barrier_count": ("(barrier|deadlock)", "barrier 1"),
    "never_written": ("never-written", "shared memory that nothing has written"),
    "missing_warp_sync": ("race", "no barrier orders this access after another thread's: shared offset"),
    "plain_access": ("race", "at plain C++ access"),
    "global_race": ("race", "of scratch, block"),
    "shared_output": ("race", "of one launch both touch byte"),
    "copy_in_flight": ("copy-in-flight", "kernel ends with cp.async still in flight"),
    "plain_global_race": ("race", "of one launch both touch byte"),
    "unpadded": ("", ""),  # right, but slow: counted mode's to find
    "structures": ("", ""),
    "structure_race": ("race", "of one launch both touch byte"),
}
_PLACE = re.compile(r"block \(\d,0,0\):? warp \d|warp \d lane \d+|lanes of warp \d")


def run(bug: int, mode: str, **options):
    """Two blocks of two warps over three tiles: (out, findings), or (counters, findings)."""
    tiles = np.random.default_rng(0).integers(0, 1 << 12, (3 * 32, 16), np.uint32)
    out, scratch = np.zeros((2, 64), np.uint32), np.zeros((2, 64), np.uint32)
    fields, shared = {"in_": tiles, "out": out, "scratch": scratch, "tiles": 3}, 2 * 32 * 80 + 256
    launch, execution = Launch("planted", (2, 1, 1), 64, shared), Execution(mode, threads=1, **options)
    constants = {"SMEM_BYTES": shared}
    outcome = run_planted("planted.cu", bug, fields, (launch,), execution, constants=constants)
    return outcome.counters["planted"] if mode == "counted" else out, outcome.findings


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, schedule):
    """Found on every schedule, saying who and where."""
    kind, message = PLANTED[name]
    _, found = run(list(PLANTED).index(name), "checked", schedule=schedule)
    text = "\n".join(map(str, found))
    if not kind:
        assert not found, text
        return
    assert any(re.fullmatch(kind, f.kind) and message in f.message for f in found), text
    assert all(_PLACE.search(f.message) for f in found), text


def test_unpadded_rows_conflict():
    """Counted mode: eight rows of an ldmatrix at a pitch of 64 bytes share two groups of banks;
    at 80 bytes none is shared."""
    clean, _ = run(0, "counted")
    unpadded, _ = run(list(PLANTED).index("unpadded"), "counted")
    matrices, before, after = (
        4 * clean["ldmatrix"].sum(),
        clean["bank_conflicts"].sum(),
        unpadded["bank_conflicts"].sum(),
    )
    assert after >= 3 * matrices > before  # before: of the copies
    assert unpadded["shared_wavefronts"].sum() - clean["shared_wavefronts"].sum() == after - before


def test_numbers_alone_do_not_show_them():
    """A race may compute the right answer: why checked mode exists."""
    clean, _ = run(0, "plain")
    racy, _ = run(list(PLANTED).index("missing_warp_sync"), "plain", schedule="ascending")
    assert (clean != 0).any()
    assert racy.shape == clean.shape
    for schedule in ("descending", 3):
        for copies in ("early", "late"):
            np.testing.assert_array_equal(run(0, "plain", schedule=schedule, copies=copies)[0], clean)


@pytest.mark.parametrize("name", ["skipped_barrier", "divergent_shuffle"])
def test_found_in_plain_mode_too(name):
    """What stops a kernel is reported in every mode."""
    _, found = run(list(PLANTED).index(name), "plain")
    assert kinds(found) <= {"deadlock", "divergence"} and found


def kinds(found) -> set[str]:
    return {f.kind for f in found}
