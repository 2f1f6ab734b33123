"""What GPU tests of the backward share: one call on poisoned results, held to the accuracy rule."""

from __future__ import annotations

from backward_support import NAMES, Case, assert_gradients

import cufa


def run(cp, case: Case, strides=lambda x: x, **options):
    """On the GPU into poisoned results; NumPy in, NumPy out."""
    arrays = [by_bits(strides, cp.asarray(x)) for x in case.arrays[:5]]
    how = dict(case.options)
    if case.dlse is not None:
        how["dlse"] = cp.asarray(case.dlse)
    results = {n: by_bits(strides, poisoned(cp, getattr(case, n[1:]))) for n in NAMES}
    got = cufa.flash_attention_backward(*arrays, cp.asarray(case.lse), **results, **how, **options)
    assert all(x is results[name] for name, x in zip(NAMES, got, strict=True))
    return tuple(cp.asnumpy(x) for x in got)


def poisoned(cp, like):
    """NaN by its bits, as bfloat16 may have no arithmetic."""
    return cp.full(like.shape, -1, f"i{like.itemsize}").view(like.dtype)


def by_bits(strides, x):
    return strides(x.view(f"i{x.itemsize}")).view(x.dtype)


def check(cp, case: Case, strides=lambda x: x, **options):
    got = run(cp, case, strides, **options)
    assert_gradients(got, case, options.get("precision"))
    return got
