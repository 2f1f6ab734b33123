"""deterministic=True under irregular masks: the tickets of key blocks are listed, and every run gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from support import make_inputs

import cufa
from cufa import masks

RNG = np.random.default_rng(8)
HOLES = RNG.random((150, 200)) < 0.02
HOLES[:100, 64:192] = False
MASKS = {
    "documents": masks.documents([60, 50, 90], causal=False),
    "prefix by sequence": masks.prefix([3, 190]),
    "bits": HOLES,
    "bits of query heads": RNG.random((2, 4, 150, 200)) < 0.004,
}
KERNELS = [
    ("fa3", "float16", 64), ("fa3", "bfloat16", 128), ("fa3", "float16", 192),
    ("fa2", "float16", 64), ("fa2", "float32", 40),
]  # fmt: skip


@pytest.mark.emulate
@pytest.mark.sampled(2, each="algorithm")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("algorithm", "dtype", "head_dim"), KERNELS)
def test_every_order_of_warps_gives_the_same_bits(algorithm, dtype, head_dim, name):
    mask = MASKS[name]
    rows = 200 if name == "documents" else 150
    q, k, v = make_inputs(2, 4, 2, rows, 200, head_dim, dtype)
    dout = RNG.standard_normal(q.shape).astype(q.dtype)
    exact, lse = cufa.attention_reference(q, k, v, mask=mask, return_lse=True)
    given = dout, q, k, v, exact.astype(q.dtype), lse.astype(np.float32)
    runs = [
        cufa.emulate_backward(
            *given,
            mask=mask,
            deterministic=True,
            algorithm=algorithm,
            mode=mode,
            schedule=schedule,
            threads=4,
        )
        for mode, schedule in (("checked", "ascending"), ("plain", "descending"), ("plain", 5))
    ]
    assert not runs[0].findings
    expected = cufa.attention_reference_backward(dout, q, k, v, mask=mask)
    for n, name in enumerate(("dq", "dk", "dv")):
        first = runs[0].results[name]
        rounding = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]
        atol = rounding * max(abs(expected[n]).max(), 1)
        np.testing.assert_allclose(first.astype(np.float64), expected[n], atol=atol)
        for run in runs[1:]:
            np.testing.assert_array_equal(run.results[name], first)
