"""Calls of attention whose keys are in a cache: their operands and shapes, stated as a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..plan.operation import CACHE
from ..problem.checks import is_device_array
from ..problem.integers import Integers
from ..problem.lengths import Cached, Lengths, Packed, Padded
from ..problem.mask import CAUSAL, FULL
from ..problem.options import Options
from ..problem.problem import Problem
from ..problem.tree import MAX_TREE, Tree, ancestors
from . import arrays, optional_operands
from .cache_checks import check_integers, check_lengths, check_slots, tree_operand
from .shapes import (
    AXES,
    LAYOUTS,
    MAX_CAPACITY,
    PAGE_AXES,
    check_equal,
    check_mask,
    check_table,
    four_axes,
    make_problem,
)

_NAMES = tuple(x.name for x in CACHE)


def cached_problem(
    inputs: Mapping[str, Any], dtype: str, options: Options, table_is_known: bool = True
) -> tuple[dict[str, Any], Problem]:
    """The inputs as kernels read them, and the problem. With ``cu_seqlens_q``, queries and new tokens are packed.
    Raises TypeError or ValueError, naming the argument."""
    for name in ("seqlens_k", "cu_seqlens_k"):
        if inputs.get(name) is not None:
            raise ValueError(
                f"{name} and cache_seqlens or block_table both say where keys are: cache_seqlens counts the keys of a "
                f"cache; leave out {name}"
            )
    if options.dropped:
        raise ValueError(
            "dropout= does not go with keys in a cache, whose tiles of queries begin at any position: leave it out, or "
            "pass k and v as arrays with one row per key"
        )
    check_equal("v", inputs["v"].shape, "k", inputs["k"].shape)
    found = {**dict.fromkeys(_NAMES), **inputs}
    queries = _queries(found, options.layout)
    kv_heads, capacity, cache = _cache(found, queries)
    # Check shapes as if there were one sequence, without the mask: masks count positions within each sequence.
    shape = (1, kv_heads, capacity, inputs["k"].shape[3])
    problem = make_problem(
        [(1, queries.heads, queries.rows, inputs["q"].shape[-1]), shape, shape],
        dtype,
        dataclasses.replace(options, mask=FULL, layout="bhsd"),
    )
    check_mask(options.mask, queries.batch, kv_heads)
    mask, tree = options.mask, ""
    if found["tree"] is not None:
        found["tree"], mask, tree = _checked_tree(found, queries, mask)
    problem = dataclasses.replace(
        problem, mask=mask, tree=tree, invariant=options.invariant, batch=queries.batch, seqlen_q=queries.most,
        lengths=_lengths(queries, found["cache_seqlens"], capacity, cache),
    )  # fmt: skip
    check_lengths(problem, found["cache_seqlens"], found["block_table"] if table_is_known else None)
    if table_is_known:
        check_slots(problem, found["cache_seqlens"], found["block_table"])
    return found, problem


class _Queries(NamedTuple):
    """The queries of a call."""

    layout: str
    """Axis order of k and v."""
    packed: bool
    batch: int
    heads: int
    rows: int
    """Rows of a sequence in q; packed: of all sequences."""
    counts: tuple[int, ...] | None
    """Queries of each sequence; None: known on the GPU only."""

    @property
    def most(self) -> int:
        """Most queries of a sequence; an upper bound if only the GPU knows the counts."""
        return max(self.counts, default=0) if self.packed and self.counts is not None else self.rows


def _queries(found: dict[str, Any], layout: str) -> _Queries:
    shape = found["q"].shape
    if found.get("cu_seqlens_q") is not None:
        if len(shape) != 3:
            raise ValueError(f"q has shape {shape}; packed queries have three axes (tokens, heads, head_dim)")
        found["cu_seqlens_q"], lengths = optional_operands.cumulative(
            "cu_seqlens_q", found["cu_seqlens_q"], shape[0], "q"
        )
        return _Queries("bhsd", True, len(found["cu_seqlens_q"]) - 1, shape[1], shape[0], lengths)
    batch, heads, rows, _ = four_axes("q", shape, AXES[layout], layout)
    if found.get("seqlens_q") is None:
        return _Queries(layout, False, batch, heads, rows, (rows,) * batch)
    found["seqlens_q"] = x = optional_operands.checked_lengths("seqlens_q", found["seqlens_q"], batch, rows)
    return _Queries(layout, False, batch, heads, rows, None if is_device_array(x) else tuple(x.tolist()))


def _cache(found: dict[str, Any], queries: _Queries) -> tuple[int, int, Cached]:
    """(key/value heads, capacity per sequence, the cache). Sets lengths and block table in ``found`` as kernels read
    them."""
    table, layout, batch = found["block_table"], queries.layout, queries.batch
    axes = (AXES if table is None else PAGE_AXES)[layout]
    outer, kv_heads, length, _ = four_axes("k", found["k"].shape, axes, layout)
    pages = 1
    if table is not None:
        pages = check_table(table.shape, batch, num_pages=outer, page_size=length, axes=axes, name="k")[1]
    elif outer != batch:
        raise ValueError(
            f"k has batch {outer} but there are {batch} sequences: they must be equal, unless block_table names "
            "the pages of each sequence"
        )
    if pages * length > MAX_CAPACITY:
        raise ValueError(
            f"{'k' if table is None else 'block_table'} has room for {pages * length:,} tokens per sequence: kernels "
            f"count up to {MAX_CAPACITY:,}; pass only the part, or the columns, that are used"
        )
    appended = _check_new(found, queries, kv_heads)
    found["cache_seqlens"] = check_integers("cache_seqlens", found["cache_seqlens"], (batch,))
    found["block_table"] = check_integers("block_table", table, (batch, pages))
    in_pages = (length, pages) if table is not None else (0, 0)
    given = found["cache_seqlens"] is not None
    return kv_heads, pages * length, Cached(*in_pages, outer, given, queries.rows if appended else 0)


def _lengths(queries: _Queries, cache_seqlens: Any, capacity: int, cache: Cached) -> Lengths:
    counts, keys = queries.counts, None
    if is_device_array(cache_seqlens) or counts is None:
        counts = None
    else:
        before = [capacity] * queries.batch if cache_seqlens is None else cache_seqlens.tolist()
        keys = tuple(n + (cache.new_tokens > 0) * new for n, new in zip(before, counts, strict=True))
    if queries.packed:
        return Packed(queries.rows, capacity * queries.batch, counts, keys, cache)
    return Padded(counts, keys, counts is not None, cache)


def _check_new(found: dict[str, Any], queries: _Queries, kv_heads: int) -> bool:
    """Whether the call appends tokens."""
    there = {name: found[name] for name in ("k_new", "v_new") if found[name] is not None}
    if not there:
        return False
    for name in ("k_new", "v_new"):
        if name not in there:
            raise ValueError(f"{name} is missing: new keys and values are appended together")
    if found["cache_seqlens"] is None:
        raise ValueError("k_new came without cache_seqlens, which says where in the cache to append it")
    q = found["q"]
    shape: tuple[int, ...] = (queries.rows, kv_heads, q.shape[-1])
    if not queries.packed:
        shape = tuple((queries.batch, kv_heads, *shape[::2])[i] for i in LAYOUTS[queries.layout])
    for name, x in there.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; it takes a token for each query, here {shape}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}: convert with {name}.astype(q.dtype)")
        if isinstance(x, np.ndarray) != isinstance(q, np.ndarray):
            raise TypeError(f"{name} is not where q is: put {name} on the GPU with cupy.asarray({name})")
        arrays.check_last_axis(name, x)
        arrays.check_address(name, x)
    return bool(queries.rows)


def _checked_tree(found: dict[str, Any], queries: _Queries, mask: Any) -> tuple[Any, Tree, str]:
    """(``tree`` as kernels read it, its mask, its kind)."""
    x, batch = found["tree"], queries.batch
    if found.get("alibi_slopes") is not None:
        raise ValueError(
            "tree with alibi_slopes: ALiBi would measure distances of token indexes, not along the tree; leave one out"
        )
    if mask not in (FULL, CAUSAL):
        raise ValueError(f"tree and mask {mask} both say what new tokens see: leave one out")
    tokens = x.shape[1] if x.ndim > 1 else 0
    if x.shape not in ((batch, tokens), (batch, tokens, tokens)):
        raise ValueError(
            f"tree has shape {x.shape}: it takes parents, ({batch}, tokens), or booleans, ({batch}, tokens, tokens)"
        )
    most = 0 if queries.packed and queries.counts is None else queries.most  # 0: counted on the GPU
    if not most <= tokens <= MAX_TREE:
        raise ValueError(
            f"tree has {tokens} tokens for up to {most} queries of a sequence: it takes a token for each query, at "
            f"most {MAX_TREE}"
        )
    x, kind = tree_operand(x, x.shape, "parents or booleans")
    return x, Tree(Integers(x if is_device_array(x) else ancestors(x))), kind
