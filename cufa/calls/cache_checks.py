"""Checks of a cache of keys and values: lengths, block tables, and where new tokens go. Only host arrays are read;
kernels clamp lengths and page numbers on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..problem.checks import is_device_array
from ..problem.integers import INT32
from ..problem.lengths import Cached, Packed, Padded
from ..problem.problem import Problem
from ..problem.tree import check_tree
from ..schedule.decode import read_range
from . import arrays, optional_operands

Array = arrays.Array


def check_integers(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """Lengths or a block table as int32. Host arrays may have any integer dtype, and a single length applies to every
    sequence."""
    if x is None:
        return None
    if not is_device_array(x):
        if x.size == 0 and x.dtype.kind not in "iu":
            x = x.astype(np.int32)  # an empty list has no type
        if name == "cache_seqlens" and x.ndim == 0:
            x = np.broadcast_to(x, shape)
        if name == "block_table" and x.dtype.kind in "iu":  # entries that no sequence uses may hold anything
            wild = (x < INT32.min) | (x > INT32.max)
            x = np.where(wild, INT32.max, x) if wild.any() else x
    return optional_operands.int32(name, x, shape, "(batch, max_pages)" if len(shape) == 2 else "(batch,)")


def check_lengths(problem: Problem, lengths: Array, table: Array) -> None:
    """Check lengths against the cache's capacity, and the block table's entries in use. Arrays on a GPU are not
    checked."""
    if not problem.lengths.known or not isinstance(lengths, (np.ndarray, type(None))):
        return
    valid = [problem.seqlen_k] * problem.batch if lengths is None else lengths.tolist()
    for b, length in enumerate(valid):
        one = _one_sequence(problem, b)
        check_length(b, length, one.cache, problem.seqlen_k, _name_of_cache(problem))
        if isinstance(table, np.ndarray):
            _check_pages(one, table, b, length + one.cache.new_tokens)


def _one_sequence(problem: Problem, b: int) -> Problem:
    """The problem with the queries and new tokens of one sequence."""
    lengths = problem.lengths
    if not isinstance(lengths, (Padded, Packed)):
        return problem
    queries = problem.seqlen_q if lengths.queries is None else lengths.queries[b]
    cache = dataclasses.replace(problem.cache, new_tokens=queries if problem.cache.new_tokens else 0)
    return dataclasses.replace(problem, seqlen_q=queries, lengths=Padded(cache=cache))


def _name_of_cache(problem: Problem) -> str:
    return "k_cache" if problem.operation == "decode" else "k"


def tree_operand(x: Array, shape: tuple[int, ...], words: str) -> tuple[Array, str]:
    """(the tree as kernels read it, its kind). Raises unless the tree has ``shape``, whose axes ``words`` names."""
    kind, dtype, kinds = ("matrix", "bool", "b") if x.ndim == 3 else ("parents", "int32", "iu")
    optional_operands.check_small("tree", x, dtype, kinds, (shape,), words)
    if not is_device_array(x):
        check_tree(x)
        return np.ascontiguousarray(x, dtype), kind
    if not x.flags.c_contiguous:
        raise ValueError(f"tree has strides {x.strides}: pass a contiguous array")
    return x, kind


def check_length(b: int, length: int, cache: Cached, capacity: int, name: str = "k_cache") -> None:
    """Raises ValueError unless the cached and appended tokens of sequence ``b`` fit the cache."""
    if length < 0:
        raise ValueError(f"cache_seqlens[{b}] is {length}: a length is at least 0")
    total = length + cache.new_tokens
    if total <= capacity:
        return
    what = f"cache_seqlens[{b}] is {length}"
    if cache.new_tokens:
        what += f" and k_new appends {cache.new_tokens}"
    if not cache.paged:
        raise ValueError(f"{what}, but {name} holds {capacity} tokens per sequence: allocate a longer cache")
    raise ValueError(
        f"{what}, but block_table has {cache.max_pages} pages of {cache.page_size} per sequence: it takes "
        f"{-(-total // cache.page_size)} columns"
    )


def _pages_of(problem: Problem, length: int) -> tuple[int, int]:
    """Entries (first, last + 1) of the table that a sequence of ``length`` keys uses."""
    size = problem.cache.page_size
    return read_range(length, problem.reach)[0] // size, -(-length // size)


def _check_pages(problem: Problem, table: Array, b: int, length: int) -> None:
    first, last = _pages_of(problem, length)
    used = table[b, first:last]
    wild = np.flatnonzero((used < 0) | (used >= problem.cache.num_pages))
    if len(wild):
        entries = f"entries {first} to {last - 1}" if first else f"its first {last} entries"
        raise ValueError(
            f"block_table[{b}, {first + wild[0]}] is {used[wild[0]]}, but {_name_of_cache(problem)} has "
            f"{problem.cache.num_pages} pages; sequence {b} uses {entries}"
        )


def check_slots(problem: Problem, lengths: Array, table: Array) -> None:
    """Raises ValueError if a new token would be written to another token's slot: blocks might read either token."""
    size, on_host = problem.cache.page_size, isinstance(lengths, np.ndarray) and isinstance(table, np.ndarray)
    if not (problem.cache.new_tokens and on_host and problem.lengths.known):
        return
    starts = lengths.tolist()
    each = [_one_sequence(problem, b) for b in range(problem.batch)]
    ends = [start + one.cache.new_tokens for start, one in zip(starts, each, strict=True)]
    written = [
        (b, entry, max(start - entry * size, 0))
        for b, start in enumerate(starts)
        for entry in range(start // size, -(-ends[b] // size) if ends[b] > start else 0)
    ]
    pages = table[[b for b, _, _ in written], [entry for _, entry, _ in written]]
    used: dict[int, list[tuple[int, int, int]]] = {}
    for b, entry in np.argwhere(np.isin(table, pages)).tolist():
        first, last = _pages_of(each[b], ends[b])
        if first <= entry < last:
            used.setdefault(int(table[b, entry]), []).append((b, entry, ends[b] - entry * size))
    for (b, entry, slot), page in zip(written, pages.tolist(), strict=True):
        for other, its_entry, count in used[page]:
            if (other, its_entry) != (b, entry) and slot < count:
                raise ValueError(
                    f"sequence {b} appends a token of k_new to slot {slot} of page {page}, block_table[{b}, {entry}], "
                    f"where block_table[{other}, {its_entry}] puts a token of sequence {other}: only full pages "
                    f"can be shared; give new tokens of sequence {b} a page of their own"
                )


def check_written_cache(name: str, given: Mapping[str, Array]) -> None:
    cache = given[name]
    if isinstance(cache, np.ndarray) and not cache.flags.writeable:
        raise ValueError(f"{name} is read-only, but k_new is appended to it: pass a writeable array")
    if arrays.overlaps_itself(cache):
        raise ValueError(
            f"{name} has strides {cache.strides} for shape {cache.shape}: elements share memory, so nothing "
            "can be appended"
        )
    for other, x in given.items():
        if other != name and type(x) is type(cache) and arrays.shares_memory(cache, x):
            raise ValueError(f"{name} overlaps {other} in memory, but k_new is appended to it: pass a copy")
