"""The host twins against golden vectors recorded on a GPU. Where they disagree, the GPU is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import probes
import pytest
from machines import on_cpu
from support import DTYPES, EPSILON

from cufa.run.emulate.calls import emulate

FOLDER = Path(__file__).parents[1] / "golden"

PROBES = probes.all_probes()
CASES = list(probes.cases())

#: Largest difference from the GPU in units in the last place (float32); everything else is the same bits.
#: ex2, lg2 and rcp are approximations, good to 2 such units (lg2: absolute near 1) by NVIDIA's account.
ULPS = {"ex2": 2, "rcp": 1}


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "golden.npz") as file:
        return dict(file)


def test_every_primitive_is_as_it_was_recorded(golden):
    """Else: python tests/golden/record.py on a GPU."""
    recorded = json.loads(golden["about"].tobytes())["primitives"]
    assert not set(recorded) & probes.NOT_YET_RECORDED, "take them off the list"
    digests = {n: d for n, d in probes.primitive_digests().items() if n not in probes.NOT_YET_RECORDED}
    assert {name: recorded.get(name) for name in digests} == digests
    assert {f"probe/{p.name}" for p in PROBES if p.name not in probes.AWAITED_PROBES} <= set(golden)


@pytest.mark.sampled(each="probe")
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_primitive(golden, probe):
    if probe.name in probes.AWAITED_PROBES:
        pytest.skip("newer than the last run of golden/record.py; test_primitives.py has what NumPy expects")
    got, expected = on_cpu(probe), golden[f"probe/{probe.name}"]
    if probe.name in ("wgmma_f16", "wgmma_bf16"):
        # A from shared memory and from registers, K-major B; then MN-major B.
        for products in (got.reshape(128, 64), expected.reshape(128, 64)):
            np.testing.assert_array_equal(products[:, :16], products[:, 16:32])
    if probe.name.startswith("wgmma"):
        assert_warpgroup_products(got.view(np.float32), expected.view(np.float32))
    elif probe.name.startswith("mma"):
        assert_products(probe, got.view(np.float32), expected.view(np.float32))
    elif probe.name == "lg2":
        a, b = got.view(np.float32), expected.view(np.float32)
        np.testing.assert_allclose(a, b, rtol=2.0**-21, atol=2.0**-21)
    elif probe.name in ULPS:
        assert_ulps(got.view(np.float32), expected.view(np.float32), ULPS[probe.name])
    else:
        same = (got == expected) | both_nan(probe.name, got, expected)
        where = np.flatnonzero(~same)[:4]
        assert same.all(), f"{where}: {got[where]} here, {expected[where]} on the GPU"


def both_nan(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 NaNs differ in bits that nothing depends on; packed 16-bit values are compared bit by bit."""
    if name not in ("fmaxf", "fminf", "fmaf", "cvt_f32_f16"):
        return np.zeros(a.shape, bool)
    return np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))


def assert_ulps(got, expected, ulps):
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite & ~np.isnan(expected)], expected[~finite & ~np.isnan(expected)])
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - expected)[finite] / np.spacing(np.abs(expected[finite]))
    assert difference.max() <= ulps


def assert_products(probe, got, expected):
    """Within float32 rounding of the sum of magnitudes; exactly equal where every partial sum is exact."""
    got, expected = got.reshape(probe.blocks, -1), expected.reshape(probe.blocks, -1)
    np.testing.assert_array_equal(got[1], expected[1])  # small integers
    for block in range(probe.blocks):
        largest = np.abs(expected[block]).max()
        np.testing.assert_allclose(got[block], expected[block], rtol=0, atol=2.0**-20 * largest)


def assert_warpgroup_products(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-18 * np.abs(expected).max())


@pytest.mark.sampled(each="probe")
@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("probe", PROBES[-7:], ids=lambda p: p.name)
def test_order_does_not_matter(probe, copies, schedule):
    got, first = on_cpu(probe, copies=copies, schedule=schedule), on_cpu(probe)
    np.testing.assert_array_equal(got, first)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention(golden, case):
    """The same kernel source, executed here and on the GPU: within a rounding or two of each other."""
    q, k, v = case.inputs()
    run = emulate(q, k, v, causal=case.causal, algorithm=case.algorithm, precision=case.precision)
    out = golden[f"attention/{case.name}/out"].view(DTYPES[case.dtype])
    expected = out.reshape(q.shape).astype(np.float64)
    epsilon = EPSILON["float16"] if case.precision == "tf32" else EPSILON[case.dtype]
    if case.dtype == "float32" and case.precision != "tf32":
        epsilon *= 8  # many roundings, each far below the output's
    atol = 2 * epsilon * np.abs(expected).max()
    np.testing.assert_allclose(run.out.astype(np.float64), expected, rtol=0, atol=atol)
    lse = golden[f"attention/{case.name}/lse"]
    np.testing.assert_allclose(
        run.lse, lse, rtol=2.0**-18, atol=2.0**-10 if case.precision == "tf32" else 2.0**-17
    )
