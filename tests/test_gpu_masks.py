"""Masks and numbers of heads that are on the GPU: made there, kept there, and refused by kernels in words."""

from __future__ import annotations

import numpy as np
import pytest
from support import make_inputs

import cufa
from cufa import masks

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
MADE = [
    lambda to: masks.prefix(to(np.array([3, 40]))),
    lambda to: masks.streaming(to(np.array([2, 9])), 5),
    lambda to: masks.documents(to(np.array([10, 0, 40])), seqlen=50),
    lambda to: masks.documents(to(np.array([[10, 20, 20], [30, 5, 0]])), causal=False, seqlen=50),
    lambda to: masks.shared_question(5, to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.shared_question(to(np.array([5, 9])), to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.evict(to(np.arange(100).reshape(2, 50))),
    lambda to: masks.columns(to(np.arange(50)), to(np.arange(50) + 7), causal=True),
    lambda to: masks.from_flashmask(to(np.arange(2 * 3 * 50 * 4).reshape(2, 3, 50, 4) % 50), causal=False),
    lambda to: masks.from_flashmask(to(np.arange(2 * 50).reshape(2, 1, 50, 1)), causal=True),
]


@pytest.mark.parametrize("make", MADE)
def test_a_mask_made_on_the_gpu_is_the_one_made_on_the_host(make):
    there, here = make(lambda x: cupy.asarray(x.astype(np.int32))), make(lambda x: x.astype(np.int32))
    assert not there.known and there != here and "on a GPU" in str(there)
    assert there.on_host() == here and there.spread == here.spread
    with pytest.raises(ValueError, match=r"on a GPU.*mask\.on_host\(\)"):
        there.dense(50, 50)


def test_calls_on_the_gpu_say_what_they_do_not_serve():
    q, k, v = (cupy.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    mask = masks.evict(cupy.arange(50, dtype=cupy.int32))
    for options, word in (
        ({"mask": mask}, "masks that are bands, not those that hide a key"),
        ({"mask": masks.prefix(3)}, "masks that are bands, not those with a prefix"),
        ({"sink": np.ones(4)}, "no sink so far"),
        ({"sink": cupy.ones(4, np.float32), "seqlens_k": cupy.ones(2, np.int32)}, "no sink so far"),
        ({"alibi_slopes": cupy.ones(4, np.float32)}, "no ALiBi"),
        ({"seqlens_k": cupy.ones(2, np.int32)}, "only sequences as long as the arrays"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=word):
                cufa.flash_attention(q, k, v, **options)
    packed = (x[0].swapaxes(0, 1) for x in (q, k, v))
    cu = cupy.array([0, 20, 50], np.int32)
    with pytest.raises(ValueError, match="no packed sequences"):
        cufa.flash_attention_varlen(*packed, cu, cu)
    assert "at most" in str(cufa.plan((2, 4, 50, 64), mask=mask, device="cpu"))


def test_numbers_on_the_gpu_are_of_the_kernels_types():
    q, k, v = (cupy.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    for options, message in (
        ({"sink": cupy.ones(4)}, "sink is float64; on a GPU it must be float32"),
        ({"seqlens_k": cupy.ones(2, np.int64)}, "seqlens_k is int64; on a GPU it must be int32"),
    ):
        with pytest.raises(TypeError, match=message):
            cufa.flash_attention(q, k, v, **options)
    with pytest.raises(TypeError, match=r"rows is int64; on a GPU it must be int32"):
        masks.evict(cupy.arange(50))
    with pytest.raises(ValueError, match=r"lengths is on a GPU.*pass seqlen="):
        masks.documents(cupy.array([20, 30], np.int32))


def test_numpy_arrays_go_to_the_cpu_where_no_kernel_serves():
    """And not to the GPU that is there; asked for it, the call says why not."""
    q, k, v = make_inputs(2, 4, 2, 50, 50, 64, "float16")
    options = {"mask": masks.prefix(3), "sink": np.ones(4)}
    out = cufa.flash_attention(q, k, v, **options)
    np.testing.assert_array_equal(out, cufa.flash_attention(q, k, v, device="cpu", **options))
    with pytest.raises(ValueError, match="masks that are bands, not those with a prefix"):
        cufa.flash_attention(q, k, v, device="cuda", **options)
    with pytest.raises(ValueError, match=r"its numbers on a GPU.*mask\.on_host\(\)"):
        cufa.flash_attention(q, k, v, mask=masks.evict(cupy.arange(50, dtype=cupy.int32)), device="cpu")
