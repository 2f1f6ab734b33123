"""The error of a result: some of its rows against float64, computed where the arrays are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.element import Element
from ..core.problem import Problem
from ..core.scores import softcapped
from ..ops.arrays import is_device_array

#: (sequence, key/value head) pairs that are looked at, if there are so many, and rows of each.
_PAIRS, _ROWS = 8, 8


@dataclasses.dataclass(frozen=True)
class Expected:
    """Some rows of the result, in float64."""

    rows: tuple[tuple[int, int, int], ...]
    """(batch, head, query)"""
    values: tuple[Any, ...]
    """(head_dim,) each"""


def sampled_reference(
    problem: Problem, arrays: Mapping[str, Any], lengths: tuple[int, ...] | None = None, seed: int = 0
) -> Expected:
    """Exact rows of random sequences and heads: of each the first, the last and others at random.

    ``arrays`` as :meth:`cufa.bench.inputs.Inputs.arrays` makes them.
    """
    rng, rows, values = np.random.default_rng(seed), list[tuple[int, int, int]](), list[Any]()
    for index in rng.permutation(problem.batch * problem.kv_heads)[:_PAIRS]:
        batch, kv_head = divmod(int(index), problem.kv_heads)
        length = problem.seqlen_k if lengths is None else lengths[batch]
        k, v = (_tokens(problem, arrays, name, batch, kv_head, length) for name in "kv")
        for packed in _picked(problem.rows, rng):
            head, query = divmod(packed, problem.seqlen_q)
            row = batch, kv_head * problem.group_size + head, query
            q = _float64(arrays["q"][row], problem.q_element)
            rows.append(row)
            values.append(_attend(problem, q, k, v, query))
    return Expected(tuple(rows), tuple(values))


def max_error(problem: Problem, out: Any, expected: Expected) -> float:
    """Largest absolute difference over the expected rows; NaN when the output has one there."""
    worst = 0.0
    for row, value in zip(expected.rows, expected.values, strict=True):
        error = float(abs(_float64(out[row], problem.out_element) - value).max())
        worst = float(np.maximum(worst, error))  # NaN stays
    return worst


def _picked(count: int, rng: np.random.Generator) -> list[int]:
    """Of so many rows the first, the last and others at random."""
    between = 1 + rng.permutation(max(count - 2, 0))[: _ROWS - 2]
    return [int(n) for n in np.unique(np.append(between, [0, count - 1]))]


def _tokens(
    problem: Problem, arrays: Mapping[str, Any], name: str, batch: int, kv_head: int, length: int
) -> Any:
    """Keys or values of one sequence and head, (length, head_dim), without scale factors of an 8-bit cache
    forgotten."""
    x, table, factor = arrays[name], arrays.get("block_table"), arrays.get(f"{name}_scale")
    if table is None:
        tokens = x[batch, kv_head]
    else:
        tokens = x[table[batch, : -(-length // x.shape[2])], kv_head].reshape(-1, x.shape[-1])
    wide = _float64(tokens[:length], problem.k_element if name == "k" else problem.v_element)
    return wide if factor is None else wide * factor[kv_head]


def _attend(problem: Problem, q: Any, k: Any, v: Any, query: int) -> Any:
    """One row, by sums alone: CuPy has no matrix products without cuBLAS. NumPy's functions call CuPy's for
    its arrays."""
    seen = np.flatnonzero(problem.mask.visible([query], np.arange(len(k)), problem.seqlen_q, len(k))[0])
    if not len(seen):
        return np.zeros_like(q)
    if seen[-1] - seen[0] + 1 == len(seen):
        k, v = (x[seen[0] : seen[-1] + 1] for x in (k, v))
    else:
        k, v = (x[_beside(x, seen)] for x in (k, v))
    s = (k * q).sum(axis=1) * problem.scale
    if problem.softcap is not None:
        s = softcapped(s, problem.softcap)
    p = np.exp(s - s.max())
    return (v * p[:, None]).sum(axis=0) / p.sum()


def _float64(x: Any, element: Element) -> Any:
    """By the bits, as CuPy knows neither bfloat16 nor e4m3."""
    if element.itemsize == 1:
        numbers = np.arange(256, dtype=np.uint8).view(element.dtype).astype(np.float64)
        return _beside(x, numbers)[x.view(np.uint8).astype(np.int32)]
    if element.name == "bfloat16":
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def _beside(x: Any, numbers: Any) -> Any:
    if not is_device_array(x):
        return numbers
    import cupy

    return cupy.asarray(numbers)
