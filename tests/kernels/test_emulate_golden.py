"""The executor against golden vectors recorded on a GPU: whole kernels, and primitives in any order. (Twins and vectors
each against NumPy: test_primitives.py.)"""

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
