"""What the tests of ALiBi and sinks in decoding share: their numbers, and what a result may be off by."""

from __future__ import annotations

import numpy as np
from decode_support import NAN_BITS, Case
from support import EPSILON

from cufa.masks import Mask


def numbers_of_heads(few: str, batch: int, heads: int) -> dict[str, np.ndarray]:
    """ "sink", "alibi" (slopes of each head), "alibi_of_batch" (of each sequence's) or "both". No two heads have the
    same; one sink is none, one outweighs all keys. Slopes are small enough for far keys to matter."""
    rng, found = np.random.default_rng(5), {}
    if few in ("sink", "both"):
        sink = rng.permutation(np.linspace(-2, 6, heads)).astype(np.float32)
        sink[:2] = -np.inf, 12
        found["sink"] = sink
    if few != "sink":
        slopes = rng.permutation(np.linspace(0.004, 0.25, batch * heads)).astype(np.float32)
        slopes = slopes.reshape(batch, heads)
        found["alibi_slopes"] = slopes if few == "alibi_of_batch" else slopes[0].copy()
    return found


def assert_right(case: Case, out: np.ndarray, lse: np.ndarray) -> None:
    """P and O are rounded to the dtype, once each."""
    expected, expected_lse = case.expected
    values = max((np.abs(case.sequence(b, "v")).max(initial=0) for b in range(len(case.lengths))), default=0)
    bound = 1.5 * EPSILON[str(case.q.dtype)] * float(values) + 1e-6
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=bound)
    np.testing.assert_allclose(lse, expected_lse, rtol=2.0**-18, atol=2.0**-14 + case.score_error)


def hidden(case: Case, mask: Mask) -> Case:
    """The same with NaN in place of the cached keys that no token sees."""
    caches, size = [case.k_cache.copy(), case.v_cache.copy()], case.k_cache.shape[2]
    tokens, table = case.q.shape[2], case.options.get("block_table")
    for b, n in enumerate(case.lengths):
        seen = mask.dense(tokens, n).any(axis=0) if n else np.zeros(0, bool)
        for position in np.flatnonzero(~seen):
            at = (b, position) if table is None else (table[b, position // size], position % size)
            for cache in caches:
                cache[at[0], :, at[1]] = NAN_BITS if cache.dtype == np.uint8 else np.nan
    return Case(case.q, *caches, case.options, case.lengths)
