"""The benchmark of bounds on time: what it prints and how it ends. The bounds themselves are no test's."""

from __future__ import annotations

import numpy as np
import pytest
from backward_support import assert_gradients, make_case
from evidence import promises
from evidence.promises import Promise
from support import make_inputs

from cufa import attention_reference


@pytest.mark.parametrize(("measured", "status"), [(1.9, 0), (2.0, 0), (2.1, 1)])
def test_a_broken_promise_is_named_and_fails(capsys, measured, status):
    found = [Promise("the first", 9, "s", lambda: 1.0), Promise("the second", 2, "µs", lambda: measured)]
    assert promises.main(found) == status
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("kept") and first.endswith("the first")
    assert second.startswith("BROKEN" if status else "kept")
    assert f"{measured:g} of 2 µs" in second


def test_what_is_promised_without_a_gpu_can_be_measured(monkeypatch):
    """On a problem small enough for a test."""
    monkeypatch.setattr(promises, "_ROUNDS", 1)
    monkeypatch.setattr(promises, "_SEQLEN", 64)
    monkeypatch.setattr(promises, "_GRADIENT_SEQLEN", 64)
    for promise in promises.promises(on_gpu=False):
        assert 0 < promise.measure() < np.inf
    promises._seconds.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_what_it_is_held_against_is_attention(causal):
    q, k, v = make_inputs(1, 2, 2, 50, 50, 16, "float32")
    expected = attention_reference(q, k, v, causal=causal)
    np.testing.assert_allclose(promises.naive_numpy(q, k, v, causal), expected, atol=1e-5)
    case = make_case(1, 2, 2, 50, 50, 16, "float32", causal=causal)
    assert_gradients(promises.naive_numpy_backward(*case.arrays, causal=causal), case)
