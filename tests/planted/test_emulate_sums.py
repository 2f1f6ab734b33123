"""Sums in global memory: additions do not race with one another, loads and stores do (``planted_sums.cu``)."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest

from cufa.build import compiler
from cufa.kernels import Launch
from cufa.run.emulate import build as host_build
from cufa.run.emulate.calls import EmulationError, Execution
from cufa.run.emulate.launch import execute
from cufa.run.emulate.memory import GlobalArray

BLOCKS = 5


class PlantedParams(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("in_", "common", "own", "out", "counter")]


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


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory):
    """The kernels' sources and the planted kernel beside them."""
    copy = tmp_path_factory.mktemp("planted") / "cuda_src"
    shutil.copytree(compiler.SOURCE_DIR, copy)
    shutil.copy(Path(__file__).with_name("planted_sums.cu"), copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "SOURCE_DIR", copy)
        yield


def run_planted(name: str, mode: str = "checked", **options):
    """(in, what the last block found, findings, counters)."""
    constants = {"BUG": list(PLANTED).index(name)}
    entry = host_build.kernel(
        "planted_sums.cu", constants, ["planted_sums"], mode == "checked", ["PlantedParams"]
    )
    numbers = np.random.default_rng(0).integers(-100, 100, (64, 4)).astype(np.float32)
    common, own, out = (np.zeros(shape, np.float32) for shape in ((64, 4), (BLOCKS, 64), (64, 4)))
    counter = np.zeros(1, np.uint32)
    given = {"in": numbers, "common": common, "own": own, "out": out, "counter": counter}
    memory = [GlobalArray(name, x, writable=name != "in") for name, x in given.items()]
    params = PlantedParams(*(x.ctypes.data for x in given.values()))
    launch = Launch("planted_sums", (BLOCKS, 1, 1), 64, 1024)
    try:
        counters, found = execute(entry["planted_sums"], launch, [params], memory, Execution(mode, **options))
    except EmulationError as error:
        return numbers, out, error.findings, None
    return numbers, out, found, counters


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
    numbers, out, found, _ = run_planted(name, schedule=schedule)
    kind, message = PLANTED[name]
    text = "\n".join(map(str, found))
    if not kind:
        assert not found, text
        np.testing.assert_array_equal(out, expected(numbers))
        return
    assert any(f.kind == kind and message in f.message for f in found), text


def test_additions_are_counted():
    """Four, two and one number of each thread to the common sums, four to its block's own; bytes as stores."""
    *_, counters = run_planted("none", "counted")
    assert (counters["reductions"] == 64 * (4 + 7)).all()
    assert (counters["stmatrix"] == 2).all()
    stored = counters["global_write_bytes"] - 64 * 4 * (1 + 4 + 7)
    assert sorted(stored.tolist()) == [0] * (BLOCKS - 1) + [64 * 16]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_addition_is_lost(threads):
    """Blocks on several CPU threads add to the same sums."""
    for schedule in range(5):
        numbers, out, _, _ = run_planted("none", "plain", threads=threads, schedule=schedule)
        np.testing.assert_array_equal(out, expected(numbers))
