"""Calls of attention over a cache: sequences with many new tokens and others with one; what no query sees is NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from decode_support import in_cache
from lengths_support import TOLERANCE
from support import DTYPES

import cufa
from cufa.problem.integers import Integers
from cufa.problem.tree import Tree, ancestors

#: Of each sequence: keys in the cache before the call, and new tokens.
MIXED = ((40, 1), (0, 9), (129, 0), (15, 1), (700, 52))
HEADS, KV_HEADS = 4, 2


@dataclasses.dataclass(frozen=True)
class CacheCase:
    operands: dict[str, Any]
    """Of a call with packed queries."""
    keys: list[np.ndarray]
    """Of each sequence with its new tokens, (1, kv_heads, keys, head_dim)."""
    values: list[np.ndarray]

    def queries(self, b: int) -> slice:
        begin, end = self.operands["cu_seqlens_q"][b : b + 2]
        return slice(int(begin), int(end))

    def alone(self, b: int) -> dict[str, Any]:
        """The operands of a call with one sequence, whose new tokens are in the cache already."""
        x = self.operands
        one = {"q": x["q"][self.queries(b)], "cu_seqlens_q": np.array([0, MIXED[b][1]], np.int32)}
        keys = np.array([sum(MIXED[b])], np.int32)
        if "block_table" in x:
            table = x["block_table"][b : b + 1]
            return {**one, "k": x["k"], "v": x["v"], "cache_seqlens": keys, "block_table": table}
        return {**one, "k": x["k"][b : b + 1], "v": x["v"][b : b + 1], "cache_seqlens": keys}

    def padded(self) -> dict[str, Any]:
        """The operands of a call of :func:`cufa.flash_attention`."""
        found, most = dict(self.operands), max(new for _, new in MIXED)
        del found["cu_seqlens_q"]
        for name in ("q", "k_new", "v_new"):
            x = self.operands[name]
            found[name] = np.full((len(MIXED), x.shape[1], most, x.shape[2]), np.nan, x.dtype)
            for b, (_, new) in enumerate(MIXED):
                found[name][b, :, :new] = x[self.queries(b)].swapaxes(0, 1)
        return {**found, "seqlens_q": np.array([new for _, new in MIXED], np.int32)}


def cache_case(page_size: int, head_dim: int, dtype: str) -> CacheCase:
    """Pages in any order, with wild entries behind those in use; ``page_size`` 0: a contiguous cache."""
    rng = np.random.default_rng(0)
    element = DTYPES[dtype]
    totals = [old + new for old, new in MIXED]
    keys, values = (
        [rng.standard_normal((1, KV_HEADS, n, head_dim)).astype(element) for n in totals] for _ in "kv"
    )
    size = page_size or max(totals) + 3
    counts = [-(-n // size) for n in totals]
    order = rng.permutation(sum(counts) + 2) if page_size else np.arange(len(MIXED))
    table = np.full((len(MIXED), max(counts)), -7, np.int32)
    old = [[x[b][0, :, :n] for x in (keys, values)] for b, (n, _) in enumerate(MIXED)]
    caches = in_cache(old, totals, size, order, table)
    cu = np.append(0, np.cumsum([new for _, new in MIXED])).astype(np.int32)
    q = rng.standard_normal((cu[-1] + 3, HEADS, head_dim)).astype(element)
    q[cu[-1] :] = np.nan
    operands = {"q": q, "k": caches[0], "v": caches[1], "cu_seqlens_q": cu}
    operands["cache_seqlens"] = np.array([old for old, _ in MIXED], np.int32)
    if page_size:
        operands["block_table"] = table
    for name, x in (("k_new", keys), ("v_new", values)):
        operands[name] = np.full((len(q), KV_HEADS, head_dim), np.nan, element)
        for b, (old, _) in enumerate(MIXED):
            operands[name][cu[b] : cu[b + 1]] = x[b][0, :, old:].swapaxes(0, 1)
    return CacheCase(operands, keys, values)


def assert_attention_of(case: CacheCase, out: np.ndarray, **options: Any) -> None:
    """``out``, packed, is each sequence's attention, and zeros after the last sequence."""
    options = options or {"causal": True}
    for b, (_, new) in enumerate(MIXED):
        if new:
            q = case.operands["q"][case.queries(b)].swapaxes(0, 1)[None]
            expected = cufa.attention_reference(q, case.keys[b], case.values[b], **_of_sequence(options, b))
            expected = expected[0].swapaxes(0, 1)
            bound = TOLERANCE[str(q.dtype)] * (1 + np.abs(expected).max())
            np.testing.assert_allclose(out[case.queries(b)].astype(float), expected, atol=bound, rtol=0)
    assert not out[case.queries(len(MIXED) - 1).stop :].astype(float).any()


def _of_sequence(options: dict[str, Any], b: int) -> dict[str, Any]:
    """Of the reference of one sequence, which knows no trees but their mask."""
    if "mask" in options:
        return {**options, "mask": options["mask"].at(b, 0)}
    if "tree" not in options:
        return options
    seen = Integers(ancestors(options["tree"])[b : b + 1])
    return {"mask": Tree(seen), **{name: x for name, x in options.items() if name != "tree"}}
