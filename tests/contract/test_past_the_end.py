"""Rows past the end under irregular masks: however great their scores would be, they add nothing to dk and dv."""

from __future__ import annotations

import numpy as np
import pytest
from support import make_inputs

import cufa
from cufa import masks

RNG = np.random.default_rng(2)
RUNS = np.sort(RNG.integers(0, 100, (1, 1, 130, 2)), axis=-1).astype(np.int32)
SCORE = cufa.score(lambda s, b, h, i, j: s + 150.0)
CASES = [
    ("fa2", masks.prefix(9)),
    ("fa2", masks.from_flashmask(RUNS, causal=True)),
    ("fa3", masks.prefix(9)),
    ("fa3", masks.from_flashmask(RUNS, causal=True)),
]


@pytest.mark.emulate
@pytest.mark.parametrize(("algorithm", "mask"), CASES)
def test_gradients_are_finite_and_right(algorithm, mask):
    q, k, v = make_inputs(1, 2, 2, 100, 130, 64, "float16")
    dout = RNG.standard_normal(q.shape).astype(q.dtype)
    given = {"mask": mask, "score": SCORE}
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **given)
    back = cufa.emulate_backward(
        dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), algorithm=algorithm, **given
    )
    expected = cufa.attention_reference_backward(dout, q, k, v, **given)
    for name, exact in zip(("dq", "dk", "dv"), expected, strict=True):
        atol = 4e-3 * max(abs(exact).max(), 1)
        np.testing.assert_allclose(back.results[name].astype(np.float64), exact, atol=atol)
