"""Planted bugs in a warp-specialised kernel (``planted_hopper.cu``): wrong phases, early releases, races."""

from __future__ import annotations

import numpy as np
import pytest
from planted_support import run_planted

from cufa.kernels import Launch
from cufa.run.emulate.calls import Execution
from cufa.run.emulate.memory import tensor_map

TILES, N = 5, 32
SHARED_BYTES = 64 * 128 + 2 * N * 128 + 5 * 8


#: Reading, or overwriting, what another agent has not finished with; or nobody is ever woken.
OUT_OF_STEP = {"copy-not-awaited", "race", "never-written", "deadlock", "barrier"}

#: In the order of the kernel's enum: kinds of finding of which one must come, and what its message says.
PLANTED = {
    "none": (set(), ""),
    "wrong_phase": (OUT_OF_STEP, "planted_hopper.cu:"),
    "no_wait_for_full": (OUT_OF_STEP, "planted_hopper.cu:"),
    "no_wait_for_empty": (OUT_OF_STEP, "planted_hopper.cu:"),
    "early_release": ({"copy-not-awaited", "race"}, "planted_hopper.cu:"),
    "no_release": ({"deadlock"}, "warp 0 lane 0 wait for mbarrier (parity 0)"),
    "two_releases": (OUT_OF_STEP, "planted_hopper.cu:"),
    "no_expected_bytes": (OUT_OF_STEP, "planted_hopper.cu:"),
    "no_init": ({"barrier"}, "no mbarrier was initialised at shared offset"),
    "no_barrier_after_init": ({"race", "barrier"}, "planted_hopper.cu:"),
    "accumulator_touched": ({"accumulator-touched"}, "were written before it was waited for"),
    "not_awaited": ({"copy-in-flight"}, "kernel ends with wgmma still in flight"),
    "unaligned_box": ({"misaligned"}, "128-byte swizzle"),
    "box_past_the_end": ({"out-of-range"}, f"outside the block's {SHARED_BYTES} bytes"),
    "too_many_registers": (
        {"deadlock"},
        "warp 7 asks for 256 registers per thread and has 248; of the 8 x 248 that the launch has 0 are free",
    ),
}


def run(name: str, **options):
    """(accumulators as a 64 × 32 matrix, A, B, findings)."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1, 1, 64, 64)).astype(np.float16)
    b = rng.standard_normal((1, 1, TILES * N, 64)).astype(np.float16)
    out = np.zeros((128, N // 2), np.float32)
    outcome = run_planted(
        "planted_hopper.cu",
        list(PLANTED).index(name),
        {"out": out, "tiles": TILES, "a_in": a, "b_in": b},
        (Launch("planted_hopper", (1, 1, 1), 256, SHARED_BYTES),),
        Execution("checked", **options),
        (tensor_map(a, 64), tensor_map(b, N)),
        {"SMEM_BYTES": SHARED_BYTES},
    )
    return out, a[0, 0], b[0, 0], outcome.findings


def as_matrix(accumulators: np.ndarray) -> np.ndarray:
    """The registers of 128 threads, four to a tile of 8 columns, as 64 rows."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    matrix = np.zeros((64, N))
    for i in range(N // 2):
        matrix[row + i // 2 % 2 * 8, i // 4 * 8 + column + i % 2] = accumulators[:, i]
    return matrix


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, schedule, copies):
    out, a, b, found = run(name, schedule=schedule, copies=copies)
    kinds, message = PLANTED[name]
    text = "\n".join(map(str, found))
    if not kinds:
        assert not found, text
        expected = sum(a.astype(float) @ tile.T.astype(float) for tile in b.reshape(TILES, N, 64))
        np.testing.assert_allclose(as_matrix(out), expected, atol=1e-4)
        return
    assert any(f.kind in kinds and message in f.message for f in found), text
