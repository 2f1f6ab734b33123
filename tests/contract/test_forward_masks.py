"""The contract of the forward under masks and soft caps: zeros where a row sees no key, tiles as every score says."""

from __future__ import annotations

import numpy as np
import pytest
from backends import EMULATE, backends, contract
from forward_contract import check, one_dtype, smallest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import BANDS, assert_visited
from support import make_inputs

from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import Execution

MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "causal top-left": Band(right=0, diagonal="top-left"),
    "causal, diagonal -13": Band(right=0, diagonal=-13),
    "own key only": Band(0, 0),
    "one to the left": Band(1, 0, "top-left"),
    "7 each way": Band(7, 7, diagonal=5),
    "wider than a tile": Band(130, 20),
    "left edge only": Band(left=40),
    "beyond the keys": Band(3, 3, diagonal=500),
}


def check_band(spec, precision, lengths, mask, seed=0, execution=None, dtype=None):
    """On the smallest tiles: every score one by one, the schedule and the kernel's records agree on every tile."""
    inputs = make_inputs(1, 2, 1, *lengths, 64, dtype or spec.dtypes[0], seed=seed)
    done = check(
        EMULATE, spec, precision, *inputs, mask=mask, config=smallest(spec), execution=execution, trace=True
    )
    assert_visited(done.plan, mask.dense(*lengths), done.records)


@pytest.mark.sampled(each="mask", dated=0)
@contract("mask", emulate=MASKS, serves=one_dtype)
def test_bands(backend, spec, dtype, precision, mask):
    for lengths in ((1, 1), (7, 200), (63, 65), (64, 64), (127, 7), (200, 127), (65, 200)):
        check_band(spec, precision, lengths, MASKS[mask])


@pytest.mark.sampled(fixed=2, dated=1)
@contract(emulate=True, serves=one_dtype)
def test_any_band(backend, spec, dtype, precision):
    lengths = st.tuples(st.integers(1, 200), st.integers(1, 300))

    @given(mask=BANDS, lengths=lengths, seed=st.integers(0, 9))
    @settings(max_examples=15)
    def run(mask, lengths, seed):
        execution = Execution("plain", schedule=seed)
        check_band(spec, precision, lengths, mask, seed, execution, spec.dtypes[-1])

    run()


@contract("mask", emulate=["full", "7 each way"], serves=one_dtype)
def test_soft_caps(backend, spec, dtype, precision, mask):
    """A cap that bends most scores, and one so large that it changes none by more than rounding."""
    inputs = make_inputs(1, 2, 1, 65, 200, 64, dtype)
    options = {"mask": MASKS[mask], "config": smallest(spec)}
    check(backend, spec, precision, *inputs, softcap=0.7, **options)
    plain = check(backend, spec, precision, *inputs, **options)
    options |= {"algorithm": spec.algorithm, "precision": precision, "softcap": 1e3}
    huge = backend.forward(*inputs, **options)
    np.testing.assert_allclose(huge.lse, plain.lse, atol=5e-4 if dtype == "float16" else 2e-4)
    np.testing.assert_allclose(huge.out.astype(float), plain.out.astype(float), atol=4e-3)


@backends("gpu")
def test_skipping_changes_no_result(backend):
    """The one change from v1 to v2 in isolation: masked tiles add nothing to a row."""
    inputs = make_inputs(1, 4, 4, 500, 700, 64, "bfloat16")
    skipped = backend.forward(*inputs, causal=True, algorithm="fa2", num_splits=1).out.astype(np.float32)
    computed = backend.forward(*inputs, causal=True, algorithm="fa2_noskip").out.astype(np.float32)
    np.testing.assert_allclose(skipped, computed, rtol=2**-7, atol=2**-9)
