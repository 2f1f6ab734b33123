"""Parallel calls on GPUs: virtual ranks on one, and several in one process."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_attention, make_inputs

import cufa
import cufa.parallel as par
from cufa import masks

pytestmark = pytest.mark.gpu

MASKS = {
    "causal": masks.causal(),
    "window": masks.window(300, 0),
    "prefix": masks.prefix(100),
    "documents": masks.documents([400, 30, 594]),
}


@pytest.fixture(params=["virtual", "devices"])
def group(request):
    cupy = pytest.importorskip("cupy")
    if request.param == "virtual":
        return par.Group(virtual=3)
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs: there is {count}")
    return par.Group([0, 1])


@pytest.mark.parametrize(
    ("placement", "scheme"),
    [
        ("zigzag", "zigzag"), ("zigzag", "allgather"), ("contiguous", "ulysses"), ("contiguous", "allgather"),
        ("documents", "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_together_compute_attention(group, placement, scheme, mask, dtype):
    import cupy

    if placement == "documents":
        placement = par.Placement.documents([400, 30, 594], group.size)
    host = make_inputs(1, 6, 6, 1024, 1024, 64, dtype)
    dout = make_inputs(1, 6, 6, 1024, 1024, 64, dtype, seed=5)[0]
    q, k, v, dout = map(cupy.asarray, (*host, dout))
    cut = [par.distribute(x, group, placement) for x in (q, k, v, dout)]
    options = {"group": group, "placement": placement, "scheme": scheme, "mask": MASKS[mask]}
    for _ in range(2):  # the second call takes the short cut
        out, lse = par.flash_attention(*cut[:3], return_lse=True, **options)
        whole = [par.collect(x, group, placement) for x in (out, lse)]
        assert_attention(whole[0].get(), whole[1].get(), *host, mask=MASKS[mask])
        found = par.flash_attention_backward(cut[3], *cut[:3], out, lse, **options)
        expected = cufa.flash_attention_backward(dout, q, k, v, *whole, mask=MASKS[mask])
        for x, y in zip(found, expected, strict=True):
            x, y = (z.astype("float32").get() for z in (par.collect(x, group, placement), y))
            assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)


def test_decoding_over_a_spread_cache(group):
    import cupy

    k, v = make_inputs(2, 8, 2, 1, 96 * group.size, 64, "bfloat16")[1:]
    q = make_inputs(2, 8, 2, 1, 1, 64, "bfloat16")[0]
    lengths = np.array([96 * group.size, 100], np.int32)
    expected = cufa.decode_reference(q, k, v, cache_seqlens=lengths)
    caches = [par.distribute(cupy.asarray(x), group) for x in (k, v)]
    queries = [par.distribute(cupy.asarray(q), group, par.Placement.of_lengths(
        [int(r == rank) for r in range(group.size)]))[rank] for rank in range(group.size)]  # fmt: skip
    for out in par.flash_decode(queries, *caches, group=group, cache_seqlens=lengths):
        np.testing.assert_allclose(out.get().astype(np.float32), expected, atol=0.02)


def test_a_gpu_is_named_once():
    pytest.importorskip("cupy")
    with pytest.raises(ValueError, match=r"names a GPU twice.*virtual"):
        par.Group([0, 0])
