"""Numbers close to zero, and zeros alone, as layers have them that begin at zero: float32 kernels compute in pairs of
float16 with a unit, which must neither vanish nor overflow."""

import numpy as np
import pytest

import cufa

pytestmark = pytest.mark.gpu

SIZES = [0.0, 1e-30, 1e-26]


def arrays(*sizes):
    import cupy

    rng = np.random.default_rng(3)
    return [cupy.asarray((rng.standard_normal((1, 2, 150, 64)) * size).astype(np.float32)) for size in sizes]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["fa2", "fa1", "naive"])
def test_values(algorithm, size):
    q, k, v = arrays(1, 1, size)
    out = cufa.flash_attention(q, k, v, causal=True, algorithm=algorithm).get()
    exact = cufa.attention_reference(q.get(), k.get(), v.get(), causal=True)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("size", SIZES)
def test_gradients(size):
    q, k, v, dout = arrays(1, 1, 1, size)
    out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)
    found = cufa.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    exact = cufa.attention_reference_backward(*(x.get() for x in (dout, q, k, v)), causal=True)
    for x, x_exact in zip(found, exact, strict=True):
        assert np.abs(x.get() - x_exact).max() <= 1e-5 * np.abs(x_exact).max()
