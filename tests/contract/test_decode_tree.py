"""The contract of ``tree=``: a token of a tree sees all keys before the new tokens, its ancestors and itself; NaN-free,
on every kernel, as parents and as booleans, appended or in the cache, with the bits that other options promise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from decode_contract import check, each
from decode_support import make_case

import cufa
from cufa.problem.tree import ancestors

PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 3], [-1, -1, 0, 1, 2, 2, 5], [-1, 0, 1, 2, 3, 4, 5]], np.int32)


def test_ancestors_follow_the_definition():
    seen = ancestors(PARENTS)
    for b, parents in enumerate(PARENTS):
        for i in range(7):
            chain, at = set(), i
            while at >= 0:
                chain.add(at)
                at = int(parents[at])
            assert set(np.flatnonzero(seen[b, i]).tolist()) == chain
    np.testing.assert_array_equal(ancestors(seen), seen)
    assert (seen[2] == np.tril(np.ones((7, 7), bool))).all()


@pytest.mark.parametrize("kind", ["parents", "matrix"])
@each("cpu", "emulate", "gpu", kernels=("decode_split_tma", "decode_balanced", "decode_split_fp8"))
def test_trees(backend, kernel, kind):
    """Sequences that end within and at a border of a tile; one that is the tree alone; a chain is causal."""
    made = {
        "tokens": 7,
        "head_dim": 64,
        "page_size": 16,
        "new": 7,
        "softcap": 3.0 if kind == "matrix" else None,
    }
    case = make_case([7, 132, 333], fp8="fp8" in kernel, **made)
    tree = PARENTS if kind == "parents" else ancestors(PARENTS)
    done = check(backend, dataclasses.replace(case, options={**case.options, "tree": tree}), kernel, 3)
    causal = check(backend, case, kernel, 3)
    np.testing.assert_array_equal(done.out[2], causal.out[2])
    assert (done.out[1] != causal.out[1]).any()


@each("cpu", "emulate", "gpu", kernels=("decode_split",))
def test_many_rows_with_a_sink_and_invariance(backend, kernel):
    """16 tokens of 4 heads: 64 rows."""
    parents = np.array(
        [[-1, *(int(x) for x in np.random.default_rng(0).integers(0, np.arange(1, 16)))]] * 2, np.int32
    )
    case = make_case([300, 17], tokens=16, heads=8, kv_heads=2, head_dim=64, sink=np.zeros(8, np.float32))
    for more in ({}, {"invariant": True}):
        check(
            backend,
            dataclasses.replace(case, options={**case.options, "tree": parents, **more}),
            kernel,
            3,
            trace=False,
        )


BAD = {
    "a parent is a token before its child": {"tree": [[-1, 1], [-1, 0]]},
    "never later ones": {"tree": np.ones((2, 2, 2), bool)},
    "(batch, tokens)": {"tree": [[-1], [-1]]},
    "no other mask": {"tree": [[-1, 0], [-1, 0]], "window": (3, 0)},
    "tree with alibi_slopes": {"tree": [[-1, 0], [-1, 0]], "alibi_slopes": [1.0]},
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_the_argument_and_the_cure(words):
    q, k = np.zeros((2, 1, 2, 16), np.float32), np.zeros((2, 1, 8, 16), np.float32)
    with pytest.raises((TypeError, ValueError)) as raised:
        cufa.flash_decode(q, k, k, **BAD[words])
    assert words in str(raised.value)
    assert cufa.flash_decode(q[:, :, :1], k, k, tree=[[-1], [-1]]).shape == (2, 1, 1, 16)
