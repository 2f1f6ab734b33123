"""Every primitive against NumPy, in three places: on a GPU, as recorded on one, and by its host twin.

The inputs and the little kernels around the primitives are those of the golden vectors (``tests/golden``).
What NumPy expects of them, from the layouts that PTX states, is ``tests/golden/expected.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import machines
import numpy as np
import probes
import pytest
from conftest import why_no_compiler
from expected import assert_as_expected, box, expected_of

FOLDER = Path(machines.__file__).parent

PROBES = probes.all_probes()
TILES = [(kind, *shape) for shape in probes.tile_shapes() for kind in ("f16", "bf16")]
by_name = pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)


def run_on_gpu(probe: probes.Probe) -> np.ndarray:
    if not machines.runs_on_gpu(probe):
        pytest.skip(f"this GPU has not the instructions of sm_{probe.capability}")
    return machines.on_gpu(probe)


def run_here(probe: probes.Probe, **options) -> np.ndarray:
    reason = why_no_compiler()
    if reason:
        pytest.skip(reason)
    return machines.on_cpu(probe, **options)


@pytest.mark.gpu
@by_name
def test_on_a_gpu(probe):
    assert_as_expected(probe, run_on_gpu(probe))


@by_name
def test_as_recorded(probe):
    if probe.name in probes.AWAITED_PROBES:
        pytest.skip("newer than the last run of golden/record.py on a GPU")
    with np.load(FOLDER / "golden.npz") as golden:
        assert_as_expected(probe, golden[f"probe/{probe.name}"])


@by_name
def test_host_twin(probe):
    assert_as_expected(probe, run_here(probe))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "columns", "depth"), TILES)
def test_wgmma_tiles_on_a_gpu(kind, columns, depth):
    """A from shared memory and from registers, B k-major, V mn-major, every N: exactly NumPy's integers."""
    probe = probes.tile_probe(kind, columns, depth)
    assert_as_expected(probe, run_on_gpu(probe))


@pytest.mark.parametrize(
    ("kind", "columns", "depth"),
    [("f16", 8, 72), ("bf16", 80, 256), ("f16", 256, 80), ("bf16", 128, 64), ("bf16", 200, 72)],
)
def test_wgmma_tiles_here(kind, columns, depth):
    assert (kind, columns, depth) in TILES
    probe = probes.tile_probe(kind, columns, depth)
    assert_as_expected(probe, run_here(probe))


@pytest.mark.gpu
def test_tma_boxes_on_a_gpu():
    """Boxes over every end of a tensor arrive filled up with zeros; a phase waits for both halves."""
    probe = probes.tma_boxes_probe()
    for _ in range(20):
        assert_as_expected(probe, run_on_gpu(probe))


@pytest.mark.gpu
def test_tma_store_on_a_gpu():
    """Boxes over the ends of a tensor are clipped; a buffer is written again as soon as it has been read. In
    a process of its own: a store that the copy engine refuses ends all that a process has on the GPU."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import machines, probes\n"
        "from expected import assert_as_expected\n"
        "probe = probes.tma_store_probe()\n"
        "for _ in range(20): assert_as_expected(probe, machines.on_gpu(probe))\n"
    )
    if not machines.runs_on_gpu(probes.tma_store_probe()):
        pytest.skip("this GPU has not the instructions of sm_90")
    command = [sys.executable, "-c", code, str(FOLDER), str(FOLDER.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("made", [probes.tma_boxes_probe, probes.tma_store_probe])
def test_tma_here(made, schedule, copies):
    probe = made()
    assert_as_expected(probe, run_here(probe, schedule=schedule, copies=copies))


def test_a_box_is_cut_from_a_padded_tensor():
    """The expectation itself, against padding with zeros all round."""
    tensor = np.arange(2 * 3 * 40 * 80, dtype=np.float64).reshape(2, 3, 40, 80) + 1
    padded = np.pad(tensor, ((1, 1), (1, 1), (64, 64), (64, 64)))
    for c, r, h, b in probes.tma_boxes_probe().inputs[1:].view(np.int32).reshape(-1, 4):
        want = padded[b + 1, h + 1, r + 64 : r + 88, c + 64 : c + 128]
        np.testing.assert_array_equal(
            box(tensor, 24, (c, r, h, b)), np.pad(want, ((0, 0), (0, 64 - want.shape[1])))
        )


def test_expectations_can_fail():
    """A single wrong word of any probe is noticed."""
    for probe in [
        *PROBES,
        probes.tma_boxes_probe(),
        probes.tma_store_probe(),
        probes.tile_probe("f16", 24, 72),
    ]:
        values = expected_of(probe).values
        right = np.ascontiguousarray(values).view(np.uint32).ravel().copy()
        assert_as_expected(probe, right)
        for at in (0, right.size // 2, right.size - 1):
            wrong = right.copy()
            wrong[at] ^= 0x40400001  # another sign of the exponent, and the last bit
            with pytest.raises(AssertionError):
                assert_as_expected(probe, wrong)
