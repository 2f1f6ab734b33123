"""Planted bugs in a warp-specialised kernel (``planted_hopper.cu``): wrong phases, early releases, races."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from changed_sources import with_changed
from planted_support import run_planted
from support import forward_operands, make_inputs, make_problem, plan_with_blocks

from cufa.build import compiler
from cufa.kernels import KERNELS, Launch
from cufa.run.emulate.calls import EmulationError, Execution, run_plan
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


def fa3_findings(causal: bool):
    """Of FA3 with Q in registers, several short items a block, in checked mode."""
    q, k, v = make_inputs(1, 3, 1, 200, 130, 128, "float16")
    config = next(c for c in KERNELS["fa3_forward"].configs if c.q_in_registers and c.fits(128))
    plan = plan_with_blocks(make_problem(q, k, v, causal), config, 1)
    return run_plan(plan, forward_operands(q, k, v), Execution("checked"), trace=False).findings


@pytest.mark.parametrize("which", [None, 0, 1], ids=["both", "without Q's", "without the store's"])
def test_a_fence_between_proxies_is_missed(tmp_path, monkeypatch, which):
    """A GPU hides it nearly always: without the fence after ldmatrix a few rows in a million were wrong."""
    file = "forward/fa3/consumer.cuh"
    parts = (compiler.SOURCE_DIR / file).read_text(encoding="utf-8").split("async_proxy_fence();")
    assert len(parts) == 3
    if which is not None:
        joints = ["async_proxy_fence();"] * 2
        joints[which] = ""
        without = parts[0] + joints[0] + parts[1] + joints[1] + parts[2]
        monkeypatch.setattr(compiler, "SOURCE_DIR", with_changed(tmp_path, file, lambda _: without))
    found = fa3_findings(causal=False)
    assert {f.kind for f in found} == (set() if which is None else {"proxy-fence"}), "\n".join(
        map(str, found)
    )


def test_registers_that_a_launch_does_not_have(tmp_path, monkeypatch):
    """A GPU waits for them for ever. The kernel's own assertion is left out, as a new kernel may have none."""
    copy = tmp_path / "cuda_src"
    shutil.copytree(compiler.SOURCE_DIR, copy)
    source = copy / "forward/fa3/kernel.cu"
    text = source.read_text(encoding="utf-8")
    changed, replaced = re.subn(r"static_assert\(registers_suffice\(.*\n.*\n", "", text)
    assert replaced == changed.count("{{24, 240}, {40, 232}}") == 1
    source.write_text(changed.replace("{{24, 240}, {40, 232}}", "{{24, 248}, {40, 232}}"), encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCE_DIR", copy)
    with pytest.raises(
        EmulationError, match="asks for 248 registers per thread and has 168; of the 12 x 168"
    ):
        fa3_findings(causal=False)
